"""Sparse and nested tensors: CPU tensors over the parts of CUDA tensors, and back."""

from __future__ import annotations

import torch

from .aliases import CPU, cpu_alias, cpu_alias_of_storage, to_device

__all__ = ["cpu_alias_of_parts", "to_device_by_parts", "write_back_parts"]

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)


def cpu_alias_of_parts(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of any CUDA tensor."""
    if tensor.is_nested:
        sizes, strides = tensor._nested_tensor_size(), tensor._nested_tensor_strides()
        return torch.ops.aten._nested_view_from_buffer(
            cpu_alias_of_storage(_buffer(tensor)), sizes, strides, tensor._nested_tensor_storage_offsets()
        )
    if tensor.layout == torch.strided:
        return cpu_alias(tensor)
    if tensor.layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(
            cpu_alias(tensor._indices()),
            cpu_alias(tensor._values()),
            tensor.size(),
            is_coalesced=tensor.is_coalesced(),
            check_invariants=False,
        )
    outer, inner, values = (cpu_alias(part) for part in _parts(tensor))
    return torch.sparse_compressed_tensor(
        outer, inner, values, tensor.size(), dtype=tensor.dtype, layout=tensor.layout, device=CPU, check_invariants=False
    )


def _buffer(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a nested tensor, in one piece. Kernels take its whole storage for it."""
    return tensor.values()


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if tensor.layout in _BY_ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def to_device_by_parts(result: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CUDA tensor with what the CPU computed."""
    if result.is_nested:
        sizes, strides = result._nested_tensor_size(), result._nested_tensor_strides()
        buffer = to_device(_buffer(result), device)
        return torch.ops.aten._nested_view_from_buffer(buffer, sizes, strides, result._nested_tensor_storage_offsets())
    if result.layout == torch.strided:
        return to_device(result, device)
    if result.layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(
            to_device(result._indices(), device),
            to_device(result._values(), device),
            result.size(),
            is_coalesced=result.is_coalesced(),
            check_invariants=False,
        )
    outer, inner, values = (to_device(part, device) for part in _parts(result))
    return torch.sparse_compressed_tensor(
        outer, inner, values, result.size(), dtype=result.dtype, layout=result.layout, device=device, check_invariants=False
    )


def write_back_parts(result: torch.Tensor, tensor: torch.Tensor) -> None:
    """Give a sparse CUDA tensor, which an op was to write, what the CPU's has now."""
    there = to_device_by_parts(result, tensor.device)
    if tensor.layout == torch.sparse_coo:
        tensor.sparse_resize_and_clear_(there.size(), there.sparse_dim(), there.dense_dim())
        torch.ops.aten.copy_sparse_to_sparse_(tensor, there)
    else:
        torch.ops.aten.resize_as_sparse_(tensor, there)
        tensor.copy_(there)
