"""Collectives of a rank without the other ranks, as if each rank passed what this one passes.

Those of objects are replaced, because torch's would send pickles through device memory that nobody writes, and of the others
`gather`, whose root gets what it sends from every rank.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ..._settings import LIMITS
from .distributed import replace
from .unknown_numbers import ObjectPickler


def install(c10d: ModuleType) -> None:
    """Replace the functions of ``torch.distributed``."""
    module: Any = c10d
    replace(module, "gather", _gather(module.gather))
    for function in (
        *(all_gather_object, gather_object, broadcast_object_list, scatter_object_list, send_object_list),
        recv_object_list,
    ):
        replace(module, function.__name__, function)


def _c10d() -> Any:
    return sys.modules["torch.distributed.distributed_c10d"]


def _size_of(group: Any) -> int:
    return int(_c10d().get_world_size(group))


def _is_rank(group: Any, rank: int | None, group_rank: int | None) -> bool:
    """Return whether this rank is the one that a call names by its global rank or by its rank in the group."""
    if group_rank is not None:
        return bool(_c10d().get_rank(group) == group_rank)
    return bool(_c10d().get_rank() == (rank or 0))


def _is_stranger(group: Any) -> bool:
    """Return whether this rank does not belong to a group. torch's collectives do nothing then."""
    return bool(_c10d().get_rank(group) < 0)


def _gather(gather: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(gather)
    def gather_from_equal_ranks(
        tensor: torch.Tensor,
        gather_list: list[torch.Tensor] | None = None,
        dst: int | None = None,
        group: Any = None,
        async_op: bool = False,
        **options: Any,
    ) -> Any:
        result = gather(tensor, gather_list, dst, group, async_op, **options)
        if gather_list and not _is_stranger(group) and _is_rank(group, dst, options.get("group_dst")):
            # nccl's root receives and copies its own part itself, so nccl does not know what this rank would send.
            for part in gather_list:
                if part.is_cuda and part.nbytes <= LIMITS["COPY"]:
                    part.copy_(tensor)
        return result

    return gather_from_equal_ranks


def _send(value: Any, group: Any, copies: int) -> _Pickle:
    """Pickle an object, and take the memory through which torch sends it and receives copies of it."""
    pickled = _Pickle(value)
    find = getattr(_c10d(), "_get_object_coll_device", None) or _c10d()._get_pg_default_device
    device = torch.device(find(group))
    if device.type == "cuda":
        buffers = [torch.empty(count * pickled.size, dtype=torch.uint8, device=device) for count in (1, copies)]
        del buffers
    return pickled


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None, *arguments: Any, **options: Any) -> None:
    if not _is_stranger(group):
        sent = _send(obj, group, _size_of(group))
        object_list[:] = [sent.load() for _ in range(_size_of(group))]


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Any = None,
    group_dst: int | None = None,
    **options: Any,
) -> None:
    if _is_stranger(group):
        return
    is_root = object_gather_list is not None and _is_rank(group, dst, group_dst)
    sent = _send(obj, group, _size_of(group) if is_root else 0)
    if object_gather_list is not None and is_root:
        object_gather_list[:] = [sent.load() for _ in range(_size_of(group))]


def broadcast_object_list(object_list: list[Any], src: int | None = None, group: Any = None, **options: Any) -> None:
    if not _is_stranger(group):
        _send(object_list, group, 0)  # as if the sender had passed what this rank passes


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: Any = None,
    group_src: int | None = None,
    **options: Any,
) -> None:
    if _is_stranger(group):
        return
    if not scatter_object_input_list or not _is_rank(group, src, group_src):
        raise _nobody_sends("scatter_object_list")
    scatter_object_output_list[0] = scatter_object_input_list[_c10d().get_rank(group)]


def send_object_list(*arguments: Any, **options: Any) -> None:
    pass


def recv_object_list(*arguments: Any, **options: Any) -> int:
    raise _nobody_sends("recv_object_list")


class _Pickle:
    """A pickled object, with its tensors beside it: their memory may be larger than the host's.

    Attributes:
        size: Bytes that torch would send.
    """

    def __init__(self, value: Any) -> None:
        self._tensors: list[torch.Tensor] = []
        buffer = io.BytesIO()
        pickler = ObjectPickler(buffer)
        pickler.persistent_id = self._keep  # type: ignore[method-assign]
        pickler.dump(value)
        self._data = buffer.getvalue()
        self.size = len(self._data) + sum(tensor.nbytes for tensor in self._tensors)

    def _keep(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        self._tensors.append(value)
        return len(self._tensors) - 1

    def load(self) -> Any:
        """Return a copy of the object."""
        unpickler: Any = pickle.Unpickler(io.BytesIO(self._data))
        unpickler.persistent_load = self._copy
        return unpickler.load()

    def _copy(self, number: int) -> torch.Tensor:
        tensor = self._tensors[number]
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _nobody_sends(name: str) -> RuntimeError:
    return RuntimeError(
        f"{name}: this rank is rehearsed alone, so no other rank sends it an object; pass the object where it is needed, such"
        " as a pipeline stage's input and output shapes"
    )
