"""Typed constructors on two simulated GPUs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

import accelerator as acc

DTYPES = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


@pytest.fixture(autouse=True)
def _first_device() -> Iterator[None]:
    torch.cuda.set_device(0)
    yield
    torch.cuda.set_device(0)


@pytest.mark.parametrize("name", DTYPES)
def test_typed_tensors_are_on_the_current_device(name: str) -> None:
    for index in (0, 1):
        torch.cuda.set_device(index)
        tensor = getattr(acc, name)([[1, 2, 3]])
        assert (tensor.dtype, tensor.device, tensor.shape) == (DTYPES[name], torch.device("cuda", index), (1, 3))
        assert tensor.tolist() == [[1, 2, 3]]
        assert acc.on_accelerator(tensor)


@pytest.mark.parametrize("name", DTYPES)
def test_number_is_taken_as_value_not_size(name: str) -> None:
    tensor = getattr(acc, name)(3)
    assert tensor.shape == ()
    assert tensor.item() == 3


def test_tensors_are_copied_without_a_warning() -> None:
    source = torch.tensor([1.0, 2.0], requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = acc.FloatTensor(source)
        again = acc.FloatTensor(tensor)
    assert tensor.tolist() == [1.0, 2.0]
    assert not tensor.requires_grad
    assert again.data_ptr() != tensor.data_ptr()


def test_on_accelerator_compares_the_device_type() -> None:
    assert acc.on_accelerator(torch.empty(1, device="cuda:1"))
    assert not acc.on_accelerator(torch.empty(1))
    assert not acc.on_accelerator(torch.empty(1, device="meta"))
