"""Log-sigmoid, whose buffer for the backward is empty on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .common import write_structured

_aten = torch.ops.aten


def forward(self: Tensor) -> tuple[Tensor, Tensor]:
    output, _ = _aten.log_sigmoid_forward(self)
    return output, self.new_empty(0)


def forward_out(self: Tensor, *, output: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
    return write_structured(output, forward(self)[0]), buffer


def backward(grad_output: Tensor, self: Tensor, buffer: Tensor) -> Tensor:
    result: Tensor = _aten.log_sigmoid_backward(grad_output, self, _aten.log_sigmoid_forward(self)[1])
    return result


def backward_out(*arguments: Any, grad_input: Tensor) -> Tensor:
    return write_structured(grad_input, backward(*arguments))


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "aten::log_sigmoid_forward": forward,
    "aten::log_sigmoid_forward.output": forward_out,
    "aten::log_sigmoid_backward": backward,
    "aten::log_sigmoid_backward.grad_input": backward_out,
}
