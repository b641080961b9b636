"""Supported dtypes on two simulated GPUs of compute capability 9.0, compared with torch.cuda if it has the function."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import accelerator as acc


@pytest.mark.parametrize("including_emulation", [True, False])
def test_bf16_support_equals_torch_cuda(including_emulation: bool) -> None:
    assert acc.is_bf16_supported(including_emulation) is torch.cuda.is_bf16_supported(including_emulation) is True


def test_fp16_fp64_and_tf32_are_supported() -> None:
    assert acc.is_fp16_supported() is True
    assert acc.is_fp64_supported() is True
    assert acc.is_tf32_supported() is True
    if hasattr(torch.cuda, "is_tf32_supported"):
        assert torch.cuda.is_tf32_supported() is True


def test_supported_dtypes_returns_a_new_list() -> None:
    first = acc.supported_dtypes()
    assert first == [torch.float32, torch.float16, torch.bfloat16]
    first.clear()
    assert len(acc.supported_dtypes()) == 3


def test_amp_uses_cuda_without_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amp = acc.amp()
        with amp.autocast(True, torch.bfloat16):
            assert torch.mm(torch.ones(2, 2, device="cuda"), torch.ones(2, 2, device="cuda")).dtype == torch.bfloat16
        with amp.autocast(False):
            assert not torch.is_autocast_enabled("cuda")
        with amp.autocast():
            assert torch.get_autocast_dtype("cuda") == torch.float16
        scaler = amp.GradScaler(8.0)
        assert isinstance(scaler, amp.GradScaler)
        assert scaler.scale(torch.ones(1, device="cuda")).item() == 8.0

        class Double(torch.autograd.Function):
            @staticmethod
            @amp.custom_fwd(cast_inputs=torch.float32)
            def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
                return 2 * tensor

            @staticmethod
            @amp.custom_bwd
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                return 2 * gradient

        tensor = torch.ones(1, device="cuda", dtype=torch.float16, requires_grad=True)
        with amp.autocast():
            doubled = Double.apply(tensor)
        doubled.sum().backward()
        assert doubled.dtype == torch.float32
        assert tensor.grad is not None
        assert tensor.grad.item() == 2
    assert set(torch.cuda.amp.__all__) - {"amp_definitely_not_available"} <= set(dir(amp))
    assert acc.amp() is amp
