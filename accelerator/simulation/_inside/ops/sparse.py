"""CPU aliases of sparse, nested and quantized tensors, which consist of dense parts, and CUDA tensors for such results."""

from __future__ import annotations

import torch

from .aliases import CPU, cpu_alias, cpu_alias_of_storage, to_device
from .bindings import storage_at

_COMPRESSED_ROWS = (torch.sparse_csr, torch.sparse_bsr)


def cpu_alias_of_parts(tensor: torch.Tensor) -> torch.Tensor:
    """Return the CPU alias of a CUDA tensor of any layout."""
    if tensor.is_nested:
        sizes, strides = tensor._nested_tensor_size(), tensor._nested_tensor_strides()
        # Kernels of nested tensors read the whole storage.
        buffer = cpu_alias_of_storage(tensor.values())
        return torch.ops.aten._nested_view_from_buffer(buffer, sizes, strides, tensor._nested_tensor_storage_offsets())
    if tensor.is_quantized:
        return _quantized_cpu_alias(tensor)
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
    outer, inner, values = (cpu_alias(part) for part in _compressed_parts(tensor))
    return torch.sparse_compressed_tensor(
        outer, inner, values, tensor.size(), dtype=tensor.dtype, layout=tensor.layout, device=CPU, check_invariants=False
    )


def _quantized_cpu_alias(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        result = torch._empty_affine_quantized(
            (0,), scale=tensor.q_scale(), zero_point=tensor.q_zero_point(), dtype=tensor.dtype, device=CPU
        )
    else:
        axis = tensor.q_per_channel_axis()
        scales, zero_points = cpu_alias(tensor.q_per_channel_scales()), cpu_alias(tensor.q_per_channel_zero_points())
        result = torch._empty_per_channel_affine_quantized(
            tensor.size(), scales=scales, zero_points=zero_points, axis=axis, dtype=tensor.dtype, device=CPU
        )
    storage = tensor.untyped_storage()
    alias_storage = storage_at(storage.data_ptr(), CPU, storage.nbytes())
    return result.set_(alias_storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _compressed_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if tensor.layout in _COMPRESSED_ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def to_device_by_parts(result: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a CUDA tensor with the layout and values of a CPU tensor."""
    if result.is_nested:
        sizes, strides = result._nested_tensor_size(), result._nested_tensor_strides()
        buffer = to_device(result.values(), device)
        return torch.ops.aten._nested_view_from_buffer(buffer, sizes, strides, result._nested_tensor_storage_offsets())
    if result.is_quantized:
        return result.to(device)
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
    outer, inner, values = (to_device(part, device) for part in _compressed_parts(result))
    return torch.sparse_compressed_tensor(
        outer, inner, values, result.size(), dtype=result.dtype, layout=result.layout, device=device, check_invariants=False
    )


def write_back_parts(result: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy the sparse result of the CPU to the sparse CUDA tensor that the op writes."""
    device_result = to_device_by_parts(result, tensor.device)
    if tensor.layout == torch.sparse_coo:
        tensor.sparse_resize_and_clear_(device_result.size(), device_result.sparse_dim(), device_result.dense_dim())
        torch.ops.aten.copy_sparse_to_sparse_(tensor, device_result)
    else:
        torch.ops.aten.resize_as_sparse_(tensor, device_result)
        tensor.copy_(device_result)
