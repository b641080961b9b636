"""Batch norm, batch norm across processes, layer norm, and the backward of the fused RMS norm.

CUDA's kernels compute half types as float and save the statistics as float. The CPU's kernels round some intermediate values,
and save the statistics in the parameters' type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .common import HALF_TYPES, Need, compute_type, is_half, widened, widened_or_none, write

_aten = torch.ops.aten


def _per_channel(statistic: Tensor, like: Tensor) -> Tensor:
    """Reshape one value for each channel so that it broadcasts with ``like``."""
    return widened(statistic).view(1, -1, *[1] * (like.dim() - 2))


def _all_but_channel(tensor: Tensor) -> list[int]:
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _update_running(running: Tensor | None, value: Tensor, momentum: float) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_(value.to(running.dtype), alpha=momentum)


def _statistics(input: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance of each channel."""
    variance, mean = torch.var_mean(widened(input), _all_but_channel(input), correction=0)
    return mean, variance


def with_statistics(
    results: tuple[Tensor, Tensor, Tensor], running_mean: Tensor | None, running_var: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the statistics that evaluation used too. The CPU's kernel returns empty tensors for them."""
    if running_mean is None or running_var is None:
        return results
    invstd = (widened(running_var) + eps).rsqrt().to(running_var.dtype)
    return results[0], running_mean.clone(), invstd


def _raise_if_only_statistics_are_float(input: Tensor, weight: Tensor | None, running: Tensor | None) -> None:
    """Raise the error of CUDA's kernel for contiguous inputs, which needs statistics of the type of its weights."""
    if weight is not None and running is not None and input.dtype == weight.dtype and running.dtype == torch.float32:
        name = "Half" if weight.dtype == torch.float16 else "BFloat16"
        raise RuntimeError(f"Expected running_mean to have type {name} but got Float")


def _is_channels_last(tensor: Tensor) -> bool:
    is_flat = tensor.is_contiguous() and tensor.stride(1) == 1
    return is_flat or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def _batch_norm(kernel: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    def batch_norm(
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if is_half(input):
            mean, var = widened_or_none(running_mean), widened_or_none(running_var)
            wide_weight, wide_bias = widened_or_none(weight), widened_or_none(bias)
            results = batch_norm(input.float(), wide_weight, wide_bias, mean, var, training, momentum, eps)
            for running, updated in ((running_mean, mean), (running_var, var)):
                if training and running is not None and updated is not None and running is not updated:
                    running.copy_(updated)
            return results[0].to(input.dtype), results[1], results[2]
        results = kernel(input, weight, bias, running_mean, running_var, training, momentum, eps)
        return results if training else with_statistics(results, running_mean, running_var, eps)

    return batch_norm


def batch_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    tensors = (grad_out, input, weight, running_mean, running_var, save_mean, save_invstd)
    if not is_half(input):
        return _aten.native_batch_norm_backward(*tensors, train, eps, output_mask)
    if output_mask[0] and (train or any(output_mask[1:])) and not _is_channels_last(input):
        _raise_if_only_statistics_are_float(input, weight, running_mean)
    grads = _aten.native_batch_norm_backward(*map(widened_or_none, tensors), train, eps, output_mask)
    return _rounded(grads, (input, weight, weight))


def layer_norm(
    input: Tensor, normalized_shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    if not is_half(input):
        return torch.native_layer_norm(input, normalized_shape, weight, bias, eps)
    wide_weight, wide_bias = widened_or_none(weight), widened_or_none(bias)
    output, mean, rstd = torch.native_layer_norm(input.float(), normalized_shape, wide_weight, wide_bias, eps)
    return output.to(input.dtype), mean, rstd


def layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,
    normalized_shape: list[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    rest = (mean, rstd, weight, bias)
    if not is_half(input):
        return _aten.native_layer_norm_backward(grad_out, input, normalized_shape, *rest, output_mask)
    wide = map(widened_or_none, rest)
    grads = _aten.native_layer_norm_backward(grad_out.float(), input.float(), normalized_shape, *wide, output_mask)
    return _rounded(grads, (input, weight, bias))


def _rounded(grads: tuple[Tensor | None, ...], models: tuple[Tensor | None, Tensor | None, Tensor | None]) -> Any:
    """Return gradients in the types of the tensors that they belong to."""
    pairs = zip(grads, models, strict=True)
    return tuple(grad if grad is None or model is None else grad.to(model.dtype) for grad, model in pairs)


def stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    mean, variance = _statistics(input)
    return mean, (variance + eps).rsqrt()


def elemt(input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
    result = (widened(input) - _per_channel(mean, input)) * _per_channel(invstd, input)
    if weight is not None:
        result = result * _per_channel(weight, input)
    if bias is not None:
        result = result + _per_channel(bias, input)
    return result.to(input.dtype)


def elemt_out(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float, *, out: Tensor
) -> Tensor:
    return write(out, elemt(input, weight, bias, mean, invstd, eps))


def gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    counts = counts.to(mean.dtype).view(-1, 1)
    total = counts.sum()
    all_mean = (mean * counts).sum(0) / total
    squares = ((invstd.pow(-2) - eps + (mean - all_mean).square()) * counts).sum(0)
    _update_running(running_mean, all_mean, momentum)
    _update_running(running_var, squares / (total - 1), momentum)
    return all_mean, (squares / total + eps).rsqrt()


def gather_stats(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    count: int,
) -> tuple[Tensor, Tensor]:
    counts = mean.new_full((mean.size(0),), count)
    return gather_stats_with_counts(input, mean, invstd, running_mean, running_var, momentum, eps, counts)


def _sums(grad_out: Tensor, input: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each channel the sum of the gradient, and of the gradient times the centered input."""
    grad = widened(grad_out)
    dims = _all_but_channel(input)
    return grad.sum(dims), (grad * (widened(input) - _per_channel(mean, input))).sum(dims)


def backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    sum_dy, sum_dy_xmu = _sums(grad_out, input, mean)
    dtype = mean.dtype if weight is None else weight.dtype
    return (
        sum_dy if input_g else None,
        sum_dy_xmu if input_g else None,
        (sum_dy_xmu * invstd).to(dtype) if weight_g else None,
        sum_dy.to(dtype) if bias_g else None,
    )


def backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    total = count.sum().to(mean.dtype)
    centered = widened(input) - _per_channel(mean, input)
    slope = invstd.square() * sum_dy_xmu / total
    grad = widened(grad_out) - _per_channel(sum_dy / total, input) - centered * _per_channel(slope, input)
    factor = invstd if weight is None else invstd * widened(weight)
    return (grad * _per_channel(factor, input)).to(input.dtype)


def rms_norm_backward(
    grad_out: Tensor, input: Tensor, normalized_shape: list[int], rstd: Tensor, weight: Tensor | None, output_mask: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    compute = compute_type(input.dtype)
    grad, values, rstd = grad_out.to(compute), input.to(compute), rstd.to(compute)
    inner = list(range(input.dim() - len(normalized_shape), input.dim()))
    outer = list(range(input.dim() - len(normalized_shape)))
    normalized = values * rstd
    grad_input = grad_weight = None
    if output_mask[0]:
        scaled = grad if weight is None else grad * weight.to(compute)
        grad_input = (rstd * (scaled - normalized * (scaled * normalized).mean(inner, keepdim=True))).to(input.dtype)
    if output_mask[1] and weight is not None:
        product = grad * normalized
        grad_weight = (product.sum(outer) if outer else product).to(weight.dtype)
    return grad_input, grad_weight


DECOMPOSITIONS = {
    "aten::native_batch_norm": _batch_norm(torch.native_batch_norm),
    "aten::_native_batch_norm_legit": _batch_norm(torch._native_batch_norm_legit),
    "aten::native_batch_norm_backward": batch_norm_backward,
    "aten::native_layer_norm": layer_norm,
    "aten::native_layer_norm_backward": layer_norm_backward,
    "aten::batch_norm_stats": stats,
    "aten::batch_norm_elemt": elemt,
    "aten::batch_norm_elemt.out": elemt_out,
    "aten::batch_norm_gather_stats": gather_stats,
    "aten::batch_norm_gather_stats_with_counts": gather_stats_with_counts,
    "aten::batch_norm_backward_reduce": backward_reduce,
    "aten::batch_norm_backward_elemt": backward_elemt,
    "aten::_fused_rms_norm_backward": rms_norm_backward,
}
NEEDS = {
    "aten::native_batch_norm": Need(HALF_TYPES, "training", False),
    "aten::_native_batch_norm_legit": Need(HALF_TYPES, "training", False),
    "aten::native_batch_norm_backward": Need(HALF_TYPES),
    "aten::native_layer_norm": Need(HALF_TYPES),
    "aten::native_layer_norm_backward": Need(HALF_TYPES),
}
