"""Deprecated names. Each function warns and calls its successor. Version 1.0 removes them."""

from __future__ import annotations

from typing_extensions import deprecated

from . import devices, memory
from ._machine.device_argument import Device

__all__ = [
    "current_device_idx",
    "max_memory_cached",
    "memory_cached",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "set_device_idx",
]


@deprecated("Use `current_device_index` instead. Version 1.0 removes this name.", category=FutureWarning)
def current_device_idx() -> int:
    """Return the index of the current device; deprecated in favor of ``current_device_index``."""
    return devices.current_device_index()


@deprecated("Use `set_device_index` instead. Version 1.0 removes this name.", category=FutureWarning)
def set_device_idx(device: Device, /) -> None:
    """Make a device the current one; deprecated in favor of ``set_device_index``.

    Args:
        device: an index, "cuda:1", or a ``torch.device`` with an index. A negative index does nothing.

    Initializes: the accelerator.
    """
    devices.set_device_index(device)


@deprecated("Use `memory_reserved` instead (positional argument). Version 1.0 removes this name.", category=FutureWarning)
def memory_cached(device: Device = None) -> int:
    """Return the number of bytes that the allocator holds on a device; deprecated in favor of ``memory_reserved``.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.
    """
    return memory.memory_reserved(device)


@deprecated("Use `max_memory_reserved` instead (positional argument). Version 1.0 removes this name.", category=FutureWarning)
def max_memory_cached(device: Device = None) -> int:
    """Return the peak number of bytes that the allocator held; deprecated in favor of ``max_memory_reserved``.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.
    """
    return memory.max_memory_reserved(device)


@deprecated(
    "Use `reset_peak_memory_stats` instead, which this calls: it resets all peaks. Version 1.0 removes this name.",
    category=FutureWarning,
)
def reset_max_memory_allocated(device: Device = None) -> None:
    """Reset all peak statistics of a device; deprecated in favor of ``reset_peak_memory_stats``.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.
    """
    memory.reset_peak_memory_stats(device)


@deprecated(
    "Use `reset_peak_memory_stats` instead, which this calls: it resets all peaks. Version 1.0 removes this name.",
    category=FutureWarning,
)
def reset_max_memory_cached(device: Device = None) -> None:
    """Reset all peak statistics of a device; deprecated in favor of ``reset_peak_memory_stats``.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.
    """
    memory.reset_peak_memory_stats(device)
