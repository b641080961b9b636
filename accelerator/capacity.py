"""How much memory a device has: in all, free, for this process; and recognizing that it ran out."""

from __future__ import annotations

import errno
import re
import sys

import torch

from . import discovery
from ._machine import host_memory, nvml
from ._machine.compiled import constant
from ._machine.device_argument import Device
from ._torch import runtime

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
        device_index: an index, "cuda:1", a ``torch.device``; None or a negative index for the current device.

    Returns:
        Free and total bytes; before the accelerator is initialized from NVML, and when the CPU stands in the host's
        available and total memory, limits of control groups respected. Mirrors ``torch.accelerator.get_memory_info``.

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: for a string that names no device, and in a child forked from a process that had initialized the
            accelerator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> free, total = acc.get_memory_info()
        >>> 0 <= free <= total
        True
    """
    seen = runtime.look(device_index, negative=True)
    if seen.kind == "cpu":
        return host_memory.available(), host_memory.total()
    return _memory_info_from_torch(seen.number) if seen.up else _memory_info_from_nvml(seen.number)


def _memory_info_from_torch(number: int) -> tuple[int, int]:
    try:
        free, total = runtime.memory_info(number)
    except RuntimeError as error:
        if runtime.without_allocator(error):
            raise RuntimeError(f"torch {torch.__version__} cannot tell the memory of {runtime.kind} devices") from None
        raise
    return free, total


def _memory_info_from_nvml(number: int) -> tuple[int, int]:
    device = discovery.devices_found()[number]
    info = None
    if device.gpu is not None:
        info = nvml.ask(nvml.session().nvmlDeviceGetMemoryInfo, device.handle)
    if info is not None and info.total:
        return info.free, info.total
    # A device that NVML knows nothing of, or that has no memory of its own, shares the host's.
    return host_memory.available(), host_memory.total()


@constant
def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Return the free and the total memory of a device: ``get_memory_info`` under the name that ``torch.cuda`` has for it.

    Args:
        device: an index, "cuda:1", a ``torch.device``; None or a negative index for the current device.

    Returns:
        Free and total bytes; before the accelerator is initialized from NVML, and when the CPU stands in the host's
        available and total memory, limits of control groups respected.

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: for a string that names no device, and in a child forked from a process that had initialized the
            accelerator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> free, total = acc.mem_get_info()
        >>> 0 <= free <= total
        True
    """
    return get_memory_info(device)


def total_memory(device: Device = None) -> int:
    """Return the memory that a device has.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        Bytes; the host's memory, limits of control groups respected, on devices that share it and when the CPU stands in.

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: for a string that names no device, and in a child forked from a process that had initialized the
            accelerator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.total_memory() > 0
        True
    """
    number = runtime.look(device).number
    return host_memory.total() if _shares_host_memory(number) else get_memory_info(number)[1]


def available_memory(device: Device = None) -> int:
    """Return the memory of a device that nobody uses, neither this process nor another.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        Bytes, without what this process's allocator keeps in its cache. On devices that share the host's memory, and when
        the CPU stands in, what of the host's could be allocated without swapping, limits of control groups respected.

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: for a string that names no device, and in a child forked from a process that had initialized the
            accelerator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> 0 <= acc.available_memory() <= acc.total_memory()
        True
    """
    number = runtime.look(device).number
    return host_memory.available() if _shares_host_memory(number) else get_memory_info(number)[0]


def _shares_host_memory(number: int) -> bool:
    # What such a device itself calls free leaves out the pages that the host would give up at once; before initialization NVML
    # knows no memory of it, which get_memory_info takes for the same.
    if not runtime.up:
        return runtime.kind == "cpu"
    properties = getattr(runtime.device_module(), "get_device_properties", None)
    return bool(properties and getattr(properties(number), "is_integrated", False))


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
