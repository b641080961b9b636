"""Helpers of several decompositions."""

from __future__ import annotations

from typing import NamedTuple

import torch

_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


HALF_TYPES = frozenset(_WIDER)


class Need(NamedTuple):
    """The calls of an op that need its decomposition.

    Attributes:
        dtypes: Those whose first tensor has one of these types.
        flag: An argument that is True or False.
        flag_value: Those with this value of the flag.
        dtype_argument: Those of which this argument is a type, and not the first tensor's.
    """

    dtypes: frozenset[torch.dtype] = frozenset()
    flag: str = ""
    flag_value: bool = True
    dtype_argument: str = ""


def compute_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type that a CUDA kernel accumulates in: float for half types, else the type itself."""
    return _WIDER.get(dtype, dtype)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in the type that a CUDA kernel accumulates in."""
    return tensor.to(compute_type(tensor.dtype))


def widened_or_none(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else widened(tensor)


def is_half(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a type that a CUDA kernel computes as float."""
    return tensor.dtype in _WIDER


def write(out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Write a result to an ``out=`` tensor, which is resized if its shape differs."""
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)


def write_structured(out: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Write a result to an ``out=`` tensor of a structured kernel. If its shape differs, it gets the result's strides, too."""
    if out.shape != result.shape:
        resize_like(out, result)
    return out.copy_(result)


def resize_like(out: torch.Tensor, result: torch.Tensor) -> None:
    """Give an ``out=`` tensor the shape and strides of a result without gaps."""
    out.resize_(result.shape)
    if result.stride() != out.stride():
        out.as_strided_(result.shape, result.stride())


def with_layout_of(model: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return the result in the type of ``model``, with its dimensions in memory in the same order."""
    strides = model.stride()
    order = sorted(range(model.dim()), key=strides.__getitem__, reverse=True)
    positions = [order.index(dim) for dim in range(result.dim())]
    return result.to(model.dtype).permute(order).contiguous().permute(positions)
