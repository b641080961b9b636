"""The shapes of ops for which torch has no meta kernel, or one with other results than CUDA's, as functions of meta tensors.

Ops whose values decide their shapes, such as ``bincount``, compute in a rehearsal (`rehearsal._has_to_compute`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .decompositions.semi_structured import compressed_columns


def _like_first(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
    return torch.empty_like(tensor)


def _like_second(first: Any, tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
    return torch.empty_like(tensor)


def _geqrf(tensor: Tensor) -> tuple[Tensor, Tensor]:
    columns = tensor.new_empty((*tensor.shape[:-2], tensor.size(-1), tensor.size(-2))).mT
    return columns, tensor.new_empty((*tensor.shape[:-2], min(tensor.shape[-2:])))


def _lstsq_out(tensor: Tensor, b: Tensor, *arguments: Any, solution: Tensor, **others: Any) -> tuple[Any, ...]:
    solution.resize_((*tensor.shape[:-2], tensor.size(-1), *b.shape[tensor.dim() - 1 :]))
    return solution, *(others[name].resize_(0) for name in ("residuals", "rank", "singular_values"))


def _with_mask(tensor: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(tensor), torch.empty_like(tensor, dtype=torch.bool)


def _quantization_gradients(grad: Tensor, tensor: Tensor, scale: Tensor, zero: Tensor, *options: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(tensor), torch.empty_like(scale), torch.empty_like(zero)


def _statistics(tensor: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    return tensor.new_empty(tensor.size(1), dtype=dtype), tensor.new_empty(tensor.size(1), dtype=dtype)


def _extremes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    return tensor.new_empty(()), tensor.new_empty(())


def _extremes_along_dim(tensor: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return tensor.amin(dim, keepdim), tensor.amax(dim, keepdim)


def _suggested_format(first: Tensor, second: Tensor) -> torch.memory_format:
    """aten/src/ATen/native/ConvUtils.h, cudnn_conv_suggest_memory_format"""
    from torch._prims_common import suggest_memory_format

    formats = {suggest_memory_format(first), suggest_memory_format(second)}
    if torch.float64 in (first.dtype, second.dtype):
        return torch.contiguous_format
    return next((each for each in (torch.channels_last, torch.channels_last_3d) if each in formats), torch.contiguous_format)


def _any_convolution(self: Tensor, weight: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Return the result of a convolution by cuDNN. torch's rule ignores the layout of meta tensors."""
    result: Tensor = torch.ops.aten.convolution(self, weight, *arguments, **options)
    return result.contiguous(memory_format=_suggested_format(self, weight))


def _any_convolution_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, *arguments: Any, **options: Any
) -> tuple[Tensor | None, ...]:
    """Return the gradients of a convolution by cuDNN, which first gives the gradient of the result the layout of the others.

    torch's rules ignore the layout before 2.11, and take the gradient's since.
    """
    grads = torch.ops.aten.convolution_backward(grad_output, input, weight, *arguments, **options)
    layout = _suggested_format(input, weight)
    return (*(grad if grad is None else grad.contiguous(memory_format=layout) for grad in grads[:2]), grads[2])


def _convolution(
    self: Tensor,
    weight: Tensor,
    kernel_size: list[int],
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
) -> Tensor:
    dims = self.dim() - 2
    sizes = [[each] * dims if isinstance(each, int) else each for each in (stride, padding, dilation)]
    return torch.ops.aten.convolution(self, weight, bias, *sizes, False, [0] * dims, self.size(1) // weight.size(1))


def _transposed_convolution(
    self: Tensor,
    weight: Tensor,
    kernel_size: list[int],
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    dilation: Any = 1,
) -> Tensor:
    dims = self.dim() - 2
    stride, padding, output_padding, dilation = (
        [each] * dims if isinstance(each, int) else each for each in (stride, padding, output_padding, dilation)
    )
    return torch.ops.aten.convolution(self, weight, bias, stride, padding, dilation, True, output_padding, 1)


def _log_sigmoid(tensor: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(tensor), tensor.new_empty(0)


def _jagged(dense: Tensor, offsets: list[Tensor], total_L: int | None = None) -> Tensor:
    if total_L is None:
        raise NotImplementedError  # the kernel reads the last offset
    return dense.new_empty((total_L, *dense.shape[1 + len(offsets) :]))


def _query_key_value(qkv: Tensor, bias: Tensor, num_heads: int) -> tuple[Tensor, ...]:
    batch, length, features = qkv.shape
    made = qkv.new_empty((3, batch, num_heads, length, features // 3 // num_heads))
    return made[0], made[1], made[2]


def _compressed(tensor: Tensor) -> Tensor:
    rows, columns = tensor.shape
    return tensor.new_empty((rows, compressed_columns(tensor.dtype, columns)))


def _packed_weight(tensor: Tensor, inner_tiles: int) -> Tensor:
    rows, size = tensor.shape
    return tensor.new_empty((-(-rows // 8), size // (inner_tiles * 8), 32, inner_tiles // 2), dtype=torch.int32)


def _packed_product(tensor: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
    return tensor.new_empty((tensor.size(0), weight.size(0) * 8))


RULES_OF_CUDA: dict[str, Callable[..., Any]] = {
    "aten::convolution": _any_convolution,
    "aten::convolution_backward": _any_convolution_backward,
    "aten::log_sigmoid_forward": _log_sigmoid,
}
"""For meta tensors, torch's rules of these ops give the results of another device."""

SHAPE_RULES: dict[str, Callable[..., Any]] = {
    **RULES_OF_CUDA,
    "aten::_logcumsumexp": _like_first,
    "aten::_ctc_loss_backward": _like_second,
    "aten::_ctc_loss_backward.Tensor": _like_second,
    "aten::fractional_max_pool3d_backward": _like_second,
    "aten::multi_margin_loss_backward": _like_second,
    "aten::multilabel_margin_loss_backward": _like_second,
    **dict.fromkeys(
        (
            *("aten::_masked_softmax", "aten::_sample_dirichlet", "aten::_dirichlet_grad", "aten::_standard_gamma_grad"),
            *("aten::binomial", "aten::glu_jvp", "aten::_fake_quantize_learnable_per_tensor_affine"),
            "aten::_fake_quantize_learnable_per_channel_affine",
        ),
        _like_first,
    ),
    **dict.fromkeys(
        (
            "aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
            "aten::fake_quantize_per_tensor_affine_cachemask",
            "aten::fake_quantize_per_channel_affine_cachemask",
        ),
        _with_mask,
    ),
    "aten::_fake_quantize_learnable_per_tensor_affine_backward": _quantization_gradients,
    "aten::_fake_quantize_learnable_per_channel_affine_backward": _quantization_gradients,
    "aten::batch_norm_update_stats": _statistics,
    "aten::_aminmax": _extremes,
    "aten::_aminmax.dim": _extremes_along_dim,
    "aten::_slow_conv2d_forward": _convolution,
    "aten::slow_conv_dilated2d": _convolution,
    "aten::slow_conv_dilated3d": _convolution,
    "aten::slow_conv_transpose3d": _transposed_convolution,
    "aten::_padded_dense_to_jagged_forward": _jagged,
    "aten::_transform_bias_rescale_qkv": _query_key_value,
    "aten::_cslt_compress": _compressed,
    "aten::_convert_weight_to_int4pack": _packed_weight,
    "aten::_weight_int4pack_mm": _packed_product,
    "aten::geqrf": _geqrf,
    "aten::linalg_lstsq.out": _lstsq_out,
}
