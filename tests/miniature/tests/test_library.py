"""The library's tests, as its author writes them: no conftest, no helper, no GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from library import parallel, training

import accelerator as acc


def test_anywhere() -> None:
    device = training.set_up()
    assert device.type in ("cpu", "cuda")
    _, losses = training.train(device, epochs=1)
    assert len(losses) == 4


@pytest.mark.min_gpus(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_training_on_a_gpu(workers: int) -> None:
    model, losses = training.train(training.set_up(), workers=workers)
    assert all(parameter.device.type == "cuda" for parameter in model.parameters())
    assert acc.max_memory_allocated() > 0
    assert len(losses) == 8


@pytest.mark.min_gpus(2)
def test_two_gpus_average(tmp_path: Path) -> None:
    assert acc.communication_backend_name() == "nccl"
    assert [mean.tolist() for mean in parallel.averaged(2, tmp_path)] == [[1.5] * 4] * 2


@pytest.mark.simulated_machine(gpus=1, memory="1GiB")
@pytest.mark.parametrize("mebibytes", [100, 500, 900])
def test_memory_that_runs_out(mebibytes: int) -> None:
    device = training.set_up()
    held = torch.empty(mebibytes * 2**20, dtype=torch.uint8, device=device)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**30 - mebibytes * 2**19, dtype=torch.uint8, device=device)
    assert acc.memory_allocated() >= held.numel()


@pytest.mark.simulated_machine(gpus=8, name="NVIDIA H100 80GB HBM3", capability="9.0")
def test_a_large_machine() -> None:
    assert acc.device_count() == 8
    assert training.set_up(7) == torch.device("cuda:7")
    assert acc.is_bf16_supported()


@pytest.mark.simulated_machine(gpus=2, driver="old")
def test_an_old_driver() -> None:
    assert "too old" in str(acc.unavailable_reason())
    assert training.set_up().type == "cpu"


def test_on_what_is_here() -> None:
    assert acc.is_available() == (os.environ.get("ACCELERATOR_SIM_GPUS") is not None) or not acc.simulation.is_simulated()
