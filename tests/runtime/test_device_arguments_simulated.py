"""Device arguments on two initialized devices: every function accepts valid ones. Wrong ones raise and change nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

import accelerator as acc
from tests.runtime.device_arguments import (
    FUNCTIONS,
    HUGE,
    INDEX_IS_REQUIRED,
    NEGATIVE,
    WRONG,
    Index,
    check_negative,
    check_wrong,
    find_takers,
    raised,
)


def state() -> tuple[Any, ...]:
    streams = tuple(torch.cuda.current_stream(index).cuda_stream for index in range(2))
    fractions = tuple(acc.get_per_process_memory_fraction(index) for index in range(2))
    return torch.cuda.current_device(), streams, fractions, torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1)


@pytest.fixture(autouse=True)
def _check_current_device_and_streams() -> Iterator[None]:
    """Make device 1 and new streams current, and check that the test leaves them current."""
    acc.init()
    for index in range(2):
        torch.cuda.set_stream(torch.cuda.Stream(index))
    torch.cuda.set_device(1)
    before = state()
    yield
    assert state() == before


def calls(devices: Iterable[Any], names: Iterable[str] = FUNCTIONS) -> Iterator[tuple[str, Any]]:
    """Yield each function's name with each device, and check after each call that the state is the same."""
    before = state()
    for name in names:
        for device in devices:
            yield name, device
            assert state() == before, (name, device)


def test_wrong_arguments() -> None:
    for name, (device, error) in calls(WRONG):
        check_wrong(name, device, error)


def test_cpu_devices_raise() -> None:
    for name, device in calls(["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)]):
        error, message = raised(name, device)
        assert error is ValueError, (name, device)
        assert message == "cpu doesn't match the current accelerator cuda.", (name, device)


def test_out_of_range() -> None:
    for name, device in calls([2, *HUGE, "cuda:2", "cuda:99", torch.device("cuda", 2), Index(2)]):
        error, message = raised(name, device)
        assert error is ValueError, (name, device)
        assert message.endswith("is out of range: 2 cuda devices are visible"), (name, device)


def test_negative() -> None:
    for name, device in calls(NEGATIVE):
        check_negative(name, device)


def test_device_without_index() -> None:
    for name, device in calls([None, "cuda", torch.device("cuda")]):
        if name in INDEX_IS_REQUIRED:
            error, message = raised(name, device)
            assert error is ValueError, (name, device)
            assert message.startswith("Expected a device with an index"), (name, device)
        else:
            FUNCTIONS[name](device)


def test_visible_devices_are_device_arguments() -> None:
    devices = acc.visible_devices()
    assert max(devices, key=acc.available_memory).index in (0, 1)
    assert [acc.device(each).index for each in devices] == [0, 1]
    assert acc.set_visible_devices_envs({}, devices)["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_equivalent_device_arguments_give_equal_results() -> None:
    changing = ("get_device_properties", "device_index", "available_memory", "memory_stats", "memory_stats_as_nested_dict")
    for name, device in calls([1, "cuda:1", torch.device("cuda", 1), Index(1), acc.visible_devices()[1]]):
        result = FUNCTIONS[name](device)
        assert name in changing or result == FUNCTIONS[name](1), (name, device)


def test_functions_without_a_device_take_none() -> None:
    assert find_takers() == []
    with pytest.raises(
        TypeError, match=r"including_emulation must be a bool, not str .'cuda:1'.; this function takes no device"
    ):
        acc.is_bf16_supported("cuda:1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes a list of devices"):
        acc.fork_rng("cuda:1")
