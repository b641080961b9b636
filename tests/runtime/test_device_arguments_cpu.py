"""Every function that takes a device, when the CPU stands in: it takes what names the CPU and refuses everything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.runtime.device_arguments import DIGITS_ARE_FINE, FUNCTIONS, HUGE, NEGATIVE, NEGATIVE_IS_FINE, WRONG, Index

pytestmark = pytest.mark.parametrize("name", FUNCTIONS)


# The ranks of a program share the CPU, each with an index of its own, and no index is too much for it.
@pytest.mark.parametrize(
    "device", [None, 0, 1, 3, *HUGE, "cpu", "cpu:0", "cpu:1", torch.device("cpu"), torch.device("cpu", 0), Index(0), Index(2)],
    ids=repr,
)  # fmt: skip
def test_the_cpu(name: str, device: Any) -> None:
    FUNCTIONS[name](device)


@pytest.mark.parametrize(("device", "error"), WRONG, ids=[repr(device) for device, _ in WRONG])
def test_no_device(name: str, device: Any, error: type[Exception]) -> None:
    if device == "0" and name in DIGITS_ARE_FINE:
        assert FUNCTIONS[name](device) == FUNCTIONS[name](0)
        return
    with pytest.raises(error) as caught:
        FUNCTIONS[name](device)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7", torch.device("cuda", 0)], ids=repr)
def test_another_accelerator(name: str, device: Any) -> None:
    with pytest.raises(ValueError, match="cuda doesn't match the current accelerator cpu"):
        FUNCTIONS[name](device)


@pytest.mark.parametrize("device", NEGATIVE)
def test_negative(name: str, device: int) -> None:
    if name in NEGATIVE_IS_FINE:
        FUNCTIONS[name](device)
    else:
        with pytest.raises(ValueError, match=f"Device index {device} is out of range"):
            FUNCTIONS[name](device)
