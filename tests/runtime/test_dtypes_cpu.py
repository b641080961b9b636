"""Supported dtypes under the CPU fallback."""

from __future__ import annotations

import warnings

import pytest
import torch

import accelerator as acc


def test_dtype_support_is_a_bool() -> None:
    for result in (
        acc.is_bf16_supported(),
        acc.is_bf16_supported(False),
        acc.is_fp16_supported(),
        acc.is_fp64_supported(),
        acc.is_tf32_supported(),
    ):
        assert isinstance(result, bool)
    assert acc.is_bf16_supported()
    assert acc.is_fp64_supported()
    assert not acc.is_tf32_supported()


def test_half_precision_follows_mkldnn_support(monkeypatch: pytest.MonkeyPatch) -> None:
    for has in (True, False):
        for name in ("_is_mkldnn_fp16_supported", "_is_mkldnn_bf16_supported"):
            monkeypatch.setattr(torch.ops.mkldnn, name, lambda has=has: has, raising=False)
        assert acc.is_fp16_supported() is acc.is_bf16_supported(including_emulation=False) is has
        assert acc.supported_dtypes() == [torch.float32, *([torch.float16] if has else []), torch.bfloat16]


def test_amp_uses_the_cpu() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with acc.amp().autocast():
            assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.bfloat16
        assert acc.amp().GradScaler().is_enabled()
