"""Trainings shared by several processes over nccl have the losses of one process on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.support import simulated_environment, training_ranks, trainings
from tests.support.simulation import REPOSITORY, linux_only
from tests.support.trainings import assert_same_losses, cross_entropy

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    linux_only,
    pytest.mark.skipif(torch.version.cuda is None, reason="simulated GPUs are for CUDA builds of torch"),
    pytest.mark.xdist_group("rank trainings"),
]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank found."""
    command = [sys.executable, "-m", "tests.support.training_ranks", str(request.param)]
    environment = simulated_environment(gpus=request.param)
    child = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False)
    assert child.returncode == 0, child.stderr[-6000:]
    return json.loads(child.stdout.splitlines()[-1])


def language_losses() -> list[float]:
    return trainings.train(trainings.Language, training_ranks.batch(), "cpu")


def deep_losses() -> list[float]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*training_ranks.deep_net())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)[:, :5]

    return trainings.train(Net, trainings.pictures("cpu", 16), "cpu")


def picture_losses() -> list[float]:
    inputs, target = training_ranks.pictures()
    kept: list[nn.Module] = []

    def wrap(model: nn.Module) -> nn.Module:
        kept.append(model)
        return model

    losses = trainings.train(training_ranks.Pictures, (inputs, target), "cpu", wrap=wrap)
    kept[0].eval()
    return [*losses, cross_entropy(kept[0](inputs), target).item()]


REFERENCES: dict[str, Callable[[], list[float]]] = {"pipeline": deep_losses, "sync_batch_norm": picture_losses}
TOLERANCES = {"fsdp2_mixed": 0.03}


@pytest.mark.parametrize("name", training_ranks.TRAININGS)
def test_losses_are_those_of_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    reference = REFERENCES.get(name, partial(language_losses))()
    for rank, results in enumerate(ranks):
        losses = results[name]
        assert isinstance(losses, list), f"rank {rank}: {losses}"
        assert_same_losses(losses, reference, TOLERANCES.get(name, 2e-4))
