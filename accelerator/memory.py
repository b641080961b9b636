"""What the memory allocators hold, of the device and of pinned host memory; giving their caches back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from ._machine.device_argument import Device
from ._torch import runtime
from ._torch.runtime import get_index, up

__all__ = [
    "empty_cache",
    "empty_host_cache",
    "host_memory_stats",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "memory_stats_as_nested_dict",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
]

_statistics_of = runtime.memory_statistics


def _statistics(device: Device) -> dict[str, Any]:
    """The allocator's statistics as torch keeps them, nested; empty while the accelerator is not initialized."""
    if not up:
        runtime.visible_index(device)
        if not up:
            return {}
    number = get_index() if device is None else device if type(device) is int else runtime.resolve(device)
    try:
        return _statistics_of(number)
    except (RuntimeError, TypeError, ValueError) as error:  # torch 2.15 garbles the message for -1: UnicodeDecodeError
        if runtime.without_allocator(error):
            return {}
        raise runtime.explain(number, error) from None


def memory_allocated(device_index: Device = None, /) -> int:
    """Return the bytes that tensors occupy on a device.

    Args:
        device_index: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        Bytes; 0 while the accelerator is not initialized and when the CPU stands in. Mirrors
        ``torch.accelerator.memory_allocated``.

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: for a string that names no device, and in a child forked from a process that had initialized the
            accelerator.

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

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: for a string that names no device, and in a child forked from a process that had initialized the
            accelerator.

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

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: for a string that names no device, and in a child forked from a process that had initialized the
            accelerator.

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

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: for a string that names no device, and in a child forked from a process that had initialized the
            accelerator.

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

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: for a string that names no device, and in a child forked from a process that had initialized the
            accelerator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> stats = acc.memory_stats()
    """
    return OrderedDict(sorted(_flat("", _statistics(device_index))))


def memory_stats_as_nested_dict(device: Device = None) -> dict[str, Any]:
    """Return the allocator's statistics of a device as torch keeps them, as in ``["allocated_bytes"]["all"]["current"]``.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        Bytes and counts; empty while the accelerator is not initialized and when the CPU stands in. Mirrors
        ``torch.cuda.memory_stats_as_nested_dict``.

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: for a string that names no device, and in a child forked from a process that had initialized the
            accelerator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> stats = acc.memory_stats_as_nested_dict()
    """
    number = runtime.visible_index(device)
    if not up:
        return {}
    # CUDA's own have more than those that all accelerators have.
    of_backend = getattr(runtime.device_module(), "memory_stats_as_nested_dict", _statistics)
    stats: dict[str, Any] = of_backend(number)
    return stats


def host_memory_stats() -> OrderedDict[str, Any]:
    """Return the statistics of the allocator of pinned host memory, under dotted names such as "allocated_bytes.current".

    Returns:
        Sorted by name, in bytes, counts and microseconds; empty while the accelerator is not initialized, when the CPU
        stands in, and where torch keeps none: before 2.7 and on accelerators other than CUDA's. Mirrors
        ``torch.cuda.host_memory_stats``.

    Raises:
        RuntimeError: in a child forked from a process that had initialized the accelerator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> stats = acc.host_memory_stats()
    """
    kept = not runtime.absent() and runtime.initialized() and runtime.kind == "cuda" and runtime.host_memory_statistics
    return OrderedDict(sorted(_flat("", kept() if kept else {})))


def _flat(prefix: str, statistics: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in statistics.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield f"{prefix}{name}", value


def reset_peak_memory_stats(device_index: Device = None, /) -> None:
    """Start the peaks of a device's statistics anew from the present values.

    Args:
        device_index: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: for a string that names no device, and in a child forked from a process that had initialized the
            accelerator.

    Mirrors ``torch.accelerator.reset_peak_memory_stats``; does nothing while the accelerator is not initialized and
    when the CPU stands in.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.reset_peak_memory_stats()
    """
    number = runtime.visible_index(device_index)
    if up:
        _tell_allocator(runtime.reset_peak_memory_stats, number)


def reset_accumulated_memory_stats(device_index: Device = None, /) -> None:
    """Start the accumulated counts of a device's statistics anew from zero.

    Args:
        device_index: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: for a string that names no device, and in a child forked from a process that had initialized the
            accelerator.

    Mirrors ``torch.accelerator.reset_accumulated_memory_stats``; does nothing while the accelerator is not initialized and
    when the CPU stands in.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.reset_accumulated_memory_stats()
    """
    number = runtime.visible_index(device_index)
    if up:
        _tell_allocator(runtime.reset_accumulated_memory_stats, number)


def _tell_allocator(function: Callable[..., None], *arguments: int) -> None:
    try:
        function(*arguments)
    except RuntimeError as error:
        if not runtime.without_allocator(error):
            raise


def empty_cache() -> None:
    """Give the allocator's unused memory back to the device, so that others can have it.

    Mirrors ``torch.accelerator.empty_cache``; does nothing while the accelerator is not initialized and when the CPU
    stands in.

    Raises:
        RuntimeError: in a child forked from a process that had initialized the accelerator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.empty_cache()
    """
    if not runtime.absent() and up:
        _tell_allocator(runtime.empty_cache)


def empty_host_cache() -> None:
    """Give the unused pinned memory of the host back.

    Mirrors ``torch.accelerator.empty_host_cache``; does nothing while the accelerator is not initialized and when the CPU
    stands in.

    Raises:
        RuntimeError: in a child forked from a process that had initialized the accelerator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.empty_host_cache()
    """
    if not runtime.absent() and up:
        runtime.empty_host_cache()
