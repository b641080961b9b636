"""Discovery, monitoring and launching without an accelerator: correct results, and errors that name the reason."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

import accelerator as acc
from accelerator._machine import torch_build


def test_queries_without_an_accelerator() -> None:
    assert acc.is_available() is acc.is_available(strict=True) is False
    assert acc.device_count() == 0
    assert acc.visible_devices() == acc.visible_devices({}) == ()
    assert acc.get_device_name() == acc.get_device_name(0) == acc.get_device_name(5) == acc.get_device_name("cpu") == "cpu"
    assert acc.device_name() == acc.device_name(0) == acc.device_name(3) == acc.device_name("cpu:2") == "cpu"
    assert acc.get_device_index() == acc.get_device_index(6) == acc.get_device_index("cpu") == 0
    assert acc.compute_capability() is acc.compute_capability(1) is acc.numa_node(2) is acc.is_nvlink_connected(0, 1) is None
    assert acc.usable_devices() == ()
    assert acc.is_initialized() is acc.is_in_bad_fork() is False
    assert acc.is_fork_safe() is True


def test_unavailable_reason_names_the_torch_build() -> None:
    reason = acc.unavailable_reason()
    assert reason
    assert "\n" not in reason
    build = torch_build.read()
    assert build is not None
    assert build.version == torch.__version__
    if build.cuda is None and build.hip is None:
        assert reason == f"torch {torch.__version__} is a CPU build; install one that is built for the accelerator"
    with mock.patch.dict(os.environ, {"ACCELERATOR_BACKEND": "cpu"}):
        assert acc.unavailable_reason() == "ACCELERATOR_BACKEND=cpu disables the accelerator; unset it"
    assert acc.unavailable_reason() == reason


@pytest.mark.parametrize("value", ["", "0", "-1", "GPU-x", "MIG-", "\n", "x" * 10_000])
def test_cuda_visible_devices_has_no_effect_without_gpus(value: str) -> None:
    with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": value}):
        assert acc.device_count() == 0
        assert acc.is_available() is False
        assert acc.unavailable_reason()


MONITORING = "utilization memory_usage device_memory_used temperature power_draw clock_rate processes telemetry"


@pytest.mark.parametrize("name", [*MONITORING.split(), "list_gpu_processes"])
def test_monitoring_raises_with_the_unavailable_reason(name: str) -> None:
    for device in (None, 0, 1, 7, "cpu", "cpu:1", torch.device("cpu")):
        with pytest.raises(RuntimeError) as error:
            getattr(acc, name)(device)
        assert str(error.value) == f"There is no device to read from: {acc.unavailable_reason()}"
    with pytest.raises(ValueError):
        getattr(acc, name)(-1)
    with pytest.raises(ValueError):
        getattr(acc, name)("cuda")
    with pytest.raises(TypeError):
        getattr(acc, name)(1.0)


def test_launching_functions_without_an_accelerator() -> None:
    assert acc.communication_backend_name() == "gloo"
    assert acc.communication_backend_version() is None
    assert acc.export_envs() == ()
    # The processes may run on another machine, so every index is valid.
    assert acc.visible_devices_envs() == ("CUDA_VISIBLE_DEVICES",)
    assert acc.set_visible_devices_envs({}, [1, 0]) == {"CUDA_VISIBLE_DEVICES": "1,0"}
