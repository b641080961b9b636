"""torchft on simulated GPUs: a replica goes on while another one restarts after a fault, and both end with the same weights."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.simulation import REPOSITORY, linux_only
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [
    linux_only,
    needs_cuda_torch,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="needs torchft"),
]

PROGRAM = Path(__file__).with_name("with_torchft.py")
STEPS = 40
COLLECTIVES = 8  # of replica 1 before the fault: one a step


def train(fault: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accelerator", "simulate", "--gpus", "2", "--memory", "1GiB"]
    command += ["--fault", f"{fault},rank=1,after_collectives={COLLECTIVES}", "--", sys.executable, str(PROGRAM)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    environment |= {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}  # which take a minute
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize("fault", ["xid=94", "kill"])
def test_a_replica_goes_on_while_the_other_restarts(fault: str) -> None:
    run = train(fault, TORCH_NCCL_ASYNC_ERROR_HANDLING="0")
    printed = run.stdout + run.stderr
    assert run.returncode == 0, printed
    assert re.findall(r"replica 0: status (\S+)", run.stdout) == ["0"], printed
    failed, restarted = re.findall(r"replica 1: status (\S+)", run.stdout)
    assert (failed != "0", restarted) == (True, "0"), printed
    alone = int(re.findall(r"replica 0: step (\d+): 1 of 2 replicas", run.stdout)[-1])
    healed = int(re.findall(r"replica 1: step (\d+): took the weights", run.stdout)[-1])
    assert alone < healed, printed
    ends = re.findall(r"replica (\d): step (\d+): (\d+) done by this process, weights (\w+)", run.stdout)
    assert len(ends) == 2, printed
    (_, last, done, weights), (_, other_last, other_done, other_weights) = sorted(ends)
    assert (other_last, other_weights) == (last, weights), printed
    assert int(last) >= STEPS
    assert int(other_done) == int(last) - healed + 1 < int(done), printed


def test_the_watchdog_ends_the_other_replica_by_default() -> None:
    run = train("kill", TORCH_NCCL_ASYNC_ERROR_HANDLING="3")  # torch's default
    assert re.findall(r"replica 0: status (\S+)", run.stdout)[0] == "-6", run.stdout + run.stderr
