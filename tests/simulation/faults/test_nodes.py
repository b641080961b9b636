"""Nodes of a cluster that are killed, while the others go on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.command.test_simulate import simulate, takes_cuda_build
from tests.support.simulation import REPOSITORY, linux_only
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = linux_only

TWO_NODES = 'import os, sys, time; node = os.environ["PET_NODE_RANK"]; {}'


@takes_cuda_build
@pytest.mark.torch_free
def test_the_other_nodes_go_on_and_the_last_one_decides() -> None:
    program = TWO_NODES.format('time.sleep(node == "1"); print("ended"); sys.exit(3 if node == "0" else {})')
    for status in (0, 5):
        command = ("--nodes", "2", "--on-node-failure", "continue", "--", sys.executable, "-c", program.format(status))
        done = simulate(*command)
        assert (done.returncode, done.stdout) == (status, "[node 0] ended\n[node 1] ended\n"), done.stderr
        assert done.stderr == "python -m accelerator simulate: node 0 failed with status 3; the others go on\n"


@takes_cuda_build
@pytest.mark.torch_free
def test_going_on_needs_nodes() -> None:
    done = simulate("--on-node-failure", "continue", "--", "true")
    assert (done.returncode, "--on-node-failure needs --nodes" in done.stderr) == (2, True)


@needs_cuda_torch
@pytest.mark.slow
def test_torchrun_forms_a_smaller_group_when_a_node_is_killed() -> None:
    command = [sys.executable, "-m", "accelerator", "simulate", "--nodes", "2", "--memory", "1GiB"]
    command += ["--fault", "kill,node=1,after_ops=20", "--on-node-failure", "continue", "--"]
    # Node 0 has the store, which must outlive node 1. Both have the host's name, by which torchrun would tell.
    configuration = "last_call_timeout=15,keep_alive_interval=1,is_host=$((PET_NODE_RANK == 0))"
    command += ["sh", "-c", f'PET_RDZV_CONF="{configuration}" exec "$@"', "sh"]
    command += [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "3",
    ]
    command += ["--rdzv-backend", "c10d", "--rdzv-id", "job"]
    command += ["-m", "tests.simulation.cluster.reformed_rank"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[node 0] rank 0 of 1"]
    assert "node 1 failed with status 137; the others go on" in done.stderr
