"""Every function that takes a device, when the CPU stands in: it takes what names the CPU and refuses everything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.device_arguments import FUNCTIONS, HUGE, INDEX_IS_REQUIRED, NEGATIVE, NEGATIVE_IS_FINE, WRONG, Index

pytestmark = pytest.mark.parametrize("name", FUNCTIONS)


@pytest.mark.parametrize("device", [0, "cpu:0", torch.device("cpu", 0), Index(0)], ids=repr)
def test_the_cpu(name: str, device: Any) -> None:
    FUNCTIONS[name](device)


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")], ids=repr)
def test_the_cpu_without_index(name: str, device: Any) -> None:
    if name in INDEX_IS_REQUIRED:
        with pytest.raises(ValueError, match="Expected a device with an index"):
            FUNCTIONS[name](device)
    else:
        FUNCTIONS[name](device)


@pytest.mark.parametrize(("device", "error"), WRONG, ids=[repr(device) for device, _ in WRONG])
def test_no_device(name: str, device: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        FUNCTIONS[name](device)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7", torch.device("cuda", 0)], ids=repr)
def test_another_accelerator(name: str, device: Any) -> None:
    with pytest.raises(ValueError, match="cuda doesn't match the current accelerator cpu"):
        FUNCTIONS[name](device)


@pytest.mark.parametrize("device", [1, 2, *HUGE, "cpu:1", torch.device("cpu", 1), Index(1)], ids=repr)
def test_out_of_range(name: str, device: Any) -> None:
    with pytest.raises(ValueError, match=r"is out of range: 1 cpu device is visible"):
        FUNCTIONS[name](device)


@pytest.mark.parametrize("device", NEGATIVE)
def test_negative(name: str, device: int) -> None:
    if name in NEGATIVE_IS_FINE:
        FUNCTIONS[name](device)
    else:
        with pytest.raises(ValueError, match=f"Device index {device} is out of range"):
            FUNCTIONS[name](device)
