"""CPU tensors over the memory of CUDA tensors, and CUDA tensors for what the CPU computed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["cpu_alias", "cpu_alias_of_storage", "to_device", "write_back"]

CPU = torch.device("cpu")
# One storage spans all of the address space but its first page; a tensor over any address is a view of it, which is the
# cheapest way to make one. Its end is that of what processes can address.
_START = 4096
_SPACE = 2**47 - _START
_everything: dict[torch.dtype, tuple[torch.Tensor, int]] = {}
_everything_real: dict[torch.dtype, tuple[torch.Tensor, int]] = {}  # the same of types that have no conjugates
# What the code has that torch.compile generates: `as_strided`, and `empty_strided` on the current device, past the dispatcher.
# Of a size it takes a tuple and nothing derived from it.
_C: Any = torch._C
_view: Callable[..., torch.Tensor] = _C._dynamo.guards._reinterpret_tensor
_empty_here: Callable[..., torch.Tensor] = _C._dynamo.guards._empty_strided_cuda
_empty_like = torch.empty_like

_MANY_BYTES = 65536
_copy_few = ctypes.PyDLL(None).memcpy  # keeps the interpreter, which costs less than to let it go and take it again
_copy_many = ctypes.CDLL(None).memcpy
for _function in (_copy_few, _copy_many):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _function.restype = None


def _span(dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Everything there is in memory, as elements of a type."""
    storage = torch._C._construct_storage_from_data_pointer(_START, CPU, _SPACE)
    tensor = torch.empty(0, dtype=dtype, device=CPU).set_(storage, 0, (0,), (1,))
    found = _everything[dtype] = (tensor, tensor.element_size())
    if not dtype.is_complex:
        _everything_real[dtype] = found
    return found


def cpu_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of a strided CUDA tensor."""
    dtype = tensor.dtype
    everything, size = _everything.get(dtype) or _span(dtype)
    address = tensor.data_ptr()
    if not address:
        return _without_memory(tensor)
    offset, rest = divmod(address - _START, size)
    if rest:
        return cpu_alias_of_storage(tensor)
    result = _view(everything, tuple(tensor.shape), tensor.stride(), offset)
    if tensor.is_neg():
        result = torch.ops.aten._neg_view(result)
    return result.conj() if dtype.is_complex and tensor.is_conj() else result


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU's counterpart of an empty tensor, or of one that torch knows to be zero."""
    if tensor.numel():
        return torch.zeros(tensor.size(), dtype=tensor.dtype, device=CPU)
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=CPU)


def cpu_alias_of_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor with a storage of the very bytes of the CUDA tensor's: to make it larger is an error."""
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    if not address or not tensor.numel():
        return _without_memory(tensor)
    span = torch._C._construct_storage_from_data_pointer(address, CPU, storage.nbytes())
    result = torch.empty(0, dtype=tensor.dtype, device=CPU)
    result.set_(span, tensor.storage_offset(), tensor.size(), tensor.stride())
    if tensor.is_neg():
        result = torch.ops.aten._neg_view(result)
    return result.conj() if tensor.is_conj() else result


def to_device(result: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CUDA tensor with the values and strides of what the CPU computed."""
    if result.is_neg() or result.is_conj():
        result = result.resolve_neg().resolve_conj()
    there = _empty_like(result, device=device)
    count = result.nbytes
    if count:
        if there.stride() == result.stride():
            (_copy_few if count < _MANY_BYTES else _copy_many)(there.data_ptr(), result.data_ptr(), count)
        else:
            cpu_alias(there).copy_(result)
    return there


def write_back(result: torch.Tensor, tensor: torch.Tensor) -> None:
    """Give a CUDA tensor, which an op was to write and resized, the sizes and values that the CPU's has now."""
    if result.size() != tensor.size() or result.stride() != tensor.stride():
        torch.ops.aten.resize_(tensor, result.size())
        if result.stride() != tensor.stride():
            last = sum((size - 1) * stride for size, stride in zip(result.size(), result.stride(), strict=True))
            needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
            storage = tensor.untyped_storage()
            if result.numel() and storage.nbytes() < needed:
                storage.resize_(int(needed))
            tensor.as_strided_(result.size(), result.stride())
    cpu_alias(tensor).copy_(result)
