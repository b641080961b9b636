"""Large results: the CPU's kernel writes them straight into device memory.

All other results are computed in host memory and copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .aliases import _START, _empty_on_current_device, _view, real_span, to_device
from .decompositions.normalization import with_statistics

__all__ = ["direct_kernel"]

_Tensor = torch.Tensor
_CPU = torch._C.DispatchKey.CPU
_POINTWISE = (
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "pow.Tensor_Scalar", "exp", "sqrt", "rsqrt", "clamp_min", "gelu",
    "gelu_backward", "silu", "silu_backward", "sigmoid", "sigmoid_backward", "tanh", "tanh_backward", "leaky_relu",
    "threshold_backward",
)  # fmt: skip
_DirectKernel = Callable[[list[Any], dict[str, Any]], Any]


def direct_kernel(name: str) -> tuple[int, _DirectKernel] | None:
    """Return a function that computes an op's results in memory of the current device, or None.

    The function takes the arguments of the CPU's kernel, and returns None if it does not handle them. It replaces the op's
    decomposition too, if there is one, and then has the same results. The number in the result
    is the position of an argument: the result of the op is large only if that argument is.
    """
    make = _KERNELS.get(name)
    if make is None:
        return None
    return (1 if name == "aten::addmm" else 0), make(name)


def _out_kernel(name: str) -> Callable[..., Any]:
    """Return a function that calls the CPU's kernel of an op with positional arguments and the tensor for the result."""
    base, _, overload = name.partition(".")
    arguments = _arguments(base, overload)
    for candidate in torch._C._jit_get_operation(base)[1]:
        *others, (out, type_name) = _arguments(base, candidate)
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(f"{base}.{candidate}" if candidate else base, "CPU")
        if others == arguments and type_name == "result" and has_kernel:
            call = torch._C._get_operation_overload(base, candidate)[1]
            return _with_out(call, out)
    raise LookupError(f"{name} has no kernel with out=")


def _with_out(call: Callable[..., Any], out: str) -> Callable[..., Any]:
    def compute(args: list[Any], kwargs: dict[str, Any], result: torch.Tensor) -> None:
        call(_CPU, *args, **kwargs, **{out: result})

    return compute


def _arguments(base: str, overload: str) -> list[tuple[str, str]]:
    """Return names and types; an argument that the op writes has the type "result"."""
    arguments = torch._C._get_schema(base, overload).arguments
    return [(a.name, "result" if a.alias_info is not None and a.alias_info.is_write else str(a.type)) for a in arguments]


def _empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor with memory on the current device, and its CPU alias."""
    result = _empty_on_current_device(size, stride, dtype)
    span, element_size = real_span(dtype)
    return result, _view(span, size, stride, (result.data_ptr() - _START) // element_size)


def _empty_like(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _is_simple(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.dtype.is_floating_point and tensor.numel() > 0


def _pointwise(name: str) -> _DirectKernel:
    """Make results of the size and type of the first argument, if the other tensors have them too."""
    kernel = _out_kernel(name)

    def make(args: list[Any], kwargs: dict[str, Any]) -> Any:
        first = args[0]
        if not _is_simple(first):
            return None
        for value in args[1:]:
            if isinstance(value, complex):
                return None
            if isinstance(value, _Tensor) and (
                not _is_simple(value) or value.shape != first.shape or value.dtype != first.dtype
            ):
                return None
        result, alias = _empty_like(first)
        kernel(args, kwargs, alias)
        return result

    return make


def _relu(name: str) -> _DirectKernel:
    clamp_min = _pointwise("aten::clamp_min")
    return lambda args, kwargs: clamp_min([args[0], 0], {})


def _product(name: str) -> _DirectKernel:
    """Compute a product of matrices, which are the last two arguments."""
    kernel = _out_kernel(name)

    def make(args: list[Any], kwargs: dict[str, Any]) -> Any:
        tensors = [value for value in args if isinstance(value, _Tensor)]
        left, right = tensors[-2:]
        if left.dim() != 2 or right.dim() != 2 or left.size(1) != right.size(0) or not left.size(0) * right.size(1):
            return None
        if any(value.dtype != left.dtype or not value.dtype.is_floating_point for value in tensors):
            return None
        size = (left.size(0), right.size(1))
        result, alias = _empty(size, (size[1], 1), left.dtype)
        kernel(args, kwargs, alias)
        return result

    return make


def _max_pool(name: str) -> _DirectKernel:
    """Compute the maxima of windows without padding or dilation, and their indices."""
    kernel = torch._C._get_operation_overload(name, "out")[1]

    def make(args: list[Any], kwargs: dict[str, Any]) -> Any:
        x, window, *others = args
        step = others[0] if others and others[0] else window
        if kwargs or len(others) > 1 or len(window) != 2 or len(step) != 2 or not _is_simple(x) or x.dim() != 4:
            return None
        batch, channels, *inner = x.shape
        if min(*window, *step) < 1 or inner[0] < window[0] or inner[1] < window[1]:
            return None
        height, width = ((n - k) // s + 1 for n, k, s in zip(inner, window, step, strict=True))
        size, stride = (batch, channels, height, width), (channels * height * width, height * width, width, 1)
        result, alias = _empty(size, stride, x.dtype)
        indices, alias_of_indices = _empty(size, stride, torch.int64)
        kernel(_CPU, *args, out=alias, indices=alias_of_indices)
        return result, indices

    return make


def _max_pool_backward(name: str) -> _DirectKernel:
    kernel = _out_kernel(name)

    def make(args: list[Any], kwargs: dict[str, Any]) -> Any:
        pooled = args[1]
        if not _is_simple(pooled) or pooled.dtype != args[0].dtype:
            return None
        result, alias = _empty_like(pooled)
        kernel(args, kwargs, alias)
        return result

    return make


def _batch_norm(name: str) -> _DirectKernel:
    kernel = torch._C._get_operation_overload("aten::native_batch_norm", "out")[1]

    def make(args: list[Any], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        if kwargs or not _is_simple(x) or x.dtype not in (torch.float32, torch.float64):
            return None
        result, alias = _empty_like(x)
        mean, invstd = (torch.empty(0, dtype=x.dtype, device="cpu") for _ in range(2))
        kernel(_CPU, *args, out=alias, save_mean=mean, save_invstd=invstd)
        _, _, _, running_mean, running_var, training, _, eps = args
        if not training:
            _, mean, invstd = with_statistics((alias, mean, invstd), running_mean, running_var, eps)
        return result, to_device(mean, result.device), to_device(invstd, result.device)

    return make


_KERNELS: dict[str, Callable[[str], _DirectKernel]] = {
    **{f"aten::{name}": _pointwise for name in _POINTWISE},
    "aten::relu": _relu,
    "aten::mm": _product,
    "aten::addmm": _product,
    "aten::max_pool2d_with_indices": _max_pool,
    "aten::max_pool2d_with_indices_backward": _max_pool_backward,
    "aten::native_batch_norm": _batch_norm,
}
