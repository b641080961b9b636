"""Depthwise convolutions, cuDNN's convolutions, and sampling of grids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .common import HALF_TYPES, Need, widened, write

_aten = torch.ops.aten


def depthwise(
    self: Tensor,
    weight: Tensor,
    kernel_size: list[int],
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Tensor:
    no_output_padding = [0] * len(kernel_size)
    return _aten.convolution(self, weight, bias, stride, padding, dilation, False, no_output_padding, self.size(1))


def depthwise_out(*arguments: Any, out: Tensor) -> Tensor:
    return write(out, depthwise(*arguments))


def convolution(
    self: Tensor,
    weight: Tensor,
    padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
    benchmark: bool,
    deterministic: bool,
    allow_tf32: bool,
) -> Tensor:
    return _aten.convolution(self, weight, None, stride, padding, dilation, False, [0] * len(padding), groups)


def convolution_out(*arguments: Any, out: Tensor) -> Tensor:
    return write(out, convolution(*arguments))


def transposed(
    self: Tensor,
    weight: Tensor,
    padding: list[int],
    output_padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
    benchmark: bool,
    deterministic: bool,
    allow_tf32: bool,
) -> Tensor:
    return _aten.convolution(self, weight, None, stride, padding, dilation, True, output_padding, groups)


def with_relu(
    self: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    return _aten.convolution(self, weight, bias, stride, padding, dilation, False, [0] * len(padding), groups).relu_()


def with_add_and_relu(
    self: Tensor,
    weight: Tensor,
    z: Tensor,
    alpha: float | None,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    result = _aten.convolution(self, weight, bias, stride, padding, dilation, False, [0] * len(padding), groups)
    return result.add_(z, alpha=1 if alpha is None else alpha).relu_()


def _sampling(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an op that samples half types as float, as CUDA's kernel does."""

    def sample(input: Tensor, grid: Tensor, *options: Any) -> Tensor:
        result = op(widened(input), widened(grid), *options)
        return result.to(input.dtype)

    return sample


def _sampling_backward(op: Callable[..., Any]) -> Callable[..., Any]:
    def backward(grad_output: Tensor, input: Tensor, grid: Tensor, *options: Any) -> tuple[Tensor | None, Tensor | None]:
        grad_input, grad_grid = op(widened(grad_output), widened(input), widened(grid), *options)
        return None if grad_input is None else grad_input.to(input.dtype), grad_grid.to(grid.dtype)

    return backward


# cuDNN interpolates bilinearly, pads with zeros, and maps -1 and 1 to the centers of the corner pixels.
_BILINEAR, _ZEROS, _ALIGN_CORNERS = 0, 0, True


def sample_grid(self: Tensor, grid: Tensor) -> Tensor:
    return _aten.grid_sampler_2d(self, grid, _BILINEAR, _ZEROS, _ALIGN_CORNERS)


def sample_grid_backward(self: Tensor, grid: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
    return _aten.grid_sampler_2d_backward(grad_output, self, grid, _BILINEAR, _ZEROS, _ALIGN_CORNERS, [True, True])


def affine_grid(theta: Tensor, N: int, C: int, H: int, W: int) -> Tensor:
    return _aten.affine_grid_generator(theta, [N, C, H, W], _ALIGN_CORNERS)


def affine_grid_backward(grad: Tensor, N: int, C: int, H: int, W: int) -> Tensor:
    return _aten.affine_grid_generator_backward(grad, [N, C, H, W], _ALIGN_CORNERS)


DECOMPOSITIONS = {
    "aten::_conv_depthwise2d": depthwise,
    "aten::_conv_depthwise2d.out": depthwise_out,
    "aten::conv_depthwise3d": depthwise,
    "aten::cudnn_convolution": convolution,
    "aten::cudnn_convolution.out": convolution_out,
    "aten::cudnn_convolution_transpose": transposed,
    "aten::cudnn_convolution_relu": with_relu,
    "aten::cudnn_convolution_add_relu": with_add_and_relu,
    "aten::grid_sampler_2d": _sampling(_aten.grid_sampler_2d),
    "aten::grid_sampler_2d_backward": _sampling_backward(_aten.grid_sampler_2d_backward),
    "aten::grid_sampler_3d": _sampling(_aten.grid_sampler_3d),
    "aten::grid_sampler_3d_backward": _sampling_backward(_aten.grid_sampler_3d_backward),
    "aten::cudnn_grid_sampler": sample_grid,
    "aten::cudnn_grid_sampler_backward": sample_grid_backward,
    "aten::cudnn_affine_grid_generator": affine_grid,
    "aten::cudnn_affine_grid_generator_backward": affine_grid_backward,
}
NEEDS = {
    f"aten::{name}": Need(HALF_TYPES)
    for name in ("grid_sampler_2d", "grid_sampler_2d_backward", "grid_sampler_3d", "grid_sampler_3d_backward")
}
