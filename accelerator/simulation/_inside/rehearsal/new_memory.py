"""The memory of new tensors in a rehearsal, which is zero if it is small: of results, ``empty``, and compiled code."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..ops import bindings, runtime
from ..ops.bindings import current_device, empty_on_current_device
from ..ops.runtime import streams_need_checks
from .computing import SMALL_COPY, is_small
from .known_values import EMPTY, UNKNOWN, allocated

_memset = ctypes.PyDLL(None).memset
_memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_memset.restype = None

# The shapes of one result: its size, strides and type, its bytes if they are few, and the elements of its storage if they are
# more than its own; a list of them; or any other value.
Shapes = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int, int]


def allocate(new: Shapes, index: int, value: int = 0, state: int = UNKNOWN) -> torch.Tensor:
    """Return a new tensor of a state. If it is small, all its bytes have a value."""
    size, stride, dtype, small_bytes, elements = new
    if elements:
        result = _empty((elements,), (1,), dtype, index).as_strided(size, stride)
    else:
        result = _empty(size, stride, dtype, index)
    if small_bytes:
        fill(result, value, small_bytes)
    allocated(result, state)
    return result


def fill(tensor: torch.Tensor, value: int, nbytes: int) -> None:
    """Write a value into all bytes of a tensor, in the order of its stream: a collective may be sending the memory."""
    if streams_need_checks.value:
        runtime.wait_for_pending(tensor.device)
    _memset(tensor.data_ptr(), value, nbytes)


def empty_overrides() -> dict[str, Callable[..., Any]]:
    """Return the kernel overrides of ``empty`` and ``empty_strided``. Small memory is zero, whatever it held before."""

    def empty(
        size: list[int],
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("Only dense CPU tensors can be pinned")
        if memory_format is None or memory_format is torch.contiguous_format:
            return empty_strided(size, _contiguous_strides(size), dtype, layout, device)
        strides = torch.empty(size, device="meta", memory_format=memory_format).stride()
        return empty_strided(size, strides, dtype, layout, device)

    def empty_strided(
        size: list[int],
        stride: Sequence[int],
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
    ) -> torch.Tensor:
        index: int | None = None if device is None else device.index
        index = current_device() if index is None else index
        return _zeroed(_empty(tuple(size), tuple(stride), dtype or torch.get_default_dtype(), index))

    return {"aten::empty.memory_format": empty, "aten::empty_strided": empty_strided}


def zero_memory_of_compiled_code() -> None:
    """Let the buffers of code that Inductor generates be as the memory of ``empty``: its kernels write nothing."""

    def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return _zeroed(empty_on_current_device(size, stride, dtype))

    bindings.replace_empty_of_compiled_code(empty)


def _contiguous_strides(size: Sequence[int]) -> list[int]:
    strides: list[int] = []
    stride = 1
    for length in reversed(size):
        strides.insert(0, stride)
        stride *= max(length, 1)
    return strides


def _empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, index: int) -> torch.Tensor:
    """Return an uninitialized tensor on a device. torch's own kernel is not called through the dispatcher."""
    if index == current_device():
        return empty_on_current_device(size, stride, dtype)
    with torch.cuda.device(index):
        return empty_on_current_device(size, stride, dtype)


def _zeroed(tensor: torch.Tensor) -> torch.Tensor:
    """Set the state of a new tensor that no op has written, and its memory to zero if it is small."""
    nbytes = tensor.nbytes
    if nbytes and is_small(tensor):
        fill(tensor, 0, nbytes)
    allocated(tensor, EMPTY if nbytes <= SMALL_COPY else UNKNOWN)
    return tensor
