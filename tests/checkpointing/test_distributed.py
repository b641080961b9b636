"""Tests of checkpoints over gloo with two and four processes. One world of each size runs all cases."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import pytest
import torch.distributed

from tests.checkpointing import ranks
from tests.support import checkpointing_worker as worker
from tests.support import plain_environment

pytestmark = [
    pytest.mark.xdist_group("worlds"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
]

# The key of the exit status and the output of a rank. The other keys are the names of cases.
ENDED = "ended"


@pytest.fixture(scope="module")
def run_world(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, str]]]:
    """Return a function that takes the size of a world and returns, for each rank, the traceback of each case.

    The traceback is empty if the case passed. A world runs only once.
    """

    @functools.cache
    def run(size: int) -> list[dict[str, str]]:
        folder = tmp_path_factory.mktemp(f"world{size}")
        environment = plain_environment(GLOO_SOCKET_IFNAME="lo", ACCELERATOR_BACKEND="cpu")
        results = []
        for rank, ended in enumerate(ranks.run("tests.support.checkpointing_worker", size, folder, environment)):
            path = folder / f"{rank}.json"
            assert path.exists(), ended.output
            results.append({**json.loads(path.read_text()), ENDED: f"status {ended.status}, after:\n{ended.output}"})
        return results

    return run


CASES = [
    pytest.param(size, name, id=f"{world}-{name}", marks=marks)
    for size, world, marks in ((2, "two", ()), (4, "four", pytest.mark.slow))
    for name, _ in worker.cases(size)
]


@pytest.mark.parametrize(("size", "name"), CASES)
def test_case_passes_on_every_rank(size: int, name: str, run_world: Callable[[int], list[dict[str, str]]]) -> None:
    for rank, results in enumerate(run_world(size)):
        assert name in results, f"rank {rank} did not come to it: {results[ENDED]}"
        assert not results[name], f"rank {rank}: {results[name]}"
