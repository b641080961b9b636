"""Ops that decide whether torch uses cuDNN or MIOpen, the flag that programs see, and batch normalization under cuDNN's name.

torch calls cuDNN's recurrent networks without the dispatcher, so they cannot be overridden. So its own flag stays off,
and the ops always return False. They run on the host, also while a stream captures, because they read no values of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import bindings


def never(*arguments: object) -> bool:
    return False


def batch_norm(input: Tensor, weight: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    # Both are CUDA tensors here: the override of the other op runs next.
    return *torch.ops.aten.native_batch_norm(input, weight, *arguments), input.new_empty(0, dtype=torch.uint8)


def batch_norm_backward(
    input: Tensor,
    grad_output: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor,
    save_var: Tensor,
    epsilon: float,
    reserveSpace: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.aten.native_batch_norm_backward(
        grad_output, input, weight, running_mean, running_var, save_mean, save_var, True, epsilon, [True] * 3
    )


CUDNN_SELECTION: dict[str, Callable[..., Any]] = {
    "aten::cudnn_is_acceptable": never,
    "aten::_use_cudnn_ctc_loss": never,
    "aten::_use_cudnn_ctc_loss.Tensor": never,
    "aten::_use_miopen_ctc_loss": never,
    "aten::_use_miopen_ctc_loss.Tensor": never,
    "aten::cudnn_batch_norm": batch_norm,
    "aten::cudnn_batch_norm_backward": batch_norm_backward,
}


def separate_flag() -> None:
    """Switch cuDNN off in torch. ``torch.backends.cudnn.enabled`` still answers True, or what the program sets."""
    is_enabled = bindings.get_cudnn_enabled()
    bindings.set_cudnn_enabled(False)

    def get_enabled() -> bool:
        return is_enabled

    def set_enabled(value: bool) -> None:
        nonlocal is_enabled
        if not isinstance(value, bool):
            raise TypeError(f"set_enabled_cudnn expects a bool, but got {type(value).__name__}")
        is_enabled = value

    bindings.replace("_get_cudnn_enabled", lambda _: get_enabled)
    bindings.replace("_set_cudnn_enabled", lambda _: set_enabled)
    flag = vars(type(torch.backends.cudnn))["enabled"]
    flag.getter, flag.setter = get_enabled, set_enabled

    def with_cudnns_format(determine: Callable[..., Any]) -> Callable[..., Any]:
        def determine_format(input: Tensor, weight: Tensor, backend: Any) -> Any:
            """Return the format of a convolution's result, for compiled code: that of cuDNN, which torch does not select."""
            if not input.is_cuda:
                return determine(input, weight, backend)
            if weight.dim() == 4:  # the kernels here give float64 the format that cuDNN gives other types
                input, weight = input.to(torch.float32), weight.to(torch.float32)
            return determine(input, weight, bindings.CUDNN_BACKEND)

        return determine_format

    bindings.replace("_conv_determine_backend_memory_format", with_cudnns_format)
