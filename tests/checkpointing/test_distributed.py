"""Checkpointing over two and four gloo processes: one world of each size runs all cases."""

from __future__ import annotations

import json
import os

import pytest
import torch.distributed

from tests.checkpointing import ranks
from tests.support import checkpointing_worker as worker

pytestmark = [
    pytest.mark.xdist_group("worlds"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
]

# Beside the names of cases: how a rank's process ended.
ENDED = "ended"


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank says of each case: nothing if it passed, else the traceback."""
    size: int = request.param
    folder = tmp_path_factory.mktemp(f"world{size}")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "ACCELERATOR_BACKEND": "cpu", "OMP_NUM_THREADS": "1"}
    results = []
    for rank, ended in enumerate(ranks.run("tests.support.checkpointing_worker", size, folder, environment)):
        path = folder / f"{rank}.json"
        assert path.exists(), ended.said
        results.append({**json.loads(path.read_text()), ENDED: f"status {ended.status}, after:\n{ended.said}"})
    return results


CASES = [
    pytest.param(size, name, id=f"{world}-{name}", marks=marks)
    for size, world, marks in ((2, "two", ()), (4, "four", pytest.mark.slow))
    for name, _ in worker.cases(size)
]


@pytest.mark.parametrize(("results", "name"), CASES, indirect=["results"], scope="module")
def test_over_processes(results: list[dict[str, str]], name: str) -> None:
    for rank, said in enumerate(results):
        assert name in said, f"rank {rank} did not come to it: {said[ENDED]}"
        assert not said[name], f"rank {rank}: {said[name]}"
