"""Distributed trainings over nccl have the losses and gradients of one process on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from tests.simulation.trainings import training_ranks, trainings
from tests.simulation.trainings.trainings import assert_same_losses, cross_entropy
from tests.support import module, simulated_environment
from tests.support.simulation import linux_only
from tests.support.simulation_driver import needs_cuda_torch

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [linux_only, needs_cuda_torch, pytest.mark.xdist_group("rank trainings")]

WORLD_SIZES = (2, pytest.param(4, marks=pytest.mark.slow))


@pytest.fixture(scope="module", params=WORLD_SIZES)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each rank by the training's name."""
    file = tmp_path_factory.mktemp("ranks") / "results"
    environment = simulated_environment(gpus=request.param)
    arguments = "tests.simulation.trainings.training_ranks", environment, str(request.param), str(file)
    child = module(*arguments, prelude="import torch._dynamo", timeout=280)  # DDP imports it
    assert child.returncode == 0, child.stderr[-6000:]
    return torch.load(file)


class Deep(nn.Module):
    """The whole net of the pipeline, of which each rank has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*training_ranks.deep_net())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)[:, :5]


def train_on_the_cpu(make: Callable[[], nn.Module], data: tuple[torch.Tensor, torch.Tensor]) -> training_ranks.Training:
    """Return the losses and the first gradients of the same training in this process."""
    torch.manual_seed(0)
    model = make()
    cross_entropy(model(data[0]), data[1]).backward()
    kept: list[nn.Module] = []

    def wrap(model: nn.Module) -> nn.Module:
        kept.append(model)
        return model

    losses = trainings.train(make, data, "cpu", wrap=wrap)
    if make is training_ranks.Pictures:
        kept[0].eval()
        losses.append(cross_entropy(kept[0](data[0]), data[1]).item())
    gradients = {name.removeprefix("body.") if make is Deep else name: p.grad for name, p in model.named_parameters()}
    return training_ranks.Training(losses, gradients)


MODELS: dict[str, Callable[[], tuple[Callable[[], nn.Module], tuple[torch.Tensor, torch.Tensor]]]] = {
    "pipeline": lambda: (Deep, trainings.pictures("cpu", 16)),
    "sync_batch_norm": lambda: (training_ranks.Pictures, training_ranks.pictures()),
}
LOSS_TOLERANCES = {"fsdp2_mixed": 0.03}
GRADIENT_TOLERANCES = {"fsdp2_mixed": 0.02}


@pytest.mark.parametrize("name", training_ranks.TRAININGS)
def test_losses_and_gradients_equal_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    make, data = MODELS[name]() if name in MODELS else (trainings.Language, training_ranks.batch())
    expected = train_on_the_cpu(make, data)
    largest = max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    names: set[str] = set()
    worst = {"losses": 0.0, "gradients": 0.0}
    for rank, results in enumerate(ranks):
        assert not isinstance(results[name], str), f"rank {rank}: {results[name]}"
        losses, gradients = results[name]
        assert_same_losses(losses, expected.losses, LOSS_TOLERANCES.get(name, 1e-5))
        worst["losses"] = max(worst["losses"], *(abs(a - b) for a, b in zip(losses, expected.losses, strict=True)))
        names |= gradients.keys()
        for parameter, gradient in gradients.items():
            difference = float((gradient - expected.gradients[parameter]).abs().max()) / largest
            worst["gradients"] = max(worst["gradients"], difference)
    assert names == expected.gradients.keys()
    print(f"{len(ranks)} ranks, {name}: losses {worst['losses']:.1e}, gradients {worst['gradients']:.1e} of the largest")
    assert worst["gradients"] <= GRADIENT_TOLERANCES.get(name, 2e-6)
