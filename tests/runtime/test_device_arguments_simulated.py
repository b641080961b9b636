"""Every function that takes a device, on two initialized devices: what it takes, what it refuses, and that refusing changes
nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import accelerator as acc
from tests.runtime.device_arguments import (
    DIGITS_ARE_FINE,
    FUNCTIONS,
    HUGE,
    INDEX_IS_REQUIRED,
    NEGATIVE,
    NEGATIVE_IS_FINE,
    WRONG,
    Index,
)

pytestmark = pytest.mark.parametrize("name", FUNCTIONS)


def state() -> tuple[Any, ...]:
    streams = tuple(torch.cuda.current_stream(index).cuda_stream for index in range(2))
    fractions = tuple(acc.get_per_process_memory_fraction(index) for index in range(2))
    return torch.cuda.current_device(), streams, fractions, torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1)


@pytest.fixture(autouse=True)
def _not_the_defaults() -> None:
    acc.init()
    for index in range(2):
        torch.cuda.set_stream(torch.cuda.Stream(index))
    torch.cuda.set_device(1)


@pytest.mark.parametrize(("device", "error"), WRONG, ids=[repr(device) for device, _ in WRONG])
def test_no_device(name: str, device: Any, error: type[Exception]) -> None:
    if device == "0" and name in DIGITS_ARE_FINE:
        assert FUNCTIONS[name](device) == FUNCTIONS[name](0)
        return
    before = state()
    with pytest.raises(error) as caught:
        FUNCTIONS[name](device)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)
    assert state() == before


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)], ids=repr)
def test_the_cpu_is_another_type(name: str, device: Any) -> None:
    before = state()
    with pytest.raises(ValueError, match="cpu doesn't match the current accelerator cuda"):
        FUNCTIONS[name](device)
    assert state() == before


@pytest.mark.parametrize("device", [2, *HUGE, "cuda:2", "cuda:99", torch.device("cuda", 2), Index(2)], ids=repr)
def test_out_of_range(name: str, device: Any) -> None:
    before = state()
    with pytest.raises(ValueError, match=r"is out of range: 2 cuda devices are visible"):
        FUNCTIONS[name](device)
    assert state() == before


@pytest.mark.parametrize("device", NEGATIVE)
def test_negative(name: str, device: int) -> None:
    before = state()
    if name in NEGATIVE_IS_FINE:
        FUNCTIONS[name](device)
    else:
        with pytest.raises(ValueError, match=f"Device index {device} is out of range"):
            FUNCTIONS[name](device)
    assert state() == before


@pytest.mark.parametrize("device", [None, "cuda", torch.device("cuda")], ids=repr)
def test_without_index(name: str, device: Any) -> None:
    before = state()
    if name in INDEX_IS_REQUIRED:
        with pytest.raises(ValueError, match="Expected a device with an index"):
            FUNCTIONS[name](device)
    else:
        FUNCTIONS[name](device)
    assert state() == before


@pytest.mark.parametrize("device", [1, "cuda:1", torch.device("cuda", 1), Index(1)], ids=repr)
def test_all_ways_to_name_a_device_are_one(name: str, device: Any) -> None:
    if name in ("get_device_properties", "device_index", "available_memory", "memory_stats", "memory_stats_as_nested_dict"):
        FUNCTIONS[name](device)
    else:
        assert FUNCTIONS[name](device) == FUNCTIONS[name](1)
    assert torch.cuda.current_device() == 1
