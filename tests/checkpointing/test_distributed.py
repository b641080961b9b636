"""Checkpointing over two and four gloo processes: one world of each size runs all cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed

from tests.support import checkpointing_worker as worker

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")

SECONDS = 150

# Beside the names of cases: how a rank's process ended.
ENDED = "ended"


@pytest.fixture(scope="module", params=[2, 4], ids=["two", "four"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank says of each case: nothing if it passed, else the traceback."""
    size: int = request.param
    folder = tmp_path_factory.mktemp(f"world{size}")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "ACCELERATOR_BACKEND": "cpu", "OMP_NUM_THREADS": "1"}
    logs = [(folder / f"{rank}.log").open("w") for rank in range(size)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.checkpointing_worker", str(rank), str(size), str(folder)],
            cwd=Path(__file__).parents[2],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        for process in ranks:
            process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process, log in zip(ranks, logs, strict=True):
            process.kill()
            process.wait()
            log.close()
    found = []
    for rank, process in enumerate(ranks):
        path, log = folder / f"{rank}.json", (folder / f"{rank}.log").read_text()
        assert path.exists(), log
        found.append({**json.loads(path.read_text()), ENDED: f"status {process.returncode}, after:\n{log[-2000:]}"})
    return found


@pytest.mark.parametrize("name", [name for name, _ in worker.cases()])
def test_over_processes(name: str, results: list[dict[str, str]]) -> None:
    for rank, said in enumerate(results):
        assert name in said, f"rank {rank} did not come to it: {said[ENDED]}"
        assert not said[name], f"rank {rank}: {said[name]}"
