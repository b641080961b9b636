"""What several decompositions share: the type to compute in, and results written where the caller wants them."""

from __future__ import annotations

import torch

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def compute_type(dtype: torch.dtype) -> torch.dtype:
    """The type a CUDA kernel accumulates in: float for the half types, else the type itself."""
    return _WIDER.get(dtype, dtype)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the type a CUDA kernel accumulates in."""
    return tensor.to(compute_type(tensor.dtype))


def write(out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """What an ``out=`` variant does with its result."""
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)


def laid_out_like(result: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """The result as ``model``'s type, its dimensions in the order in which ``model`` has them in memory."""
    strides = model.stride()
    order = sorted(range(model.dim()), key=strides.__getitem__, reverse=True)
    places = [order.index(dim) for dim in range(result.dim())]
    return result.to(model.dtype).permute(order).contiguous().permute(places)
