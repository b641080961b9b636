"""Which values of collectives are known: those that this rank passes decide, as if every rank passed such.

Collectives that write their argument in place leave the state of its memory. nccl moves a rank's part of at most 1 MiB.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ... import _settings
from ..import_hook import after_import
from ..ops import bindings
from .computing import SMALL_COPY
from .known_values import UNKNOWN, state_of, written
from .unknown_numbers import ObjectPickler

# By op, the positions of what it writes and of what it reads. Nothing is known of a message from another rank.
_OUT_OF_PLACE: dict[str, tuple[int, int | None]] = {
    "allgather_": (0, 1),
    "_allgather_base_": (0, 1),
    "allgather_coalesced_": (0, 1),
    "allgather_into_tensor_coalesced_": (0, 1),
    "reduce_scatter_": (0, 1),
    "_reduce_scatter_base_": (0, 1),
    "reduce_scatter_tensor_coalesced_": (0, 1),
    "gather_": (0, 1),
    "scatter_": (0, 1),
    "alltoall_": (0, 1),
    "alltoall_base_": (0, 1),
    "recv_": (0, None),
    "recv_any_source_": (0, None),
}

_is_alone = _settings.read("without_peers") == "1"
_libraries: list[Any] = []  # the overrides end with their library


def install() -> None:
    """Follow the values of collectives once the program imports ``torch.distributed``."""
    after_import("torch.distributed.distributed_c10d", _override)


def _override(c10d: ModuleType) -> None:
    library = bindings.make_library("IMPL", "c10d", "", __file__, 0)
    _libraries.append(library)
    distributed: Any = c10d
    distributed._pickler = ObjectPickler
    if _is_alone:
        library.impl("c10d::monitored_barrier_", bindings.DispatchKey.BackendSelect, _do_nothing)
    known = {*bindings.all_op_names()}
    for name in _OUT_OF_PLACE:
        if f"c10d::{name}" in known:
            # The dispatcher visits this key for tensors of every device, before the key of the device.
            library.impl(f"c10d::{name}", bindings.DispatchKey.BackendSelect, _following(name), True)


def _do_nothing(*_: Any) -> None:
    """Return from a barrier of gloo's: torch has no other backend with that one."""


def _following(name: str) -> Callable[..., Any]:
    operator: Any = getattr(torch.ops.c10d, name).default
    below = bindings.keys_after(bindings.DispatchKey.BackendSelect)
    target, source = _OUT_OF_PLACE[name]

    def run(keyset: Any, *arguments: Any, **options: Any) -> Any:
        result = operator.redispatch(keyset & below, *arguments, **options)
        sent = [] if source is None else tree_leaves(arguments[source])
        state = UNKNOWN if source is None or (_is_alone and not sent) else state_of(sent)
        is_moved = not _is_alone or _is_moved_alone(name, sent, arguments)
        for tensor in tree_leaves(arguments[target]):
            written(tensor, state if is_moved and tensor.nbytes <= SMALL_COPY else UNKNOWN)
        return result

    return run


def _is_moved_alone(name: str, sent: list[torch.Tensor], arguments: tuple[Any, ...]) -> bool:
    """Return whether a rank without peers gets what it sends to itself from every rank: if all parts have that size."""
    if name not in ("allgather_", "alltoall_", "alltoall_base_"):
        return True
    if name == "allgather_":
        return all(part.numel() == sent[0].numel() for part in tree_leaves(arguments[0]))
    rank = bindings.distributed().ProcessGroup.unbox(arguments[2]).rank()
    if name == "alltoall_":
        return all(part.numel() == sent[rank].numel() for part in tree_leaves(arguments[0]))
    received, given = arguments[3], arguments[4]
    return not received or (bool(given) and all(size == given[rank] for size in received))
