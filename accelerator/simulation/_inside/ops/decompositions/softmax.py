"""Softmax and log-softmax that convert half to float: the CPU's kernels have the flag, but refuse to convert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .common import Need, write

_Softmax = Callable[[Tensor, int, bool], Tensor]
_Backward = Callable[[Tensor, Tensor, int, torch.dtype], Tensor]


def _forward(softmax: _Softmax) -> _Softmax:
    def forward(self: Tensor, dim: int, half_to_float: bool) -> Tensor:
        if not half_to_float:
            return softmax(self, dim, False)
        if self.dtype != torch.float16:
            raise RuntimeError("conversion is supported for Half type only")
        return softmax(self.float(), dim, False)

    return forward


def _backward(softmax_backward: _Backward) -> _Backward:
    def backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
        dtype = grad_output.dtype
        if dtype == input_dtype:
            return softmax_backward(grad_output, output, dim, input_dtype)
        if (dtype, input_dtype) != (torch.float32, torch.float16):
            raise RuntimeError("expected input and grad types to match, or input to be at::Half and grad to be at::Float")
        return softmax_backward(grad_output, output, dim, dtype).to(input_dtype)

    return backward


def _with_out(function: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    def with_out(*arguments: Any, **options: Any) -> Tensor:
        out = options.pop(name)
        return write(out, function(*arguments, **options))

    return with_out


_softmax = _forward(torch._softmax)
_log_softmax = _forward(torch._log_softmax)
_softmax_backward = _backward(torch._softmax_backward_data)
_log_softmax_backward = _backward(torch._log_softmax_backward_data)

DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "aten::_softmax": _softmax,
    "aten::_softmax.out": _with_out(_softmax, "out"),
    "aten::_log_softmax": _log_softmax,
    "aten::_log_softmax.out": _with_out(_log_softmax, "out"),
    "aten::_softmax_backward_data": _softmax_backward,
    "aten::_softmax_backward_data.out": _with_out(_softmax_backward, "grad_input"),
    "aten::_log_softmax_backward_data": _log_softmax_backward,
    "aten::_log_softmax_backward_data.out": _with_out(_log_softmax_backward, "out"),
}
NEEDS = {
    name: Need(dtype_argument="input_dtype") if "backward" in name else Need(flag="half_to_float") for name in DECOMPOSITIONS
}
