"""Tests of checkpoints over nccl on simulated GPUs: the values equal those without checkpoints and those of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.checkpointing import ranks
from tests.support import checkpointing_nccl_rank, simulated_environment
from tests.support.checkpointing_cases import OURS
from tests.support.checkpointing_memory import MODES
from tests.support.simulation import linux_only

pytestmark = [
    pytest.mark.xdist_group("worlds"),
    linux_only,
    pytest.mark.skipif(torch.version.cuda is None, reason="simulated GPUs are for CUDA builds of torch"),
]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)], ids=["two", "four"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run the ranks and return the values that each one wrote."""
    size: int = request.param
    folder = tmp_path_factory.mktemp(f"nccl{size}")
    environment = simulated_environment(gpus=size)
    for ended in ranks.run("tests.support.checkpointing_nccl_rank", size, folder, environment):
        assert ended.status == 0, ended.output
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


@pytest.mark.parametrize("shape", checkpointing_nccl_rank.SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_values_equal_no_checkpointing(results: list[dict[str, Any]], mode: str, shape: str) -> None:
    for rank, written in enumerate(results):
        for ckpt in OURS:
            pairs = zip(written[shape][f"{mode}, {ckpt.__name__}"], written[shape]["plain"], strict=True)
            assert all(torch.equal(*pair) for pair in pairs), f"rank {rank}"


@pytest.mark.parametrize("shape", checkpointing_nccl_rank.SHAPES)
def test_values_are_close_to_the_cpu(results: list[dict[str, Any]], shape: str) -> None:
    masks = [written[shape]["masks"] for written in results]
    # The masks are the same on all ranks outside of tracker.fork(), and differ inside.
    assert all(torch.equal(own[1], masks[0][1]) for own in masks)
    assert not any(torch.equal(own[0], masks[0][0]) for own in masks[1:])
    for rank, written in enumerate(results):
        expected = checkpointing_nccl_rank.reference(checkpointing_nccl_rank.SHAPES[shape], rank, masks)
        for index, (one, other) in enumerate(zip(written[shape]["plain"], expected, strict=True)):
            assert torch.allclose(one, other, rtol=1e-4, atol=1e-5), f"rank {rank}, value {index}"
