"""What two simulated GPUs of compute capability 9.0 compute in, against torch.cuda where it has the same function."""

from __future__ import annotations

import pytest
import torch

import accelerator as acc


@pytest.mark.parametrize("including_emulation", [True, False])
def test_bf16_is_as_torch_cuda_says(including_emulation: bool) -> None:
    assert acc.is_bf16_supported(including_emulation) is torch.cuda.is_bf16_supported(including_emulation) is True


def test_the_other_results_are_bools_and_right() -> None:
    assert acc.is_fp16_supported() is True
    assert acc.is_fp64_supported() is True
    assert acc.is_tf32_supported() is True
    if hasattr(torch.cuda, "is_tf32_supported"):
        assert torch.cuda.is_tf32_supported() is True


def test_supported_dtypes_are_deepspeeds_list_and_new_each_time() -> None:
    first = acc.supported_dtypes()
    assert first == [torch.float32, torch.float16, torch.bfloat16]
    first.clear()
    assert len(acc.supported_dtypes()) == 3


def test_amp_is_the_devices() -> None:
    assert acc.amp() is torch.cuda.amp
