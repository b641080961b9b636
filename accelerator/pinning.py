"""Pinned memory: host memory that the device copies at full speed and asynchronously."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from . import low_level
from ._machine import process
from ._torch import bindings, state

__all__ = [
    "is_pinned",
    "pin_empty",
    "pin_empty_like",
    "pin_memory",
    "pin_memory_alignment",
    "register_host_memory",
    "unpin_memory",
    "unregister_host_memory",
]


def pin_memory(tensor: torch.Tensor, align_bytes: int = 1, *, make_copy: bool = True, match_shape: bool = True) -> torch.Tensor:
    """Return a tensor with the same data in pinned memory.

    Args:
        tensor: a tensor on the CPU.
        align_bytes: the alignment of the data's address, in bytes.
        make_copy: False for an uninitialized tensor of the same dtype, as DeepSpeed uses it.
        match_shape: False to make that tensor one-dimensional, with as many elements.

    Returns:
        A copy with the same strides (contiguous for an expanded tensor), or the tensor itself if it is pinned and aligned;
        the tensor itself under the CPU fallback. Without a copy a new contiguous tensor, which is pinned except under the CPU
        fallback.

    Raises:
        TypeError: if it is not a tensor.
        ValueError: if ``align_bytes`` is less than 1, or more than 1 for a sparse or nested tensor.
        RuntimeError: if the tensor to copy is not on the CPU; in a bad fork.

    Initializes: the accelerator.

    Example:
        >>> pinned = acc.pin_memory(torch.ones(3))
        >>> pinned.tolist()
        [1.0, 1.0, 1.0]
    """
    _check_tensor("pin_memory", tensor)
    if align_bytes < 1:
        raise ValueError(f"align_bytes must be at least 1, not {align_bytes}")
    if not make_copy:
        shape = tensor.shape if match_shape else torch.Size((tensor.numel(),))
        return _aligned(shape, torch.empty(shape, device="meta").stride(), tensor.dtype, align_bytes, pin=_can_pin())
    if tensor.device.type != "cpu":
        raise RuntimeError(f"Only tensors on the CPU can be pinned, not one on {tensor.device}")
    if not _can_pin():
        return tensor
    if tensor.layout is not torch.strided or tensor.is_nested:
        if align_bytes > 1:
            raise ValueError(f"align_bytes={align_bytes} needs a dense tensor: a sparse or nested one has several buffers")
        return tensor.pin_memory()
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        tensor = tensor.contiguous()  # torch cannot copy into a tensor that was expanded
    pinned = tensor.pin_memory()
    if pinned.data_ptr() % align_bytes == 0:
        return pinned
    return _aligned(tensor.shape, tensor.stride(), tensor.dtype, align_bytes, pin=True).copy_(tensor)


def _aligned(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, align_bytes: int, *, pin: bool) -> torch.Tensor:
    """Return an uninitialized, aligned tensor on the CPU."""
    align_bytes = math.lcm(align_bytes, dtype.itemsize)
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if shape.numel() else 0
    buffer = torch.empty(span * dtype.itemsize + align_bytes - 1, dtype=torch.uint8, device="cpu", pin_memory=pin)
    start = -buffer.data_ptr() % align_bytes
    return buffer[start : start + span * dtype.itemsize].view(dtype).as_strided(shape, strides)


def _can_pin() -> bool:
    """Initialize the accelerator, and return whether there is one: it pins the memory."""
    return state.initialize().device_type != "cpu"


def _check_tensor(function: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{function}() takes a tensor, not {type(tensor).__name__}")


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in pinned memory.

    Args:
        tensor: a tensor.

    Returns:
        As ``tensor.is_pinned()``, without initializing the driver; False under the CPU fallback.

    Raises:
        TypeError: if it is not a tensor.
        RuntimeError: in a bad fork.

    Example:
        >>> acc.is_pinned(torch.ones(3))
        False
    """
    _check_tensor("is_pinned", tensor)
    runtime = state.current()
    is_initialized = runtime.is_initialized or process.is_driver_initialized()
    # torch's own accelerators initialize before they pin memory. A plug-in may pin memory and not say that it is initialized.
    may_be_pinned = is_initialized or runtime.device_type == bindings.plugin_name()
    return runtime.device_type != "cpu" and may_be_pinned and tensor.is_pinned()


def unpin_memory(tensor: torch.Tensor) -> None:
    """Do nothing: pinned memory is freed with its last tensor.

    Args:
        tensor: a tensor from ``pin_memory`` or ``pin_empty``.

    Example:
        >>> acc.unpin_memory(acc.pin_memory(torch.ones(3)))
    """


def pin_empty(*size: Any, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> torch.Tensor:
    """Return an uninitialized tensor in pinned memory.

    Args:
        size: the shape, as for ``torch.empty``: ints or one sequence of ints.
        dtype: the dtype; None for the default dtype.
        device: must be the CPU.

    Returns:
        The tensor; not pinned under the CPU fallback.

    Raises:
        ValueError: if ``device`` is not the CPU.
        RuntimeError: in a bad fork.

    Initializes: the accelerator.

    Example:
        >>> acc.pin_empty(2, 3).shape
        torch.Size([2, 3])
    """
    if torch.device(device).type != "cpu":
        raise ValueError(f"Only tensors on the CPU can be pinned: device must be 'cpu', not {str(device)!r}")
    torch.empty(*size, dtype=dtype, device="meta")  # so that a wrong shape initializes nothing
    return torch.empty(*size, dtype=dtype, device="cpu", pin_memory=_can_pin())


def pin_empty_like(tensor: torch.Tensor, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialized tensor in pinned memory with the shape of another tensor.

    Args:
        tensor: a tensor on any device.
        device: must be the CPU.
        dtype: the dtype; None for the tensor's.

    Returns:
        The tensor, contiguous; not pinned under the CPU fallback.

    Raises:
        ValueError: if ``device`` is not the CPU.
        RuntimeError: in a bad fork.

    Initializes: the accelerator.

    Example:
        >>> acc.pin_empty_like(torch.ones(2, 3), dtype=torch.int8).dtype
        torch.int8
    """
    _check_tensor("pin_empty_like", tensor)
    return pin_empty(tensor.shape, dtype=dtype or tensor.dtype, device=device)


def pin_memory_alignment() -> int:
    """Return the alignment in bytes that callers pass to ``pin_memory``.

    Returns:
        1 unless the accelerator's driver needs more to register host memory, as Ascend's does; 1 under the CPU fallback.

    Example:
        >>> acc.pin_memory_alignment()
        1
    """
    return state.current(allow_bad_fork=True).vendor.pin_memory_alignment


def register_host_memory(addr: int, nbytes: int) -> bool:
    """Pin host memory that something else allocated.

    Args:
        addr: the address of the memory.
        nbytes: its size in bytes.

    Returns:
        True; False under the CPU fallback.

    Raises:
        TypeError: if the address or the size is not an int.
        ValueError: if one is out of range.
        RuntimeError: if CUDA refuses, on other accelerators than CUDA, and in a bad fork.

    Initializes: the accelerator.

    Example:
        >>> tensor = torch.ones(1024)
        >>> acc.register_host_memory(tensor.data_ptr(), tensor.nbytes)
        True
        >>> acc.is_pinned(tensor)
        True
        >>> acc.unregister_host_memory(tensor.data_ptr())
    """
    address, size = _check_address(addr), _check_address(nbytes, "size")
    if state.current().device_type == "cpu":
        return False
    cudart = low_level.cuda_function("cudart", "register_host_memory")()
    _check(cudart, cudart.cudaHostRegister(address, size, 0))
    return True


def unregister_host_memory(addr: int) -> None:
    """Unpin memory that ``register_host_memory`` pinned.

    Args:
        addr: the address of the memory.

    Raises:
        RuntimeError: if CUDA refuses, on other accelerators than CUDA, and in a bad fork.

    Does nothing under the CPU fallback.

    Initializes: the accelerator.

    Example:
        >>> tensor = torch.ones(1024)
        >>> acc.register_host_memory(tensor.data_ptr(), tensor.nbytes)
        True
        >>> acc.unregister_host_memory(tensor.data_ptr())
        >>> acc.is_pinned(tensor)
        False
    """
    address = _check_address(addr)
    if state.current().device_type != "cpu":
        cudart = low_level.cuda_function("cudart", "unregister_host_memory")()
        _check(cudart, cudart.cudaHostUnregister(address))


def _check_address(value: int, what: str = "address") -> int:
    index = operator.index(value)
    if not 0 <= index < 2**63:
        raise ValueError(f"The {what} of memory must be from 0 to 2**63 - 1, not {index}")
    return index


def _check(cudart: Any, status: Any) -> None:
    if int(status) == 0:
        return
    try:
        # CUDA keeps the error for its next check. torch clears it when a call of its own fails: there is no such device.
        bindings.set_index(torch.accelerator.device_count())
    except RuntimeError:
        pass
    raise RuntimeError(f"CUDA refused: {cudart.cudaGetErrorString(status)}")
