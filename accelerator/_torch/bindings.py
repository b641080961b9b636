"""torch's private bindings. No other runtime module uses them."""

from __future__ import annotations

from typing import Any

from torch import _C


def _first(*names: str) -> Any:
    """The first of these bindings that this torch has: newer releases have one for all accelerators, older ones CUDA's."""
    return next((getattr(_C, name) for name in names if hasattr(_C, name)), None)


get_index = _C._accelerator_getDeviceIndex
set_index = _C._accelerator_setDeviceIndex
get_stream = _C._accelerator_getStream
set_stream = _C._accelerator_setStream
synchronize = _C._accelerator_synchronizeDevice


def _exchange_index(index: int) -> int:
    previous: int = get_index()
    set_index(index)
    return previous


exchange_index = _first("_accelerator_exchangeDevice", "_cuda_exchangeDevice") or _exchange_index
restore_index = _first("_accelerator_maybeExchangeDevice", "_cuda_maybeExchangeDevice") or _exchange_index
memory_statistics = _first("_accelerator_getDeviceStats", "_cuda_memoryStats")
reset_peak_memory_stats = _first("_accelerator_resetPeakStats", "_cuda_resetPeakMemoryStats")
reset_accumulated_memory_stats = _first("_accelerator_resetAccumulatedStats", "_cuda_resetAccumulatedMemoryStats")
empty_cache = _first("_accelerator_emptyCache", "_cuda_emptyCache")
empty_host_cache = _first("_accelerator_emptyHostCache", "_host_emptyCache")
set_sync_debug_mode = _first("_cuda_set_sync_debug_mode")
get_sync_debug_mode = _first("_cuda_get_sync_debug_mode")
default_generator = _first("_accelerator_getDefaultGenerator")

# NVTX, which only CUDA builds have.
nvtx = _first("_nvtx")


def host_allocator(name: str) -> Any:
    """A binding of CUDA's allocator of pinned host memory, or None before torch 2.7."""
    return _first(f"_cuda_{name}")


def arch_flags(device_type: str) -> Any:
    """The binding that returns the architectures that this torch was compiled for, or None if it has none."""
    return _first(f"_{device_type}_getArchFlags")


def lacks_allocator(error: Exception) -> bool:
    """Whether a call failed because torch knows no allocator of the backend, which torch reports by a failed assertion."""
    return "device_allocator INTERNAL ASSERT" in str(error)
