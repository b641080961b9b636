"""Memory of a device: free, total, available.

The functions are fork-safe: they initialize nothing. Before the accelerator is initialized they do not import torch; if only
torch knows the accelerator, a child process reads the figures. They raise RuntimeError if the figure is unknown, and in a child
forked from a process that had initialized the accelerator. Under the CPU fallback, and on devices that share the host's memory,
the figures are the host's, limited by control groups.
"""

from __future__ import annotations

from . import discovery
from ._machine import (
    child_process,
    description,
    device_argument,
    discovery_cache,
    host_memory,
    process,
    torch_probe,
    torch_runtime,
    vendors,
)
from ._machine.device_argument import Device
from ._machine.discovery_result import DiscoveryResult, Failed, NotSupported
from ._machine.dynamo import assume_constant

__all__ = ["available_memory", "get_memory_info", "mem_get_info", "total_memory"]


def get_memory_info(device_index: Device = None, /) -> tuple[int, int]:
    """Return the free and total memory of a device. Memory that any process uses is not free.

    Args:
        device_index: an index, "cuda:1", a ``torch.device``, or None; None and a negative index mean the current device.

    Returns:
        Free and total bytes; from NVML while this process has no context on the device. Mirrors
        ``torch.accelerator.get_memory_info``.

    Raises:
        RuntimeError: if unknown, and in a child forked from a process that had initialized the accelerator.

    Example:
        >>> free, total = acc.get_memory_info()
        >>> 0 < free <= total, total
        (True, 8589934592)
    """
    return _figures(*_resolve(device_index, negative_is_current=True))


def _figures(result: DiscoveryResult, index: int) -> tuple[int, int]:
    """Free and total bytes of a discovered device."""
    if _is_host_memory(result, index):
        return host_memory.available(), host_memory.total()
    backend, is_initialized = result.backend, process.is_initialized()
    try:
        # torch would make a context, which takes hundreds of MB, on a device that this process has not used.
        if backend is not None and (not is_initialized or backend.has_context(index) is False):
            try:
                return description.memory(result.devices[index], backend)[:2]
            except Failed:
                if not is_initialized:
                    raise
        return torch_runtime.memory_info(index) if is_initialized else _figures_of_probe(result, index)
    except (Failed, NotSupported) as error:
        raise _unknown(result, index, error) from None


def _figures_of_probe(result: DiscoveryResult, index: int) -> tuple[int, int]:
    """Free and total bytes of a device that only torch knows, from a child process that may initialize it."""
    try:
        probed = torch_probe.run(refresh=True)
    except child_process.NotStarted as error:
        raise Failed(str(error)) from None
    if probed.error or len(probed.devices) != result.count:
        raise Failed(probed.error or "a child process sees other devices; initialize the accelerator first")
    free, total = probed.free_memory[index], probed.devices[index].total_memory
    if free is None or total is None:
        raise NotSupported(f"torch does not report the memory of {result.device_type} devices")
    return free, total


def _resolve(device: Device, *, negative_is_current: bool = False) -> tuple[DiscoveryResult, int]:
    """The discovery result, and the index in it that a device argument names."""
    if process.is_in_bad_fork():
        raise RuntimeError(f"The accelerator cannot be used: {process.BAD_FORK}")
    result = discovery_cache.current()
    if negative_is_current:
        index = device_argument.index(device, result.device_type)
        device = None if index is not None and index < 0 else device
    return result, discovery.index_in(result, device)


def _unknown(result: DiscoveryResult, index: int, error: Exception) -> RuntimeError:
    name = description.name(result.devices[index], result.backend)
    error_type = NotSupported if isinstance(error, NotSupported) else RuntimeError
    return error_type(f"The memory of device {index}, {name}, is unknown: {error}")


@assume_constant
def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Return the free and total memory of a device: ``get_memory_info`` under its name in ``torch.cuda``.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None; None and a negative index mean the current device.

    Returns:
        Free and total bytes.

    Example:
        >>> acc.mem_get_info(1)[1] / 2**30
        8.0
    """
    return get_memory_info(device)


@assume_constant
def total_memory(device: Device = None) -> int:
    """Return the total memory of a device.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        Bytes; from the driver, in a child process, if NVML does not list the device.

    Raises:
        RuntimeError: if unknown, and in a child forked from a process that had initialized the accelerator.

    Example:
        >>> acc.total_memory(1) / 2**30
        8.0
    """
    result, index = _resolve(device)
    if _is_host_memory(result, index):
        return host_memory.total()
    if process.is_initialized() or result.backend is None:
        total: int | None = torch_runtime.property_of(index, "total_memory") if process.is_initialized() else None
        return total or _figures(result, index)[1]
    try:
        return description.total_memory(result.devices[index], result.backend)
    except Failed as error:
        raise _unknown(result, index, error) from None


def available_memory(device: Device = None) -> int:
    """Return the memory of a device that no process uses.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        Bytes, without the cache of this process's allocator. On the host: the memory that can be allocated without swapping.

    Raises:
        RuntimeError: if unknown, and in a child forked from a process that had initialized the accelerator.

    Example:
        >>> 0 < acc.available_memory(1) <= acc.total_memory(1)
        True
    """
    return _figures(*_resolve(device))[0]


def _is_host_memory(result: DiscoveryResult, index: int) -> bool:
    # The free memory that such a device reports excludes pages that the kernel can evict at once.
    if not result.count or vendors.get_row(result.device_type).shares_host_memory:
        return True
    return process.is_initialized() and bool(torch_runtime.property_of(index, "is_integrated"))
