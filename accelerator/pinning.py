"""Pinned memory: memory of the host that the device reads at full speed and while the host does other work."""

from __future__ import annotations

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


def pin_memory(tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
    """Return a tensor with the same data in pinned memory.

    Args:
        tensor: a tensor on the CPU.
        align_bytes: what the address of the data is to be a multiple of.

    Returns:
        A copy, or the tensor itself if it is pinned and aligned already; always the tensor itself when the CPU stands in.

    Raises:
        ValueError: if ``align_bytes`` is less than 1.
        RuntimeError: if the tensor is not on the CPU, and in a child forked from a process that had initialized the
            accelerator.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc, torch
        >>> pinned = acc.pin_memory(torch.ones(3))
        >>> pinned.tolist()
        [1.0, 1.0, 1.0]
    """
    if align_bytes < 1:
        raise ValueError(f"align_bytes is 1 or more, not {align_bytes}")
    if runtime.absent():
        return tensor
    runtime.initialize()
    pinned = tensor.pin_memory()
    if pinned.data_ptr() % align_bytes == 0:
        return pinned
    room = torch.empty(tensor.numel() * tensor.element_size() + align_bytes, dtype=torch.uint8, pin_memory=True)
    start = -room.data_ptr() % align_bytes
    data = room[start : start + tensor.numel() * tensor.element_size()]
    return data.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in pinned memory.

    Args:
        tensor: a tensor.

    Returns:
        As ``tensor.is_pinned()``, which may initialize the driver; False when the CPU stands in.

    Raises:
        RuntimeError: in a child forked from a process that had initialized the accelerator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc, torch
        >>> acc.is_pinned(torch.ones(3))
        False
    """
    if runtime.absent() or not (runtime.up or process.driver_is_up()):
        return False
    return tensor.is_pinned()


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
    pin = not runtime.absent()
    if pin:
        runtime.initialize()
    return torch.empty(*size, dtype=dtype, device="cpu", pin_memory=pin)


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


def register_host_memory(addr: int, nbytes: int) -> None:
    """Pin memory of the host that something else allocated.

    Args:
        addr: its address.
        nbytes: its size in bytes.

    Raises:
        RuntimeError: if CUDA refuses, on accelerators other than CUDA's, and in a child forked from a process that had
            initialized the accelerator.

    Does nothing when the CPU stands in.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc, torch
        >>> tensor = torch.ones(1024)
        >>> acc.register_host_memory(tensor.data_ptr(), tensor.nbytes)
        >>> acc.unregister_host_memory(tensor.data_ptr())
    """
    if not runtime.absent():
        cudart = _cudart()
        _check(cudart, cudart.cudaHostRegister(addr, nbytes, 0))


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
        >>> acc.unregister_host_memory(tensor.data_ptr())
    """
    if not runtime.absent():
        cudart = _cudart()
        _check(cudart, cudart.cudaHostUnregister(addr))


def _cudart() -> Any:
    if runtime.kind != "cuda":
        raise RuntimeError(f"Registering memory of the host needs CUDA, the accelerator is {runtime.kind}")
    runtime.initialize()
    return runtime.device_module().cudart()


def _check(cudart: Any, status: Any) -> None:
    if int(status) == 0:
        return
    try:
        # CUDA keeps the error for the next check, which would blame it on innocent work. This is that work.
        torch.ones(1, device="cuda")
    except RuntimeError:
        pass
    raise RuntimeError(f"CUDA refused: {cudart.cudaGetErrorString(status)}")
