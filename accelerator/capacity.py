"""How much memory a device has: in all, free, for this process; and recognizing that it ran out."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from . import discovery
from ._machine import description, device_argument, host_memory, process
from ._machine.device_argument import Device
from ._machine.found import Failed, Found

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
    if process.torch_is_up():
        return _memory_info_from_torch(device_index)
    found, number = _located(device_index, negative_is_current=True)
    if not found.number:
        return host_memory.available(), host_memory.total()
    try:
        return description.memory(found.devices[number], found.backend)[:2]
    except Failed as error:
        raise _unknown(number, error) from None


def _memory_info_from_torch(device: Device) -> tuple[int, int]:
    from ._torch import runtime

    number = runtime.index(device)
    if runtime.kind == "cpu":
        return host_memory.available(), host_memory.total()
    try:
        free, total = runtime.memory_info(runtime.get_index() if number is None or number < 0 else number)
    except RuntimeError as error:
        if runtime.without_allocator(error):
            import torch

            raise RuntimeError(f"torch {torch.__version__} cannot tell the memory of {runtime.kind} devices") from None
        raise
    return free, total


def _located(device: Device, *, negative_is_current: bool = False) -> tuple[Found, int]:
    """What there is, and the index in it, for a process in which torch has not initialized the accelerator."""
    if process.is_in_bad_fork():
        raise RuntimeError(f"The accelerator cannot be used: {discovery.BAD_FORK}.")
    if negative_is_current:
        number = device_argument.index(device, discovery.device_name().partition(":")[0])
        device = None if number is not None and number < 0 else device
    return discovery.located(device)


def _unknown(number: int, error: Failed) -> RuntimeError:
    return RuntimeError(f"The memory of device {number}, {discovery.get_device_name(number)}, cannot be told: {error}")


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
    if process.torch_is_up():
        number = _number_from_torch(device)
        return host_memory.total() if _shares_host_memory(number) else get_memory_info(number)[1]
    found, number = _located(device)
    if not found.number:
        return host_memory.total()
    try:
        return description.total_memory(found.devices[number], found.backend)
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
    if process.torch_is_up():
        number = _number_from_torch(device)
        return host_memory.available() if _shares_host_memory(number) else get_memory_info(number)[0]
    found, number = _located(device)
    return get_memory_info(number)[0] if found.number else host_memory.available()


def _number_from_torch(device: Device) -> int:
    from ._torch import runtime

    return runtime.visible_index(device)


def _shares_host_memory(number: int) -> bool:
    # What such a device itself calls free leaves out the pages that the host would give up at once.
    from ._torch import runtime

    if runtime.kind == "cpu":
        return True
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
    from ._torch import lazy, runtime

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
    from ._torch import runtime

    number = runtime.visible_index(device)
    if runtime.kind == "cpu":
        return 1.0
    asked = getattr(runtime.device_module(), "get_per_process_memory_fraction", None)
    return float(_keeping_current(asked, number)) if asked and runtime.up else _fractions.get(number, 1.0)


def _keeping_current(function: Callable[..., Any], *arguments: Any) -> Any:
    from ._torch import runtime

    # torch 2.6 leaves the device that it was asked about the current one.
    current = runtime.get_index()
    try:
        return function(*arguments)
    finally:
        runtime.set_index(current)


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
    # Who has not imported torch cannot have caught its error.
    of_torch = getattr(sys.modules.get("torch"), "OutOfMemoryError", MemoryError)
    if isinstance(exception, (of_torch, MemoryError)):
        return True
    return isinstance(exception, RuntimeError) and _OUT_OF_MEMORY.search(str(exception)) is not None
