"""Ranks of torch on two simulated machines: collectives, trainings, checkpoints, and a node that is killed."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command.test_cluster import free_port
from tests.simulation.nccl.test_nccl import find_abandoned_files
from tests.simulation.trainings import training_ranks, trainings
from tests.simulation.trainings.test_rank_trainings import train_on_the_cpu
from tests.support.simulation import REPOSITORY, linux_only
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [linux_only, needs_cuda_torch, pytest.mark.slow]

GPUS = 4
SECONDS = 280


def start(nodes: int, *arguments: str) -> subprocess.Popen[str]:
    """Start a case on 4 GPUs of each node."""
    command = [sys.executable, "-m", "accelerator", "simulate", "--nodes", str(nodes), "--gpus", str(GPUS), "--memory", "1GiB"]
    command += ["--", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(GPUS)]
    command += ["-m", "tests.simulation.cluster.cluster_rank", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(nodes: int, *arguments: str) -> None:
    with start(nodes, *arguments) as process:
        output, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, output + errors


def test_collectives() -> None:
    run(2, "collectives")


@pytest.mark.parametrize("backend", ["c10d", pytest.param("static", marks=pytest.mark.exhaustive)])
def test_rendezvous_at_the_name_of_a_node(backend: str) -> None:
    options = ["--rdzv-backend", backend, "--rdzv-endpoint", f"node0:{free_port()}", "--rdzv-id", "job"]
    command = [sys.executable, "-m", "accelerator", "simulate", "--nodes", "2", "--", sys.executable, "-m"]
    program = "import torch.distributed as dist; dist.init_process_group('gloo'); dist.barrier(); print(dist.get_world_size())"
    command += ["torch.distributed.run", *options, "--no-python", sys.executable, "-c", program]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert sorted(done.stdout.splitlines()) == ["[node 0] 2", "[node 1] 2"], done.stderr


@pytest.mark.exhaustive
def test_hybrid_sharding_has_the_losses_of_the_cpu_and_its_checkpoint_is_loaded_on_one_node(tmp_path: Path) -> None:
    run(2, "train", str(tmp_path))
    run(1, "load", str(tmp_path))
    trained: Any = torch.load(tmp_path / "trained")
    (losses, gradients), weights = trained
    expected = train_on_the_cpu(trainings.Language, training_ranks.batch())
    trainings.assert_same_losses(losses, expected.losses, 1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected.gradients[name], atol=1e-6, rtol=1e-4)
    loaded: Any = torch.load(tmp_path / "loaded")
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_hierarchical_partitioning_of_deepspeed_changes_no_loss(tmp_path: Path) -> None:
    run(2, "deepspeed", str(tmp_path))
    flat, hierarchical = torch.load(tmp_path / "losses")
    trainings.assert_same_losses(hierarchical, flat, 1e-5)
    assert flat[-1] < flat[0] / 2


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive)])
def test_a_node_that_is_killed_ends_the_others(number: signal.Signals, tmp_path: Path) -> None:
    files_before = find_abandoned_files()
    with start(2, "step_forever", str(tmp_path)) as process:
        deadline = time.monotonic() + SECONDS
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        launchers = dict(path.name.split("-") for path in tmp_path.iterdir())
        os.kill(int(launchers["1"]), number)
        output, errors = process.communicate(timeout=SECONDS)
    # torchrun ends with status 1 after SIGTERM.
    assert process.returncode == (128 + number if number == signal.SIGKILL else 1), output + errors
    assert "node 1 failed with status" in errors
    assert find_abandoned_files() <= files_before


def test_an_interrupt_ends_all_nodes(tmp_path: Path) -> None:
    with start(2, "step_forever", str(tmp_path)) as process:
        deadline = time.monotonic() + SECONDS
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, output + errors
