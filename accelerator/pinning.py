"""Pinned memory: memory of the host that the device reads at full speed and while the host does other work."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch

from ._machine import process
from ._torch import runtime

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
        align_bytes: what the address of the data is to be a multiple of.
        make_copy: False for an uninitialized tensor of the same dtype, to be written to, as DeepSpeed asks for it.
        match_shape: False for such a tensor of one dimension with as many elements.

    Returns:
        A copy with the same strides, or the tensor itself if it is pinned and aligned already; always the tensor itself when
        the CPU stands in. Without a copy a new contiguous tensor, pinned unless the CPU stands in.

    Raises:
        TypeError: if it is no tensor.
        ValueError: if ``align_bytes`` is less than 1.
        RuntimeError: if the tensor is not on the CPU and is to be copied.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc, torch
        >>> pinned = acc.pin_memory(torch.ones(3))
        >>> pinned.tolist()
        [1.0, 1.0, 1.0]
    """
    _check_tensor("pin_memory", tensor)
    if align_bytes < 1:
        raise ValueError(f"align_bytes is 1 or more, not {align_bytes}")
    if not make_copy:
        shape = tensor.shape if match_shape else torch.Size((tensor.numel(),))
        return _aligned(shape, torch.empty(shape, device="meta").stride(), tensor.dtype, align_bytes, pin=_can_pin())
    if tensor.device.type != "cpu":
        raise RuntimeError(f"Pinned memory is the CPU's: a tensor on {tensor.device} cannot be pinned")
    if not _can_pin():
        return tensor
    pinned = tensor.pin_memory()
    if pinned.data_ptr() % align_bytes == 0:
        return pinned
    return _aligned(tensor.shape, tensor.stride(), tensor.dtype, align_bytes, pin=True).copy_(tensor)


def _aligned(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, align_bytes: int, *, pin: bool) -> torch.Tensor:
    """An uninitialized tensor on the CPU whose address is a multiple of a number of bytes."""
    align_bytes = math.lcm(align_bytes, dtype.itemsize)
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if shape.numel() else 0
    room = torch.empty(span * dtype.itemsize + align_bytes - 1, dtype=torch.uint8, device="cpu", pin_memory=pin)
    start = -room.data_ptr() % align_bytes
    return room[start : start + span * dtype.itemsize].view(dtype).as_strided(shape, strides)


def _can_pin() -> bool:
    """Initialize the accelerator, if there is one, without which no memory is pinned."""
    return runtime.initialize().kind != "cpu"


def _check_tensor(function: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{function}() takes a tensor, not {type(tensor).__name__}")


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in pinned memory.

    Args:
        tensor: a tensor.

    Returns:
        As ``tensor.is_pinned()``, which may initialize the driver; False when the CPU stands in.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc, torch
        >>> acc.is_pinned(torch.ones(3))
        False
    """
    _check_tensor("is_pinned", tensor)
    seen = runtime.look()
    return seen.kind != "cpu" and (seen.up or process.is_driver_initialized()) and tensor.is_pinned()


def unpin_memory(tensor: torch.Tensor) -> None:
    """Do nothing: pinned memory goes back when the last tensor in it does, and not before, so nobody can use it after that.

    Args:
        tensor: a tensor from ``pin_memory`` or ``pin_empty``.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc, torch
        >>> acc.unpin_memory(acc.pin_memory(torch.ones(3)))
    """


def pin_empty(*size: Any, dtype: torch.dtype | None = None, device: str | torch.device = "cpu") -> torch.Tensor:
    """Return an uninitialized tensor in pinned memory.

    Args:
        size: the shape, as for ``torch.empty``: numbers or one sequence of them.
        dtype: the dtype; None for the default dtype.
        device: must be the CPU.

    Returns:
        The tensor; not pinned when the CPU stands in.

    Raises:
        ValueError: if ``device`` is not the CPU.
        RuntimeError: in a child forked from a process that had initialized the accelerator.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> acc.pin_empty(2, 3).shape
        torch.Size([2, 3])
    """
    if torch.device(device).type != "cpu":
        raise ValueError(f"Pinned memory is the CPU's: the device must be 'cpu', not {str(device)!r}")
    torch.empty(*size, dtype=dtype, device="meta")  # what is no shape is not to initialize anything
    return torch.empty(*size, dtype=dtype, device="cpu", pin_memory=_can_pin())


def pin_empty_like(tensor: torch.Tensor, device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return an uninitialized tensor in pinned memory with the shape of another.

    Args:
        tensor: the tensor whose shape to take; it may be on any device.
        device: must be the CPU.
        dtype: the dtype; None for the tensor's.

    Returns:
        The tensor, contiguous; not pinned when the CPU stands in.

    Raises:
        ValueError: if ``device`` is not the CPU.
        RuntimeError: in a child forked from a process that had initialized the accelerator.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc, torch
        >>> acc.pin_empty_like(torch.ones(2, 3), dtype=torch.int8).dtype
        torch.int8
    """
    _check_tensor("pin_empty_like", tensor)
    return pin_empty(tensor.shape, dtype=dtype or tensor.dtype, device=device)


def pin_memory_alignment() -> int:
    """Return what the address of pinned memory must be a multiple of, as callers of ``pin_memory`` pass it on.

    Returns:
        1: no accelerator that torch knows asks for more than its own allocator does by itself.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.pin_memory_alignment()
        1
    """
    return 1


def register_host_memory(addr: int, nbytes: int) -> bool:
    """Pin memory of the host that something else allocated.

    Args:
        addr: its address.
        nbytes: its size in bytes.

    Returns:
        True; False when the CPU stands in, where there is nothing to pin it for.

    Raises:
        TypeError, ValueError: if the address or the size is no int, or out of range.
        RuntimeError: if CUDA refuses, on accelerators other than CUDA's, and in a child forked from a process that had
            initialized the accelerator.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc, torch
        >>> tensor = torch.ones(1024)
        >>> acc.register_host_memory(tensor.data_ptr(), tensor.nbytes)
        True
        >>> acc.is_pinned(tensor)
        True
        >>> acc.unregister_host_memory(tensor.data_ptr())
    """
    address, size = _check_address(addr), _check_address(nbytes, "size")
    if runtime.look().kind == "cpu":
        return False
    cudart = _cudart()
    _check(cudart, cudart.cudaHostRegister(address, size, 0))
    return True


def unregister_host_memory(addr: int) -> None:
    """Unpin memory that ``register_host_memory`` pinned.

    Args:
        addr: its address.

    Raises:
        RuntimeError: if CUDA refuses, on accelerators other than CUDA's, and in a child forked from a process that had
            initialized the accelerator.

    Does nothing when the CPU stands in.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc, torch
        >>> tensor = torch.ones(1024)
        >>> acc.register_host_memory(tensor.data_ptr(), tensor.nbytes)
        True
        >>> acc.unregister_host_memory(tensor.data_ptr())
        >>> acc.is_pinned(tensor)
        False
    """
    address = _check_address(addr)
    if runtime.look().kind != "cpu":
        cudart = _cudart()
        _check(cudart, cudart.cudaHostUnregister(address))


def _check_address(value: int, what: str = "address") -> int:
    number = operator.index(value)
    if not 0 <= number < 2**63:
        raise ValueError(f"The {what} of memory is from 0 to 2**63 - 1, not {number}")
    return number


def _cudart() -> Any:
    kind = runtime.look().kind
    if kind != "cuda":
        raise RuntimeError(f"Registering memory of the host needs CUDA, the accelerator is {kind}")
    runtime.initialize()
    return runtime.device_module().cudart()


def _check(cudart: Any, status: Any) -> None:
    if int(status) == 0:
        return
    try:
        # CUDA keeps the error for the next check, which would blame it on innocent work. This is that work: a kernel, and a
        # copy for simulated GPUs, where kernels do not ask CUDA.
        torch.ones(1, device="cuda").clone()
    except RuntimeError:
        pass
    raise RuntimeError(f"CUDA refused: {cudart.cudaGetErrorString(status)}")
