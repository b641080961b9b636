"""Device arguments under the CPU fallback: every function accepts those that name the CPU and raises for all others."""

from __future__ import annotations

import itertools

import torch

from tests.runtime.device_arguments import (
    FUNCTIONS,
    HUGE,
    NEGATIVE,
    WRONG,
    Index,
    check_negative,
    check_wrong,
    find_takers,
    raised,
)


def test_every_function_accepts_cpu_devices() -> None:
    # Ranks with different indices share the CPU, so every index names the CPU.
    devices = [None, 0, 1, 3, *HUGE, "cpu", "cpu:0", "cpu:1", torch.device("cpu"), torch.device("cpu", 0), Index(0), Index(2)]
    for name, device in itertools.product(FUNCTIONS, devices):
        FUNCTIONS[name](device)


def test_wrong_arguments() -> None:
    for name, (device, error) in itertools.product(FUNCTIONS, WRONG):
        check_wrong(name, device, error)


def test_cuda_devices_raise() -> None:
    for name, device in itertools.product(FUNCTIONS, ["cuda", "cuda:0", "cuda:7", torch.device("cuda", 0)]):
        assert raised(name, device) == (ValueError, "cuda doesn't match the current accelerator cpu."), (name, device)


def test_negative() -> None:
    for name, device in itertools.product(FUNCTIONS, NEGATIVE):
        check_negative(name, device)


def test_functions_without_a_device_take_none() -> None:
    assert find_takers() == []
