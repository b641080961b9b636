"""Tells race detection which memory a Triton kernel loads and stores in Triton's interpreter."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .._kernels import accesses

__all__ = ["hook_accesses"]

# Per launch. A kernel that touches more separate pieces counts as possibly touching all between them.
_MAXIMUM_RANGES = 256


class _Launch(threading.local):
    """The accesses of the kernel that a thread runs."""

    ranges: dict[int, list[Any]] | None = None  # arrays of starts and ends, by the flags of the access


_launch = _Launch()


def hook_accesses(interpreter: ModuleType, launch: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that launches a kernel and records its accesses on the current stream."""
    if not accesses.FINDS_RACES:
        return launch
    np: Any = interpreter.np
    builder: Any = interpreter.InterpreterBuilder

    def note(flags: int, pointers: Any, mask: Any, item_size: int) -> None:
        if _launch.ranges is None:
            return
        addresses = pointers.data if mask is None else pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        if addresses.size:
            starts = np.unique(addresses.ravel().astype(np.int64))
            _launch.ranges[flags].append(_merge(np, starts, starts + item_size))

    def wrap(name: str, flags: int, pointers: int, mask: int | None, value: int | None) -> None:
        original = getattr(builder, name)

        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            stored = result if value is None else args[value]
            note(flags, args[pointers], None if mask is None else args[mask], stored.data.dtype.itemsize)
            return result

        setattr(builder, name, run)

    wrap("create_masked_load", 0, 0, 1, None)
    wrap("create_masked_store", accesses.WRITES, 0, 2, 1)
    wrap("create_atomic_cas", accesses.WRITES, 0, None, 2)
    wrap("create_atomic_rmw", accesses.WRITES, 1, 3, 2)

    def launch_and_record(self: Any, *args: Any, **kwargs: Any) -> Any:
        outer, _launch.ranges = _launch.ranges, {0: [], accesses.WRITES: []}
        try:
            result = launch(self, *args, **kwargs)
            ranges = [(*each, flags) for flags, found in _launch.ranges.items() for each in _whole(np, found)]
        finally:
            _launch.ranges = outer
        name = getattr(getattr(self, "fn", None), "__name__", "kernel")
        accesses.record_ranges(f"Triton's {name}", [(start, end, flags | part) for start, end, part, flags in ranges])
        return result

    return launch_and_record


def _merge(np: Any, starts: Any, ends: Any) -> Any:
    """Merge sorted ranges that touch or overlap."""
    ends = np.maximum.accumulate(ends)
    begins = np.flatnonzero(np.concatenate(([True], starts[1:] > ends[:-1])))
    return np.stack((starts[begins], ends[np.append(begins[1:] - 1, len(ends) - 1)]))


def _whole(np: Any, found: list[Any]) -> list[tuple[int, int, int]]:
    """Return the ranges of a launch with a flag: all of a range is accessed, or only a part of it."""
    if not found:
        return []
    starts, ends = np.concatenate(found, axis=1)
    order = np.argsort(starts, kind="stable")
    merged = _merge(np, starts[order], ends[order])
    if merged.shape[1] > _MAXIMUM_RANGES:
        return [(int(merged[0, 0]), int(merged[1, -1]), accesses.PART)]
    return [(int(start), int(end), 0) for start, end in merged.T]
