"""Typed constructors under the CPU fallback."""

from __future__ import annotations

import warnings

import pytest
import torch

import accelerator as acc


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("BFloat16Tensor", torch.bfloat16),
        ("ByteTensor", torch.uint8),
        ("DoubleTensor", torch.float64),
        ("FloatTensor", torch.float32),
        ("HalfTensor", torch.float16),
        ("IntTensor", torch.int32),
        ("LongTensor", torch.int64),
    ],
)
def test_typed_tensors_are_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    tensor = getattr(acc, name)([1, 2])
    assert (tensor.dtype, tensor.device.type, tensor.tolist()) == (dtype, "cpu", [1, 2])
    scalar = getattr(acc, name)(3)
    assert scalar.shape == ()
    assert scalar.item() == 3


def test_tensors_are_copied_without_a_warning() -> None:
    source = torch.tensor([1.0, 2.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copy = acc.FloatTensor(source)
    source.zero_()
    assert copy.tolist() == [1.0, 2.0]


def test_on_accelerator_is_true_for_cpu_tensors_only() -> None:
    assert acc.on_accelerator(torch.empty(1))
    assert not acc.on_accelerator(torch.empty(1, device="meta"))
