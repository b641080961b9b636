"""How much memory a device has: in all, free, for this process; and recognizing that it ran out."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from . import discovery
from ._machine import host_memory, nvml
from ._machine.device_argument import Device
from ._torch import lazy, runtime
from ._torch.runtime import get_index, set_index

__all__ = [
    "available_memory",
    "get_memory_info",
    "get_per_process_memory_fraction",
    "is_out_of_memory_error",
    "mem_get_info",
    "set_per_process_memory_fraction",
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
    number = runtime.index(device_index)
    if runtime.kind == "cpu":
        return host_memory.available(), host_memory.total()
    if runtime.up:
        return _memory_info_from_torch(get_index() if number is None or number < 0 else number)
    return _memory_info_from_nvml(0 if number is None or number < 0 else number)


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
    number = runtime.visible_index(device)
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
    number = runtime.visible_index(device)
    return host_memory.available() if _shares_host_memory(number) else get_memory_info(number)[0]


def _shares_host_memory(number: int) -> bool:
    # What such a device itself calls free leaves out the pages that the host would give up at once; before initialization NVML
    # knows no memory of it, which get_memory_info takes for the same.
    if not runtime.up:
        return runtime.kind == "cpu"
    properties = getattr(runtime.device_module(), "get_device_properties", None)
    return bool(properties and getattr(properties(number), "is_integrated", False))


# What was set here, for while the accelerator is not initialized.
_fractions: dict[int, float] = {}


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    """Limit how much of a device's memory this process's allocator may take; beyond it, it runs out of memory.

    Args:
        fraction: of the total memory, from 0 to 1.
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Raises:
        ValueError: if the fraction is not from 0 to 1, the index is out of range or the device is of another type.
        TypeError: if it is no device at all, or the fraction no number.
        RuntimeError: for a string that names no device, on accelerators for which torch has no limit, and in a child forked
            from a process that had initialized the accelerator.

    Before the accelerator is initialized it waits for that. Does nothing when the CPU stands in. Mirrors
    ``torch.cuda.set_per_process_memory_fraction``.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.set_per_process_memory_fraction(1.0)
    """
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)):
        raise TypeError(f"A fraction of the memory is a float, not {type(fraction).__name__} ({fraction!r})")
    if not 0 <= fraction <= 1:
        raise ValueError(f"A fraction of the memory is from 0 to 1, not {fraction!r}")
    number = runtime.visible_index(device)
    if runtime.kind == "cpu":
        return
    limit = runtime.function("set_per_process_memory_fraction")
    lazy.run(lambda: _keeping_current(limit, float(fraction), number))
    _fractions[number] = float(fraction)


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
    number = runtime.visible_index(device)
    if runtime.kind == "cpu":
        return 1.0
    asked = getattr(runtime.device_module(), "get_per_process_memory_fraction", None)
    return float(_keeping_current(asked, number)) if asked and runtime.up else _fractions.get(number, 1.0)


def _keeping_current(function: Callable[..., Any], *arguments: Any) -> Any:
    # torch 2.6 leaves the device that it was asked about the current one.
    current = get_index()
    try:
        return function(*arguments)
    finally:
        set_index(current)


# What the libraries say that torch calls, and torch of its own allocators, when memory cannot be had.
_OUT_OF_MEMORY = re.compile(
    r"\bout of memory\b"
    r"|OUT_?OF_?(DEVICE_|HOST_)?MEMORY|ErrorMemoryAllocation"
    r"|\b(CUBLAS|HIPBLAS|CUDNN|CUSOLVER|CURAND|CUFFT|HIPFFT|MIOPEN)_(STATUS_)?(\w+_)?ALLOC(ATION)?_FAILED\b"
    r"|\bFailed to CUDA (host )?[mc]?alloc"
    r"|\bDefaultCPUAllocator: (can't allocate|not enough) memory\b",
    re.IGNORECASE,
)


def is_out_of_memory_error(exception: BaseException) -> bool:
    """Return whether an exception says that memory ran out, so that trying again with less makes sense.

    Args:
        exception: what was caught.

    Returns:
        True for torch's ``OutOfMemoryError``, Python's ``MemoryError``, and RuntimeErrors in which torch, the driver, cuBLAS,
        cuDNN, NCCL and their likes say so.

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
    if isinstance(exception, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(exception, RuntimeError) and _OUT_OF_MEMORY.search(str(exception)) is not None
