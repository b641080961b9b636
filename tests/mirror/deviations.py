"""The deviations from ``torch.accelerator``, which the table of docs/differences.md lists and the differential tests allow.

Outside them, results and exception types are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

COUNT = 2

TAKES_DEVICE = (
    "set_device_index",
    "set_device_idx",
    "device_index",
    "current_stream",
    "synchronize",
    "get_device_capability",
    "get_memory_info",
    "memory_stats",
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "reset_peak_memory_stats",
    "reset_accumulated_memory_stats",
    "random.initial_seed",
    "random.get_rng_state",
)
NEGATIVE_DOES_NOTHING = ("set_device_index", "set_device_idx", "device_index")
NEGATIVE_IS_CURRENT = ("current_stream", "synchronize", "get_memory_info")
UNCHECKED_BEFORE_INITIALIZATION = (
    "synchronize",
    *(name for name in TAKES_DEVICE if name.startswith(("memory_", "max_memory_", "reset_"))),
)

# The first column of README's table of deviations, in its order.
ROWS = (
    "wrong kind (float, bytes, list, bool)",
    "index out of range",
    "negative index",
    "no accelerator",
    "`is_available()`",
    "`synchronize()`, memory functions uninitialized",
    "`current_device_index()`, `get_memory_info()` uninitialized",
    "`device_index`",
    "`get_device_capability`, `Graph` on CUDA",
    "bad fork",
)


class Raises(NamedTuple):
    """This package raises; ``row`` names the deviation."""

    row: str
    error: type[Exception]


class ActsAs(NamedTuple):
    """This package does what ``torch.accelerator`` does for another argument."""

    row: str
    argument: Any


class Works(NamedTuple):
    """This package returns a result where ``torch.accelerator`` raises, or from another source; other tests check it."""

    row: str


class Indexable:
    """An integer that is no int, as numpy's are."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


def expected(operation: str, argument: Any, *, initialized: bool) -> Raises | ActsAs | Works | None:
    """Return what the table says of a call on two visible CUDA devices, or None if the results must be equal."""
    if operation not in TAKES_DEVICE:
        return None
    error = next(_errors(operation, argument, initialized), None)
    if error is not None:
        return error
    if operation == "get_device_capability":
        return Works(ROWS[8])
    if operation == "get_memory_info" and not initialized:
        return Works(ROWS[6])
    index = _get_index(argument)
    if index is not None and index < 0:
        return ActsAs(ROWS[2], None if operation in NEGATIVE_IS_CURRENT or operation == "device_index" else -1)
    if operation == "device_index" and not isinstance(argument, int):
        return ActsAs(ROWS[7], index)
    if isinstance(argument, Indexable):
        return ActsAs(ROWS[0], index)
    return None


def _errors(operation: str, argument: Any, initialized: bool) -> Iterator[Raises]:
    if isinstance(argument, (bool, float, bytes, list)):
        yield Raises(ROWS[0], TypeError)
    if operation == "device_index":
        row: str | None = ROWS[7]
    elif operation in UNCHECKED_BEFORE_INITIALIZATION and not initialized:
        row = ROWS[5]
    elif operation == "get_device_capability":
        row = ROWS[8]
    else:
        row = None
    if operation == "get_memory_info" and not initialized:
        row = ROWS[6]
    if row and isinstance(argument, (str, torch.device)):
        try:
            device = torch.device(argument)
        except RuntimeError:
            yield Raises(row, RuntimeError)
        else:
            if device.type != "cuda":
                yield Raises(row, ValueError)
    index = _get_index(argument)
    if index is not None and index >= COUNT:
        yield Raises(ROWS[1], ValueError)
    if index is not None and index < 0 and operation not in NEGATIVE_DOES_NOTHING + NEGATIVE_IS_CURRENT:
        yield Raises(ROWS[2], ValueError)


def _get_index(argument: Any) -> int | None:
    if isinstance(argument, Indexable):
        return argument.value
    if isinstance(argument, int):
        return argument
    if isinstance(argument, str):
        try:
            argument = torch.device(argument)
        except RuntimeError:
            return None
    return argument.index if isinstance(argument, torch.device) and argument.type == "cuda" else None
