"""Nodes of a cluster that are killed, while the others go on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command.test_simulate import simulate, takes_cuda_build
from tests.support.simulation import REPOSITORY, linux_only
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = linux_only


@takes_cuda_build
@pytest.mark.torch_free
def test_the_other_nodes_go_on_and_the_last_one_decides() -> None:
    program = 'import os, sys, time; node = int(os.environ["PET_NODE_RANK"]); time.sleep(0.5 * node); print("ended"); '
    program += "sys.exit({} if node else 3)"
    for status in (0, 5):
        command = ("--nodes", "2", "--on-node-failure", "continue", "--", sys.executable, "-c", program.format(status))
        done = simulate(*command)
        assert (done.returncode, done.stdout) == (status, "[node 0] ended\n[node 1] ended\n"), done.stderr
        assert done.stderr == "python -m accelerator simulate: node 0 failed with status 3; the others go on\n"


RESTARTED = """
import os, subprocess, sys, time
from pathlib import Path

failed, again = Path(sys.argv[1]), Path(sys.argv[1] + ".again")
if os.environ["PET_NODE_RANK"] == "1":
    if failed.exists():
        again.touch()
        print("again", flush=True)
        sys.exit(0)
    failed.touch()
    sys.exit(3)
command = [sys.executable, "-m", "accelerator", "fault", "node=1", "restart"]
while (done := subprocess.run(command, capture_output=True, text=True)).returncode:
    assert done.stderr == (
        "python -m accelerator fault: no node 1 has failed in a cluster that runs with --on-node-failure continue\\n"
    ), done.stderr
    time.sleep(0.1)
while not again.exists():  # node 1 starts again while this node runs
    time.sleep(0.05)
"""


@takes_cuda_build
@pytest.mark.torch_free
def test_a_failed_node_starts_again(tmp_path: Path) -> None:
    command = ("--nodes", "2", "--on-node-failure", "continue", "--", sys.executable, "-c", RESTARTED, str(tmp_path / "failed"))
    done = simulate(*command)
    assert (done.returncode, done.stdout) == (0, "[node 1] again\n"), done.stderr
    assert done.stderr == (
        "python -m accelerator simulate: node 1 failed with status 3; the others go on\n"
        "python -m accelerator simulate: node 1 starts again\n"
    )


def run_elastic(*faults: str, program: str) -> subprocess.CompletedProcess[str]:
    """Run a module under torchrun on two nodes of which one may fail."""
    command = [sys.executable, "-m", "accelerator", "simulate", "--nodes", "2", "--memory", "1GiB"]
    command += [*(word for fault in faults for word in ("--fault", fault)), "--on-node-failure", "continue", "--"]
    # Node 0 has the store, which must outlive node 1. torchrun would tell by the endpoint, but 127.0.0.1 is an address of both.
    configuration = "last_call_timeout=15,keep_alive_interval=1,is_host=$((PET_NODE_RANK == 0))"
    command += ["sh", "-c", f'PET_RDZV_CONF="{configuration}" exec "$@"', "sh"]
    command += [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"]
    command += ["--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "job", "-m", program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=200, check=False)


@needs_cuda_torch
@pytest.mark.slow
@pytest.mark.exhaustive  # the next test forms such a group before the node starts again
def test_torchrun_forms_a_smaller_group_when_a_node_is_killed() -> None:
    done = run_elastic("kill,node=1,after_ops=20", program="tests.simulation.cluster.reformed_rank")
    assert done.returncode == 0, done.stderr
    # Node 0 may print a line before, until its watchdog ends it.
    assert done.stdout.splitlines()[-1:] == ["[node 0] rank 0 of 1"]
    assert "node 1 failed with status 137; the others go on" in done.stderr


@needs_cuda_torch
@pytest.mark.slow
def test_torchrun_forms_a_group_with_a_killed_node_that_starts_again() -> None:
    done = run_elastic("kill,node=1,after_ops=20", program="tests.simulation.cluster.returning_rank")
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-2:]  # node 0 may print a line before, until its watchdog ends it
    assert sorted(last) == ["[node 0] rank 0 of 2", "[node 1] rank 1 of 2"]
    assert "node 1 failed with status 137; the others go on" in done.stderr
    assert "node 1 starts again" in done.stderr
