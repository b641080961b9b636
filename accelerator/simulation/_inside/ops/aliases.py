"""CPU aliases of CUDA tensors, and CUDA tensors for results of the CPU.

A CPU alias is a CPU tensor over the memory of a CUDA tensor, with the same sizes, strides and type.
"""

from __future__ import annotations

import ctypes

import torch

from .bindings import storage_at, view

CPU = torch.device("cpu")
# One storage spans the address space except its first page. A view of it is the cheapest way to make a tensor over an address.
_START = 4096
_SPACE = 2**47 - _START
# Below it are the addresses of tensors without elements, and those in freed storages, which begin at 0.
_LEAST_ADDRESS = 2**40
_spans: dict[torch.dtype, tuple[torch.Tensor, int]] = {}
_empty_like = torch.empty_like

_MANY_BYTES = 65536
_copy_few = ctypes.PyDLL(None).memcpy  # does not release the GIL, which would cost more than the copy
_copy_many = ctypes.CDLL(None).memcpy
for _function in (_copy_few, _copy_many):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _function.restype = None


class FreedError(Exception):
    """The storage of a tensor that has elements was freed: ``tensor.untyped_storage().resize_(0)``."""


def _make_span(dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Make and cache a tensor of a type over the address space, and return it with the size of an element."""
    storage = storage_at(_START, CPU, _SPACE)
    tensor = torch.empty(0, dtype=dtype, device=CPU).set_(storage, 0, (0,), (1,))
    span = _spans[dtype] = (tensor, tensor.element_size())
    return span


def cpu_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return the CPU alias of a strided CUDA tensor."""
    dtype = tensor.dtype
    span, size = _spans.get(dtype) or _make_span(dtype)
    address = tensor.data_ptr()
    if address < _LEAST_ADDRESS and (not tensor.numel() or not tensor.untyped_storage().data_ptr()):
        return _alias_without_memory(tensor)
    offset, remainder = divmod(address - _START, size)
    if remainder:
        return cpu_alias_of_storage(tensor)
    return _with_lazy_bits(view(span, tuple(tensor.shape), tensor.stride(), offset), tensor)


def _with_lazy_bits(result: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Conjugate and negate a result lazily if the tensor is."""
    if tensor.is_neg():
        result = torch.ops.aten._neg_view(result)
    return result.conj() if tensor.is_conj() else result


def _alias_without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the CPU's counterpart of an empty tensor, or of a zero tensor without memory (torch._efficientzerotensor).

    Raises:
        FreedError: the tensor's storage was freed.
    """
    if tensor.numel():
        if not tensor._is_zerotensor():
            raise FreedError
        return torch.zeros(tensor.size(), dtype=tensor.dtype, device=CPU)
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=CPU)


def cpu_alias_of_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU alias with a storage as large as the CUDA tensor's: enlarging it is an error."""
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    if not address or not tensor.numel():
        return _alias_without_memory(tensor)
    alias_storage = storage_at(address, CPU, storage.nbytes())
    result = torch.empty(0, dtype=tensor.dtype, device=CPU)
    result.set_(alias_storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    return _with_lazy_bits(result, tensor)


def cpu_alias_beside(other: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU alias of a tensor over the storage of another tensor's alias, so that the CPU's kernels see overlaps."""
    result = torch.empty(0, dtype=tensor.dtype, device=CPU)
    result.set_(other.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    return _with_lazy_bits(result, tensor)


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CUDA tensor over the memory of another that does not keep the memory allocated."""
    storage = tensor.untyped_storage()
    alias = storage_at(storage.data_ptr(), tensor.device, storage.nbytes())
    result = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    result.set_(alias, tensor.storage_offset(), tensor.size(), tensor.stride())
    return _with_lazy_bits(result, tensor)


def to_device(result: torch.Tensor, device: torch.device, elements: int = 0) -> torch.Tensor:
    """Return a CUDA tensor with the values and strides of a CPU tensor, and at least so many elements in its storage."""
    if result.is_neg() or result.is_conj():  # lazily: their memory has other values
        plain = _with_lazy_bits(result, result)
        return _with_lazy_bits(to_device(plain, device, elements), result)
    device_result = _empty_like(result, device=device) if elements <= result.numel() else empty_within(result, device, elements)
    nbytes = result.nbytes
    if nbytes:
        if device_result.stride() == result.stride():
            (_copy_few if nbytes < _MANY_BYTES else _copy_many)(device_result.data_ptr(), result.data_ptr(), nbytes)
        else:
            cpu_alias(device_result).copy_(result)
    return device_result


def empty_within(model: torch.Tensor, device: torch.device, elements: int) -> torch.Tensor:
    """Return an uninitialized CUDA tensor like another, in a storage of more elements."""
    return torch.empty(elements, dtype=model.dtype, device=device).as_strided(model.size(), model.stride())


def write_back(result: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy sizes and values to a CUDA tensor that an op writes and has resized."""
    if result.size() != tensor.size() or result.stride() != tensor.stride():
        torch.ops.aten.resize_(tensor, result.size())
        if result.stride() != tensor.stride():
            last = sum((size - 1) * stride for size, stride in zip(result.size(), result.stride(), strict=True))
            required_bytes = (tensor.storage_offset() + last + 1) * tensor.element_size()
            storage = tensor.untyped_storage()
            if result.numel() and storage.nbytes() < required_bytes:
                storage.resize_(int(required_bytes))
            tensor.as_strided_(result.size(), result.stride())
    cpu_alias(tensor).copy_(result)
