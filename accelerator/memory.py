"""What the memory allocators hold, of the device and of pinned host memory; giving their caches back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from ._machine.device_argument import Device
from ._machine.dynamo import assume_constant
from ._torch import bindings, lazy_calls, state, tracing
from ._torch.bindings import get_index, set_index
from ._torch.state import initialized
from ._torch.tracing import traced_as

__all__ = [
    "empty_cache",
    "empty_host_cache",
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
]


def _statistics(device: Device) -> dict[str, Any]:
    """The allocator's statistics as torch keeps them, nested; empty while the accelerator is not initialized."""
    runtime = state.current(device)
    if not runtime.is_initialized:
        return {}
    try:
        statistics: dict[str, Any] = bindings.memory_statistics(runtime.device_index)
    except RuntimeError as error:
        if bindings.lacks_allocator(error):
            return {}
        raise
    return statistics


def memory_allocated(device_index: Device = None, /) -> int:
    """Return the bytes that tensors occupy on a device.

    Args:
        device_index: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        Bytes; 0 while the accelerator is not initialized and when the CPU stands in. Mirrors
        ``torch.accelerator.memory_allocated``.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.memory_allocated() >= 0
        True
    """
    statistics = _statistics(device_index)
    return statistics["allocated_bytes"]["all"]["current"] if statistics else 0


def max_memory_allocated(device_index: Device = None, /) -> int:
    """Return the bytes that tensors occupied on a device at most since the start or the last ``reset_peak_memory_stats``.

    Args:
        device_index: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        Bytes; 0 while the accelerator is not initialized and when the CPU stands in. Mirrors
        ``torch.accelerator.max_memory_allocated``.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.max_memory_allocated() >= 0
        True
    """
    statistics = _statistics(device_index)
    return statistics["allocated_bytes"]["all"]["peak"] if statistics else 0


def memory_reserved(device_index: Device = None, /) -> int:
    """Return the bytes that the allocator holds of a device, its cache included.

    Args:
        device_index: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        Bytes; 0 while the accelerator is not initialized and when the CPU stands in. Mirrors
        ``torch.accelerator.memory_reserved``.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.memory_reserved() >= 0
        True
    """
    statistics = _statistics(device_index)
    return statistics["reserved_bytes"]["all"]["current"] if statistics else 0


def max_memory_reserved(device_index: Device = None, /) -> int:
    """Return the bytes that the allocator held of a device at most, its cache included.

    That is since the start or the last ``reset_peak_memory_stats``.

    Args:
        device_index: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        Bytes; 0 while the accelerator is not initialized and when the CPU stands in. Mirrors
        ``torch.accelerator.max_memory_reserved``.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.max_memory_reserved() >= 0
        True
    """
    statistics = _statistics(device_index)
    return statistics["reserved_bytes"]["all"]["peak"] if statistics else 0


def memory_stats(device_index: Device = None, /) -> OrderedDict[str, Any]:
    """Return the allocator's statistics of a device, under dotted names such as "allocated_bytes.all.current".

    Args:
        device_index: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        Sorted by name, in bytes and counts; empty while the accelerator is not initialized and when the CPU stands in.
        Mirrors ``torch.accelerator.memory_stats``.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> kept = acc.FloatTensor([1.0])
        >>> acc.memory_stats()["allocated_bytes.all.current"] >= kept.nbytes
        True
    """
    return OrderedDict(sorted(_flat("", _statistics(device_index))))


def memory_stats_as_nested_dict(device: Device = None) -> dict[str, Any]:
    """Return the allocator's statistics of a device as torch keeps them, as in ``["allocated_bytes"]["all"]["current"]``.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        Bytes and counts; empty while the accelerator is not initialized and when the CPU stands in. Mirrors
        ``torch.cuda.memory_stats_as_nested_dict``.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> kept = acc.FloatTensor([1.0])
        >>> acc.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"] >= kept.nbytes
        True
    """
    runtime = state.current(device)
    if not runtime.is_initialized:
        return {}
    # CUDA's own have more than those that all accelerators have.
    of_backend = getattr(runtime.device_module, "memory_stats_as_nested_dict", _statistics)
    stats: dict[str, Any] = of_backend(runtime.device_index)
    return stats


def host_memory_stats() -> OrderedDict[str, Any]:
    """Return the statistics of the allocator of pinned host memory, under dotted names such as "allocated_bytes.current".

    Returns:
        Sorted by name, in bytes, counts and microseconds; empty while the accelerator is not initialized, when the CPU
        stands in, and where torch keeps none: before 2.7 and on accelerators other than CUDA's. Mirrors
        ``torch.cuda.host_memory_stats``.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> kept = acc.pin_empty(1 << 20)
        >>> stats = acc.host_memory_stats()  # torch 2.6 keeps none
        >>> not stats or stats["active_bytes.current"] >= kept.nbytes
        True
    """
    return OrderedDict(sorted(_flat("", host_memory_stats_as_nested_dict())))


def host_memory_stats_as_nested_dict() -> dict[str, Any]:
    """Return the statistics of the allocator of pinned host memory as torch keeps them, as in ``["allocated_bytes"]["peak"]``.

    Returns:
        Bytes, counts and microseconds; empty where ``host_memory_stats`` is. Mirrors
        ``torch.cuda.host_memory_stats_as_nested_dict``.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> kept = acc.pin_empty(1 << 20)
        >>> stats = acc.host_memory_stats_as_nested_dict()  # torch 2.6 keeps none
        >>> not stats or stats["active_bytes"]["current"] >= kept.nbytes
        True
    """
    kept: Any = _of_host("hostMemoryStats")
    return kept() if kept else {}


def reset_peak_host_memory_stats() -> None:
    """Start the peaks of the statistics of pinned host memory anew from the present values.

    Mirrors ``torch.cuda.reset_peak_host_memory_stats``; does nothing where ``host_memory_stats`` is empty.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.reset_peak_host_memory_stats()
    """
    reset: Any = _of_host("resetPeakHostMemoryStats")
    if reset:
        reset()


def reset_accumulated_host_memory_stats() -> None:
    """Start the accumulated counts of the statistics of pinned host memory anew from zero.

    Mirrors ``torch.cuda.reset_accumulated_host_memory_stats``; does nothing where ``host_memory_stats`` is empty.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.reset_accumulated_host_memory_stats()
    """
    reset: Any = _of_host("resetAccumulatedHostMemoryStats")
    if reset:
        reset()


def _of_host(binding: str) -> Any:
    """torch's binding for the allocator of pinned host memory; None before initialization and where torch has none."""
    runtime = state.current()
    return bindings.host_allocator(binding) if runtime.is_initialized and runtime.device_type == "cuda" else None


def _flat(prefix: str, statistics: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in statistics.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


@traced_as(tracing.reset_peak_memory_stats)
def reset_peak_memory_stats(device_index: Device = None, /) -> None:
    """Start the peaks of a device's statistics anew from the present values.

    Args:
        device_index: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Mirrors ``torch.accelerator.reset_peak_memory_stats``; does nothing while the accelerator is not initialized and
    when the CPU stands in.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.reset_peak_memory_stats()
    """
    runtime = state.current(device_index)
    if runtime.is_initialized:
        _tell_allocator(bindings.reset_peak_memory_stats, runtime.device_index)


def reset_accumulated_memory_stats(device_index: Device = None, /) -> None:
    """Start the accumulated counts of a device's statistics anew from zero.

    Args:
        device_index: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Mirrors ``torch.accelerator.reset_accumulated_memory_stats``; does nothing while the accelerator is not initialized and
    when the CPU stands in.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.reset_accumulated_memory_stats()
    """
    runtime = state.current(device_index)
    if runtime.is_initialized:
        _tell_allocator(bindings.reset_accumulated_memory_stats, runtime.device_index)


def _tell_allocator(function: Callable[..., None], *arguments: int) -> None:
    try:
        function(*arguments)
    except RuntimeError as error:
        if not bindings.lacks_allocator(error):
            raise


@traced_as(tracing.empty_cache)
def empty_cache() -> None:
    """Give the allocator's unused memory back to the device, so that others can have it.

    Mirrors ``torch.accelerator.empty_cache``; does nothing while the accelerator is not initialized and when the CPU
    stands in.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.empty_cache()
    """
    if initialized or state.current().is_initialized:
        _tell_allocator(bindings.empty_cache)


def empty_host_cache() -> None:
    """Give the unused pinned memory of the host back.

    Mirrors ``torch.accelerator.empty_host_cache``; does nothing while the accelerator is not initialized and when the CPU
    stands in.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.empty_host_cache()
    """
    if initialized or state.current().is_initialized:
        bindings.empty_host_cache()


# What was set here, for while the accelerator is not initialized.
_fractions: dict[int, float] = {}


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Limit how much of a device's memory this process's allocator may take; beyond it, it runs out of memory.

    Args:
        fraction: of the total memory, from 0 to 1.
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Raises:
        ValueError: if the fraction is not from 0 to 1, the index is out of range or the device is of another type.
        TypeError: if it is no device at all, or the fraction no float.
        RuntimeError: for a string that names no device, on accelerators for which torch has no limit, and in a child forked
            from a process that had initialized the accelerator.

    Before the accelerator is initialized it waits for that. Does nothing when the CPU stands in. Mirrors
    ``torch.cuda.set_per_process_memory_fraction``.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.set_per_process_memory_fraction(1.0)
    """
    if not isinstance(fraction, float):
        raise TypeError(f"A fraction of the memory is a float, not {type(fraction).__name__} ({fraction!r})")
    if not 0 <= fraction <= 1:
        raise ValueError(f"A fraction of the memory is from 0 to 1, not {fraction!r}")
    runtime = state.current(device)
    if runtime.device_type == "cpu":
        return
    limit, number = runtime.function("set_per_process_memory_fraction"), runtime.device_index
    lazy_calls.run(lambda: _keeping_current(limit, fraction, number))
    _fractions[number] = fraction


@assume_constant
def get_per_process_memory_fraction(device: Device = None) -> float:
    """Return how much of a device's memory this process's allocator may take.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        A fraction of the total memory, from 0 to 1. Before the accelerator is initialized, what was set here, else 1, as when
        the CPU stands in. Mirrors ``torch.cuda.get_per_process_memory_fraction``.

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: for a string that names no device, and in a child forked from a process that had initialized the
            accelerator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.get_per_process_memory_fraction()
        1.0
    """
    runtime = state.current(device)
    if runtime.device_type == "cpu":
        return 1.0
    asked = getattr(runtime.device_module, "get_per_process_memory_fraction", None)
    if asked and runtime.is_initialized:
        return float(_keeping_current(asked, runtime.device_index))
    return _fractions.get(runtime.device_index, 1.0)


def _keeping_current(function: Callable[..., Any], *arguments: Any) -> Any:
    # torch 2.6 leaves the device that it was asked about the current one.
    current = get_index()
    try:
        return function(*arguments)
    finally:
        set_index(current)
