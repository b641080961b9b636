"""How much memory a device has: in all, free, for this process; and recognizing that it ran out."""

from __future__ import annotations

import errno
import re
import sys

from . import discovery
from ._machine import description, device_argument, host_memory, process
from ._machine.device_argument import Device
from ._machine.discovery_result import DiscoveryResult, Failed
from ._machine.dynamo import assume_constant

__all__ = [
    "available_memory",
    "get_memory_info",
    "is_out_of_memory_error",
    "mem_get_info",
    "total_memory",
]


def get_memory_info(device_index: Device = None, /) -> tuple[int, int]:
    """Return the free and the total memory of a device, other processes' use counted.

    Args:
        device_index: which one; a negative index too stands for the current device.

    Returns:
        Free and total bytes; before the accelerator is initialized from NVML, without importing torch. The host's available
        and total memory, limits of control groups respected, when the CPU stands in, and on devices that share it. Mirrors
        ``torch.accelerator.get_memory_info``.

    Raises:
        RuntimeError: if it cannot be told, and in a child forked from a process that had initialized the accelerator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> free, total = acc.get_memory_info()
        >>> 0 < free <= total == 8 * 2**30
        True
    """
    if process.is_initialized():
        return _memory_info_from_torch(device_index)
    result, number = _located(device_index, negative_is_current=True)
    if not result.count:
        return host_memory.available(), host_memory.total()
    try:
        return description.memory(result.devices[number], result.backend)[:2]
    except Failed as error:
        raise _unknown(number, error) from None


def _memory_info_from_torch(device: Device) -> tuple[int, int]:
    from ._torch import bindings, state

    runtime = state.current(device, allow_negative=True)
    if runtime.device_type == "cpu":
        return host_memory.available(), host_memory.total()
    try:
        free, total = bindings.memory_info(runtime.device_index)
    except RuntimeError as error:
        if bindings.lacks_allocator(error):
            import torch

            raise RuntimeError(f"torch {torch.__version__} cannot tell the memory of {runtime.device_type} devices") from None
        raise
    return free, total


def _located(device: Device, *, negative_is_current: bool = False) -> tuple[DiscoveryResult, int]:
    """What there is, and the index in it, for a process in which torch has not initialized the accelerator."""
    if process.is_in_bad_fork():
        raise RuntimeError(f"The accelerator cannot be used: {discovery.BAD_FORK}.")
    if negative_is_current:
        number = device_argument.index(device, discovery.device_name())
        device = None if number is not None and number < 0 else device
    return discovery.resolve_device(device)


def _unknown(number: int, error: Failed) -> RuntimeError:
    return RuntimeError(f"The memory of device {number}, {discovery.get_device_name(number)}, cannot be told: {error}")


@assume_constant
def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Return the free and the total memory of a device: ``get_memory_info`` under the name that ``torch.cuda`` has for it.

    Args:
        device: which one; a negative index too stands for the current device.

    Returns:
        Free and total bytes, as ``get_memory_info``.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.mem_get_info(1)[1] / 2**30
        8.0
    """
    return get_memory_info(device)


def total_memory(device: Device = None) -> int:
    """Return the memory that a device has.

    Args:
        device: which one.

    Returns:
        Bytes, where NVML does not know the device from the driver, asked in a child process; the host's memory, limits of
        control groups respected, on devices that share it and when the CPU stands in.

    Raises:
        RuntimeError: if it cannot be told, and in a child forked from a process that had initialized the accelerator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.total_memory(1) / 2**30
        8.0
    """
    if process.is_initialized():
        return host_memory.total() if _shares_host_memory(device) else get_memory_info(device)[1]
    result, number = _located(device)
    if not result.count:
        return host_memory.total()
    try:
        return description.total_memory(result.devices[number], result.backend)
    except Failed as error:
        raise _unknown(number, error) from None


def available_memory(device: Device = None) -> int:
    """Return the memory of a device that nobody uses, neither this process nor another.

    Args:
        device: which one.

    Returns:
        Bytes, without what this process's allocator keeps in its cache. On devices that share the host's memory, and when
        the CPU stands in, what of the host's could be allocated without swapping, limits of control groups respected.

    Raises:
        RuntimeError: if it cannot be told, and in a child forked from a process that had initialized the accelerator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> 0 < acc.available_memory(1) <= acc.total_memory(1)
        True
    """
    if process.is_initialized():
        return host_memory.available() if _shares_host_memory(device) else get_memory_info(device)[0]
    result, number = _located(device)
    return get_memory_info(number)[0] if result.count else host_memory.available()


def _shares_host_memory(device: Device) -> bool:
    # What such a device itself calls free leaves out the pages that the host would give up at once.
    from ._torch import state

    runtime = state.current(device)
    if runtime.device_type == "cpu":
        return True
    properties = getattr(runtime.device_module, "get_device_properties", None)
    return bool(properties and getattr(properties(runtime.device_index), "is_integrated", False))


# What the libraries say that torch calls, and torch of its own allocators, when memory cannot be had. They say no more after
# it on the line but how much was wanted; a sentence that goes on is somebody's who only speaks of memory.
_OUT_OF_MEMORY = re.compile(
    r"(?:^|[:\]'] ?|\b[A-Z]{2,}\w* (?:backend )?)out of memory(?=\s*(?:[.,;:('\n]|at \S+:\d+|$))"
    r"|(?:^|: )Cannot allocate memory(?=\s*(?:[.;:(\n]|$))"
    r"|(?i:OUT_?OF_?(?:DEVICE_|HOST_)?MEMORY)|ErrorMemoryAllocation"
    r"|\b(?:CUBLAS|HIPBLAS|CUDNN|CUSOLVER|CURAND|CUFFT|HIPFFT|MIOPEN)_(?:STATUS_)?(?:\w+_)?ALLOC(?:ATION)?_FAILED\b"
    r"|\bFailed to CUDA (?:host )?[mc]?alloc\b"
    r"|\bDefaultCPUAllocator: (?:can't allocate|not enough) memory\b"
    r"|\bPT_DEVMEM Allocation failed\b",
    re.MULTILINE,
)


def is_out_of_memory_error(exception: BaseException) -> bool:
    """Return whether an exception says that memory ran out, so that trying again with less makes sense.

    Args:
        exception: what was caught.

    Returns:
        True for torch's ``OutOfMemoryError``, Python's ``MemoryError``, the operating system's refusal, and RuntimeErrors in
        which torch, the driver, cuBLAS, cuDNN, NCCL and their likes say so; also if such a one is the cause of the exception
        (``raise ... from``) or one of a group.

    Raises:
        TypeError: if it is no exception.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc, torch
        >>> acc.is_out_of_memory_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
        True
        >>> acc.is_out_of_memory_error(RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"))
        False
    """
    if not isinstance(exception, BaseException):
        raise TypeError(f"is_out_of_memory_error() takes an exception, not {type(exception).__name__}")
    waiting, seen = [exception], set[int]()
    while waiting:
        error = waiting.pop()
        if _says_out_of_memory(error):
            return True
        seen.add(id(error))
        related = (error.__cause__, *getattr(error, "exceptions", ()))
        waiting += [other for other in related if isinstance(other, BaseException) and id(other) not in seen]
    return False


def _says_out_of_memory(error: BaseException) -> bool:
    # An error of torch's own exists only where torch is imported.
    of_torch = getattr(sys.modules.get("torch"), "OutOfMemoryError", ())
    if isinstance(error, (MemoryError, of_torch)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _OUT_OF_MEMORY.search(str(error)) is not None
