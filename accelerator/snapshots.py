"""Details of the allocator's memory: a summary, snapshots, and the history of allocations."""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

import torch

from . import memory
from ._machine.device_argument import Device
from ._machine.discovery_result import NotSupported
from ._torch import bindings, lazy_calls, state, tracing
from ._torch.tracing import traced_as

__all__ = ["dump_memory_snapshot", "memory_snapshot", "memory_summary", "record_memory_history"]


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """Return a printable table of the allocator's statistics of a device.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.
        abbreviated: leave out the lines about the pools of large and small blocks.

    Returns:
        The text; all numbers are zero before initialization and under the CPU fallback. Mirrors
        ``torch.cuda.memory_summary``.

    Example:
        >>> "Allocated memory" in acc.memory_summary(abbreviated=True)
        True
    """
    runtime = state.current(device)
    index = runtime.device_index
    stats = memory.memory_stats(index)
    pools = (("all", ""),) if abbreviated else (("all", ""), ("large_pool", "large"), ("small_pool", "small"))
    ooms, retries = stats.get("num_ooms", 0), stats.get("num_alloc_retries", 0)
    name = runtime.device_type.upper()
    malloc = f"{runtime.device_type}Malloc"
    lines = [
        "=" * _WIDTH,
        f" {'':16} PyTorch {name} memory summary, device ID {index:<{21 - len(name)}d} ",
        "-" * _WIDTH,
        f"  {'':9} {name} OOMs: {ooms:<{16 - len(name)}d} | {'':6} {malloc} retries: {retries:<{18 - len(malloc)}d}  ",
        "=" * _WIDTH,
        "        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  ",
    ]
    for metric, title, is_size in _METRICS:
        lines.append("-" * _WIDTH)
        # One unit for each column, so that the pools add up to the total above them.
        totals = [stats.get(f"{metric}.all.{column}", 0) for column in _COLUMNS]
        for pool, pool_name in pools:
            values = [stats.get(f"{metric}.{pool}.{column}", 0) for column in _COLUMNS]
            label = f"      from {pool_name} pool" if pool_name else title
            lines.append(_line(label, [_scaled(*pair, is_size) for pair in zip(values, totals, strict=True)]))
    for metric, title in _OVERSIZE:
        values = [stats.get(f"{metric}.{column}", 0) for column in _COLUMNS]
        lines += ["-" * _WIDTH, _line(title, [_scaled(value, value, is_size=False) for value in values])]
    lines.append("=" * _WIDTH)
    return "".join(f"|{line}|\n" for line in lines)


_WIDTH = 75
_COLUMNS = ("current", "peak", "allocated", "freed")
_METRICS = (
    ("allocated_bytes", "Allocated memory", True),
    ("active_bytes", "Active memory", True),
    ("requested_bytes", "Requested memory", True),
    ("reserved_bytes", "GPU reserved memory", True),
    ("inactive_split_bytes", "Non-releasable memory", True),
    ("allocation", "Allocations", False),
    ("active", "Active allocs", False),
    ("segment", "GPU reserved segments", False),
    ("inactive_split", "Non-releasable allocs", False),
)
_OVERSIZE = (("oversize_allocations", "Oversize allocations"), ("oversize_segments", "Oversize GPU segments"))


def _line(label: str, cells: list[str]) -> str:
    return f" {label:<21} | {' | '.join(cells)} "


def _scaled(value: int, total: float, is_size: bool) -> str:
    """Format a value in the unit in which the total has at most six digits."""
    units: tuple[str, ...]
    if is_size:
        units, step, limit = ("B  ", "KiB", "MiB", "GiB", "TiB", "PiB"), 1024, 768 * 1024
    else:
        units, step, limit = (" ", "K", "M"), 1000, 750 * 1000
    unit = 0
    while total >= limit and unit < len(units) - 1:
        value, total, unit = value // step, total / step, unit + 1
    return f"{value:6d} {units[unit]}" if is_size else f"{value:7d} {units[unit]} "


@traced_as(tracing.memory_snapshot)
def memory_snapshot(mempool_id: tuple[int, int] | None = None, include_traces: bool = True) -> list[dict[str, Any]]:
    """Return the segments, with their blocks, that the allocators of all devices hold.

    Args:
        mempool_id: return the segments of this memory pool only, from a graph's ``pool()``. Needs torch 2.8.
        include_traces: also collect the history of allocations, which takes time and is not part of the result. False needs
            CUDA and torch 2.11.

    Returns:
        One dictionary for each segment; empty before initialization and under the CPU fallback. Mirrors
        ``torch.cuda.memory_snapshot``.

    Raises:
        RuntimeError: if torch has no snapshots for this accelerator; in a bad fork.

    Example:
        >>> kept = acc.FloatTensor([1.0])
        >>> sum(segment["total_size"] for segment in acc.memory_snapshot() if segment["device"] == 0) == acc.memory_reserved(0)
        True
    """
    if mempool_id is not None and not isinstance(mempool_id, (tuple, list)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"mempool_id must be a tuple of two ints, not {type(mempool_id).__name__}")
    runtime = state.current()
    if not runtime.is_initialized:
        return []
    arguments = () if mempool_id is None and include_traces else (mempool_id,)
    snapshot = runtime.function("memory_snapshot")
    try:
        segments: list[dict[str, Any]] = snapshot(*arguments) if include_traces else snapshot(*arguments, include_traces=False)
    except TypeError as error:
        if "include_traces" not in str(error):
            raise
        function = f"torch.{runtime.device_type}.memory_snapshot()"
        raise NotSupported(f"{function} of torch {torch.__version__} does not take include_traces") from None
    return segments


def record_memory_history(
    enabled: str | None = "all",
    context: str | None = "all",
    stacks: str = "all",
    max_entries: int = sys.maxsize,
    **options: Any,
) -> None:
    """Start recording allocations with the code that made them, for ``dump_memory_snapshot``.

    Args:
        enabled: "all" to record current and freed allocations, "state" for current ones only, None to stop.
        context: record stacks for allocating and freeing ("all"), for allocating ("alloc"), for current allocations
            ("state"), or not at all (None).
        stacks: "python" for Python frames, "all" for C++ frames too.
        max_entries: the number of events to keep; older ones are dropped.
        options: further options of newer releases of torch, such as ``clear_history=True``.

    Raises:
        TypeError: if this torch does not have an option, or ``max_entries`` is not an int.
        ValueError: for any other value.
        RuntimeError: if torch has no history for this accelerator; in a bad fork.

    Before initialization the call is queued. Does nothing under the CPU fallback. Torch's own function is private:
    ``torch.cuda.memory._record_memory_history``.

    Example:
        >>> acc.record_memory_history(max_entries=100_000)
        >>> acc.record_memory_history(None)
    """
    _check_word("enabled", enabled, ("all", "state", None))
    _check_word("context", context, ("all", "alloc", "state", None))
    _check_word("stacks", stacks, ("all", "python"))
    if isinstance(max_entries, bool) or not isinstance(max_entries, int):
        raise TypeError(f"max_entries must be an int, not {type(max_entries).__name__} ({max_entries!r})")
    if not 1 <= max_entries <= sys.maxsize:
        raise ValueError(f"max_entries must be from 1 to {sys.maxsize}, not {max_entries}")
    runtime = state.current()
    if runtime.device_type == "cpu":
        return
    record = runtime.function(bindings.RECORD_MEMORY_HISTORY)
    # Check now: a queued call must not fail during the initialization.
    bindings.memory_history_signature(runtime.device_module, record).bind(enabled, context, stacks, max_entries, **options)

    def record_now() -> None:
        record(enabled, context, stacks, max_entries, **options)

    lazy_calls.run(record_now)


def _check_word(name: str, word: Any, words: tuple[str | None, ...]) -> None:
    if word not in words:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, words))}, not {word!r}")


def dump_memory_snapshot(path: str | os.PathLike[str]) -> None:
    """Write a snapshot of the allocators' memory to a file, with the history if it is recorded.

    https://docs.pytorch.org/memory_viz and ``python -m torch.cuda._memory_viz`` show it.

    Args:
        path: the file to write, a pickle.

    Raises:
        OSError: if the file cannot be written.
        RuntimeError: if torch has no snapshots for this accelerator; in a bad fork.

    Before initialization and under the CPU fallback the snapshot is empty. Torch's own function is private:
    ``torch.cuda.memory._dump_snapshot``.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "snapshot.pickle")
        >>> acc.dump_memory_snapshot(path)
        >>> os.path.getsize(path) > 0
        True
    """
    runtime = state.current()
    if not runtime.is_initialized:
        snapshot: Any = {"segments": [], "device_traces": []}
    else:
        snapshot = runtime.function(bindings.MEMORY_SNAPSHOT)()
    with open(path, "wb") as file:
        pickle.dump(snapshot, file)
