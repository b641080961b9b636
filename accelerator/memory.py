"""Statistics, caches and limits of the memory allocators: the device's and that of pinned host memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ._machine.device_argument import Device
from ._machine.dynamo import assume_constant
from ._torch import bindings, lazy_calls, state, tracing, versions
from ._torch.bindings import get_index, restore_index
from ._torch.tracing import traced_as

__all__ = [
    "OutOfMemoryError",
    "create_mem_pool",
    "empty_cache",
    "empty_host_cache",
    "get_allocator_backend",
    "get_per_process_memory_fraction",
    "host_memory_stats",
    "host_memory_stats_as_nested_dict",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "reset_accumulated_host_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_peak_host_memory_stats",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
    "use_mem_pool",
]

OutOfMemoryError = torch.OutOfMemoryError

_COLUMNS = ("current", "peak", "allocated", "freed")
_COUNTED_BY_POOL = ("allocation", "segment", "active", "inactive_split")
_BYTES_BY_POOL = ("allocated_bytes", "reserved_bytes", "active_bytes", "inactive_split_bytes", "requested_bytes")
_COUNTED = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")


def _zeros() -> dict[str, Any]:
    """Return statistics of an allocator that has allocated nothing: those that torch has for every accelerator."""
    columns = dict.fromkeys(_COLUMNS, 0)
    pools = ("all", "large_pool", "small_pool")
    return {
        **{name: {pool: dict(columns) for pool in pools} for name in (*_COUNTED_BY_POOL, *_BYTES_BY_POOL)},
        **{name: dict(columns) for name in ("oversize_allocations", "oversize_segments")},
        **dict.fromkeys(_COUNTED, 0),
        "max_split_size": -1,  # none
    }


def _statistics(device: Device) -> dict[str, Any]:
    """Return torch's nested statistics of the allocator; empty before initialization and if the backend has none."""
    runtime = state.current(device)
    if runtime.device_type == "cpu":
        return _zeros()
    return (bindings.memory_statistics(runtime.device_index) or {}) if runtime.is_initialized else {}


def _counter(device: Device, name: str, statistic: str, column: str) -> int:
    """Return one statistic in bytes: from torch's statistics, else from the function of the accelerator's module."""
    runtime = state.current(device)
    if not runtime.is_initialized:
        return 0
    statistics = bindings.memory_statistics(runtime.device_index)
    if statistics and statistic in statistics:  # a vendor's own statistics may have other names
        counter: int = statistics[statistic]["all"][column]
        return counter
    return int(runtime.function(name)(*runtime.module_arguments))


def memory_allocated(device_index: Device = None, /) -> int:
    """Return the number of bytes that tensors occupy on a device.

    Args:
        device_index: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        Bytes; 0 before initialization and under the CPU fallback. Mirrors
        ``torch.accelerator.memory_allocated``.

    Raises:
        RuntimeError: if torch does not report it for this accelerator; in a bad fork.

    Example:
        >>> before = acc.memory_allocated()
        >>> kept = acc.FloatTensor([1.0])
        >>> acc.memory_allocated() - before
        512
    """
    return _counter(device_index, "memory_allocated", "allocated_bytes", "current")


def max_memory_allocated(device_index: Device = None, /) -> int:
    """Return the peak number of bytes that tensors occupied on a device, since the last ``reset_peak_memory_stats``.

    Args:
        device_index: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        Bytes; 0 before initialization and under the CPU fallback. Mirrors
        ``torch.accelerator.max_memory_allocated``.

    Raises:
        RuntimeError: if torch does not report it for this accelerator; in a bad fork.

    Example:
        >>> acc.reset_peak_memory_stats()
        >>> total = acc.FloatTensor([1.0, 2.0]).sum().item()
        >>> acc.max_memory_allocated() > acc.memory_allocated()
        True
    """
    return _counter(device_index, "max_memory_allocated", "allocated_bytes", "peak")


def memory_reserved(device_index: Device = None, /) -> int:
    """Return the number of bytes that the allocator holds on a device, including its cache.

    Args:
        device_index: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        Bytes; 0 before initialization and under the CPU fallback. Mirrors
        ``torch.accelerator.memory_reserved``.

    Raises:
        RuntimeError: if torch does not report it for this accelerator; in a bad fork.

    Example:
        >>> kept = torch.ones(64 << 20, dtype=torch.uint8, device=acc.device())
        >>> acc.memory_reserved() >= kept.nbytes
        True
    """
    return _counter(device_index, "memory_reserved", "reserved_bytes", "current")


def max_memory_reserved(device_index: Device = None, /) -> int:
    """Return the peak number of bytes that the allocator held on a device, since the last ``reset_peak_memory_stats``.

    Args:
        device_index: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        Bytes; 0 before initialization and under the CPU fallback. Mirrors
        ``torch.accelerator.max_memory_reserved``.

    Raises:
        RuntimeError: if torch does not report it for this accelerator; in a bad fork.

    Example:
        >>> acc.empty_cache()
        >>> acc.reset_peak_memory_stats()
        >>> large = torch.ones(64 << 20, dtype=torch.uint8, device=acc.device())
        >>> del large
        >>> acc.empty_cache()
        >>> (acc.max_memory_reserved() - acc.memory_reserved()) >> 20
        64
    """
    return _counter(device_index, "max_memory_reserved", "reserved_bytes", "peak")


def memory_stats(device_index: Device = None, /) -> OrderedDict[str, Any]:
    """Return the allocator's statistics of a device, by dotted names such as "allocated_bytes.all.current".

    Args:
        device_index: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        Bytes and counts, sorted by name; empty before initialization, zeros under the CPU fallback. Mirrors
        ``torch.accelerator.memory_stats``.

    Example:
        >>> kept = acc.FloatTensor([1.0])
        >>> acc.memory_stats()["allocated_bytes.all.current"] >= kept.nbytes
        True
    """
    return OrderedDict(sorted(_flat("", _statistics(device_index))))


def memory_stats_as_nested_dict(device: Device = None) -> dict[str, Any]:
    """Return the allocator's statistics of a device as nested dictionaries: ``["allocated_bytes"]["all"]["current"]``.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        Bytes and counts; empty before initialization, zeros under the CPU fallback. Mirrors
        ``torch.cuda.memory_stats_as_nested_dict``.

    Example:
        >>> kept = acc.FloatTensor([1.0])
        >>> acc.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"] >= kept.nbytes
        True
    """
    runtime = state.current(device)
    if runtime.device_type == "cpu":
        return _zeros()
    if not runtime.is_initialized:
        return {}
    # The module's own function returns more statistics than the binding for all accelerators.
    read = runtime.find_function("memory_stats_as_nested_dict") or bindings.memory_statistics
    statistics: dict[str, Any] = read(runtime.device_index) or {}
    return statistics


def host_memory_stats() -> OrderedDict[str, Any]:
    """Return the statistics of the allocator of pinned host memory, by dotted names such as "allocated_bytes.current".

    Returns:
        Bytes, counts and microseconds, sorted by name; empty before initialization, under the CPU fallback, before torch 2.7
        and on accelerators whose module reports none. Mirrors ``torch.cuda.host_memory_stats``.

    Example:
        >>> kept = acc.pin_empty(1 << 20)
        >>> stats = acc.host_memory_stats()  # empty with torch 2.6
        >>> not stats or stats["active_bytes.current"] >= kept.nbytes
        True
    """
    return OrderedDict(sorted(_flat("", host_memory_stats_as_nested_dict())))


def host_memory_stats_as_nested_dict() -> dict[str, Any]:
    """Return the statistics of the allocator of pinned host memory as nested dictionaries: ``["allocated_bytes"]["peak"]``.

    Returns:
        Bytes, counts and microseconds; empty if ``host_memory_stats()`` is. Mirrors
        ``torch.cuda.host_memory_stats_as_nested_dict``.

    Example:
        >>> kept = acc.pin_empty(1 << 20)
        >>> stats = acc.host_memory_stats_as_nested_dict()  # empty with torch 2.6
        >>> not stats or stats["active_bytes"]["current"] >= kept.nbytes
        True
    """
    read: Any = _of_host_allocator("host_memory_stats_as_nested_dict")
    return read() if read else {}


def reset_peak_host_memory_stats() -> None:
    """Reset the peak statistics of pinned host memory to the current values.

    Mirrors ``torch.cuda.reset_peak_host_memory_stats``; does nothing if ``host_memory_stats()`` is empty.

    Example:
        >>> acc.reset_peak_host_memory_stats()
    """
    reset: Any = _of_host_allocator("reset_peak_host_memory_stats")
    if reset:
        reset()


def reset_accumulated_host_memory_stats() -> None:
    """Reset the accumulated statistics of pinned host memory to zero.

    Mirrors ``torch.cuda.reset_accumulated_host_memory_stats``; does nothing if ``host_memory_stats()`` is empty.

    Example:
        >>> acc.reset_accumulated_host_memory_stats()
    """
    reset: Any = _of_host_allocator("reset_accumulated_host_memory_stats")
    if reset:
        reset()


def _of_host_allocator(name: str) -> Any:
    """Return the module's function for pinned host memory; None before initialization and if the module has none."""
    runtime = state.current()
    return runtime.find_function(name) if runtime.is_initialized else None


def _flat(prefix: str, statistics: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in statistics.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


@traced_as(tracing.reset_peak_memory_stats)
def reset_peak_memory_stats(device_index: Device = None, /) -> None:
    """Reset the peak statistics of a device to the current values.

    Args:
        device_index: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Mirrors ``torch.accelerator.reset_peak_memory_stats``; does nothing before initialization and under the CPU fallback.

    Example:
        >>> acc.reset_peak_memory_stats()
    """
    runtime = state.current(device_index)
    if runtime.is_initialized:
        bindings.reset_peak_memory_stats(runtime.device_index)


def reset_accumulated_memory_stats(device_index: Device = None, /) -> None:
    """Reset the accumulated statistics of a device to zero.

    Args:
        device_index: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Mirrors ``torch.accelerator.reset_accumulated_memory_stats``; does nothing before initialization and under the CPU fallback.

    Example:
        >>> acc.reset_accumulated_memory_stats()
    """
    runtime = state.current(device_index)
    if runtime.is_initialized:
        bindings.reset_accumulated_memory_stats(runtime.device_index)


@traced_as(tracing.empty_cache)
def empty_cache() -> None:
    """Release the memory that the allocator caches, so that other processes can use it.

    Mirrors ``torch.accelerator.empty_cache``; does nothing before initialization and under the CPU fallback.

    Example:
        >>> acc.empty_cache()
    """
    if state.current().is_initialized:
        bindings.empty_cache()


def empty_host_cache() -> None:
    """Release the pinned host memory that its allocator caches.

    Mirrors ``torch.accelerator.empty_host_cache``; does nothing before initialization and under the CPU fallback.

    Example:
        >>> acc.empty_host_cache()
    """
    runtime = state.current()
    is_safe = runtime.vendor.has_host_allocator or versions.TORCH_2_15
    if runtime.is_initialized and bindings.empty_host_cache and is_safe:
        bindings.empty_host_cache()


# Fractions that were set by device index, for get_per_process_memory_fraction() before initialization.
_fractions: dict[int, float] = {}


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Limit the share of a device's memory that this process's allocator may use. Beyond it, allocations fail.

    Args:
        fraction: the share of the total memory, from 0 to 1.
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Raises:
        ValueError: if the fraction is not from 0 to 1.
        TypeError: if the fraction is not a float.
        RuntimeError: if torch has no such limit for this accelerator; in a bad fork.

    Before initialization the limit is queued. Does nothing under the CPU fallback. Mirrors
    ``torch.cuda.set_per_process_memory_fraction``.

    Example:
        >>> acc.set_per_process_memory_fraction(1.0)
    """
    if not isinstance(fraction, float):
        raise TypeError(f"The memory fraction must be a float, not {type(fraction).__name__} ({fraction!r})")
    if not 0 <= fraction <= 1:
        raise ValueError(f"The memory fraction must be from 0 to 1, not {fraction!r}")
    runtime = state.current(device)
    if runtime.device_type == "cpu":
        return
    set_fraction, index = runtime.function("set_per_process_memory_fraction"), runtime.device_index
    arguments = (fraction, *runtime.module_arguments)
    lazy_calls.run(lambda: _call_and_restore_device(set_fraction, *arguments))
    _fractions[index] = fraction


@assume_constant
def get_per_process_memory_fraction(device: Device = None) -> float:
    """Return the share of a device's memory that this process's allocator may use.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        The share, from 0 to 1. Before initialization the value that ``set_per_process_memory_fraction`` queued, or 1; 1 under
        the CPU fallback. Mirrors ``torch.cuda.get_per_process_memory_fraction``.

    Example:
        >>> acc.get_per_process_memory_fraction()
        1.0
    """
    runtime = state.current(device)
    if runtime.device_type == "cpu":
        return 1.0
    get_fraction = runtime.find_function("get_per_process_memory_fraction")
    if get_fraction and runtime.is_initialized:
        return float(_call_and_restore_device(get_fraction, runtime.device_index))
    return _fractions.get(runtime.device_index, 1.0)


def _call_and_restore_device(function: Callable[..., Any], *arguments: Any) -> Any:
    # torch 2.6 makes the device in the arguments the current one. `set_index` would make a context on the one before.
    current = get_index()
    try:
        return function(*arguments)
    finally:
        restore_index(current)


def get_allocator_backend() -> str:
    """Return the name of the allocator of device memory.

    Returns:
        The name that torch gives it: "native", or on CUDA also "cudaMallocAsync"; "cpu" under the CPU fallback. Mirrors
        ``torch.cuda.get_allocator_backend``.

    Raises:
        RuntimeError: if torch does not report it for this accelerator; in a bad fork.

    Example:
        >>> acc.get_allocator_backend()
        'native'
    """
    runtime = state.current()
    return "cpu" if runtime.device_type == "cpu" else str(runtime.function("get_allocator_backend")())


def create_mem_pool(**options: Any) -> Any:
    """Return a pool of device memory, from which ``use_mem_pool`` allocates.

    Args:
        **options: those of the accelerator's class: ``use_on_oom``, ``no_split`` or ``allocator`` on CUDA.

    Returns:
        The pool; None under the CPU fallback. Mirrors ``torch.cuda.MemPool``.

    Raises:
        RuntimeError: if torch has no pools for this accelerator; in a bad fork.

    Initializes: the accelerator.

    Example:
        >>> pool = acc.create_mem_pool()
        >>> with acc.use_mem_pool(pool):
        ...     x = acc.FloatTensor([1.0])
        >>> pool.use_count() > 0
        True
    """
    runtime = state.initialize()
    return None if runtime.device_type == "cpu" else runtime.function("MemPool")(**options)


def use_mem_pool(pool: Any, device: Device = None) -> AbstractContextManager[Any]:
    """Return a context manager in which this thread's allocations on a device come from a pool.

    Args:
        pool: a pool of ``create_mem_pool`` or the accelerator's class; None changes nothing.
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        The context manager; it changes nothing under the CPU fallback. Mirrors ``torch.cuda.use_mem_pool``.

    Raises:
        TypeError: if ``pool`` is a device.
        RuntimeError: if torch has no pools for this accelerator; in a bad fork.

    Example:
        >>> with acc.use_mem_pool(acc.create_mem_pool()):
        ...     x = acc.FloatTensor([1.0, 2.0])
        >>> x.sum().item()
        3.0
    """
    if isinstance(pool, (str, int, torch.device)):
        raise TypeError(f"use_mem_pool() takes a pool of create_mem_pool(), not {type(pool).__name__} ({pool!r})")
    runtime = state.current(device)
    if pool is None or runtime.device_type == "cpu":
        return nullcontext()
    context: AbstractContextManager[Any] = runtime.function("use_mem_pool")(pool, runtime.device_index)
    return context
