"""Follows what programs of a rehearsal compute on the host from copies whose values are not known.

A few ops are followed: those from which conditions and sizes are made. They are overridden at the first such copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..ops import bindings, schemas
from ..ops.op import SCALARS, as_tensor
from .comparisons import has_one_answer
from .known_values import COUNT, KNOWN, NOT_NEGATIVE, UNKNOWN, call_at_first_copy, copied_to_host, state_of
from .missing_values import note

_FOLLOWED = (
    *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or"),
    *("bitwise_not", "isin", "any", "all", "max", "min", "amax", "amin", "sum", "mean", "argmax", "argmin", "count_nonzero"),
    *("add", "sub", "mul", "div", "clamp", "floor", "ceil", "round", "softmax", "_softmax", "sigmoid", "exp", "topk", "sort"),
    *("cumsum", "cat", "stack", "clone", "copy_", "multinomial", "where", "gather", "index_select"),
)
_DECIDE_SHAPES_ON_HOST = ("nonzero", "masked_select", "index", "_unique2", "bincount")
_COUNTS = ("sum", "count_nonzero")
# The dispatcher visits this key for tensors of every device, before the key of the device.
_KEY = bindings.DispatchKey.BackendSelect

_libraries: list[Any] = []  # the overrides end with their library


def install() -> None:
    """Follow ops of the host from the first copy on whose values are not known."""
    call_at_first_copy(_override)


def _override() -> None:
    library = bindings.make_library("IMPL", "aten", "", __file__, 0)
    _libraries.append(library)
    followed = {f"aten::{name}" for name in (*_FOLLOWED, *_DECIDE_SHAPES_ON_HOST)}
    for name in bindings.op_names_of_key("CPU") + bindings.op_names_of_key("CompositeExplicitAutograd"):
        base, overload = schemas.split(name)
        if base in followed and not overload.endswith("out"):
            library.impl(name, _KEY, _following(name), True)


def _following(name: str) -> Callable[..., Any]:
    _, overload = schemas.split(name)
    short_name = schemas.short_name(name)
    takes_tensor = [str(argument.type) == "Tensor" for argument in schemas.schema_of(name).arguments]
    operator: Any = getattr(getattr(torch.ops.aten, short_name), overload or "default")
    below = bindings.keys_after(_KEY)
    decides_shape, counts = short_name in _DECIDE_SHAPES_ON_HOST, short_name in _COUNTS
    copies = short_name in ("copy_", "clone")

    def run(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple(
            as_tensor(value) if is_tensor and isinstance(value, SCALARS) else value
            for value, is_tensor in zip(args, takes_tensor, strict=False)
        )
        result = operator.redispatch(keyset & below, *args, **kwargs)
        state = state_of((*args, *kwargs.values()))
        if state == KNOWN or not _is_on_host(result) or has_one_answer(short_name, args):
            return result
        if decides_shape and (short_name != "index" or _has_masks(args[1])):
            note(name)
        if state == NOT_NEGATIVE and not copies:
            state = UNKNOWN
        for tensor in result if isinstance(result, tuple) else (result,):
            copied_to_host(tensor, COUNT if counts and args[0].dtype is torch.bool else state)
        return result

    return run


def _is_on_host(result: Any) -> bool:
    first = result[0] if isinstance(result, tuple) else result
    return isinstance(first, torch.Tensor) and first.is_cpu


def _has_masks(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
