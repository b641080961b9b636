"""Trainings on two ranks under torchrun whose GPU fails: how they end, and whether a restart has the same losses."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.simulation.nccl.test_nccl import find_abandoned_files
from tests.support.simulation import REPOSITORY, linux_only
from tests.support.simulation_driver import LOST_GPU, needs_cuda_torch

pytestmark = [linux_only, needs_cuda_torch, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("survivor.py")
STEPS = 8
SECONDS = 150


class Run(NamedTuple):
    status: int
    losses: dict[int, str]
    repeated: int  # steps that a restart did again
    errors: str
    seconds: float


def train(folder: Path, faults: list[str], *, strategy: str = "ddp", restarts: int = 1) -> Run:
    """Train with faults."""
    return run_program([str(PROGRAM), str(folder), strategy], faults, restarts=restarts)


def run_program(program: list[str], faults: list[str], *, restarts: int = 1) -> Run:
    """Run a training with faults under torchrun. The losses are those of the last time that a step was done."""
    options = [word for fault in faults for word in ("--fault", fault)]
    command = [sys.executable, "-m", "accelerator", "simulate", "--gpus", "2", "--memory", "1GiB", *options, "--"]
    command += [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", str(restarts), *program]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment |= {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}  # which take a minute
    environment.pop("PYTHONUNBUFFERED", None)  # print() would write a line and its end separately, and a rank die between
    begin = time.monotonic()
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    steps = re.findall(r"^step (\d+): (\S+)$", done.stdout, re.MULTILINE)
    losses = {int(step): loss for step, loss in steps}
    return Run(done.returncode, losses, len(steps) - len(losses), done.stderr, time.monotonic() - begin)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """The losses of a run without faults, by strategy."""
    found = {}
    for strategy in ("ddp", "fsdp", "pipeline"):
        run = train(tmp_path_factory.mktemp(strategy), [], strategy=strategy)
        assert run.status == 0, run.errors
        assert [*run.losses] == [*range(1, STEPS + 1)]
        found[strategy] = run.losses
    return found


# The fault, what it says on stderr, and after which collective of the rank it fires.
FAULTS = {
    "xid=94": "uncorrectable ECC error encountered",
    "xid=74": "uncorrectable NVLink error detected during the execution",
    "xid=13": "unspecified launch failure",
    "xid=109,for=1": "unspecified launch failure",
    "hang": "timed out|timing out",
    "link,for=14": "timed out|timing out",
}


# Each strategy once, with two kinds of errors and a hang.
SAMPLE = {("xid=94", "fsdp"), ("xid=13", "pipeline"), ("hang", "ddp")}


@pytest.mark.parametrize(
    ("fault", "strategy"),
    [
        pytest.param(*pair, marks=() if pair in SAMPLE else pytest.mark.exhaustive)
        for pair in itertools.product(FAULTS, ("ddp", "fsdp", "pipeline"))
    ],
)
def test_a_restart_has_the_same_losses(tmp_path: Path, expected: dict[str, dict[int, str]], fault: str, strategy: str) -> None:
    after = {"ddp": 20, "fsdp": 25, "pipeline": 10}[strategy]  # of 18 in a pipeline on torch 2.14
    run = train(tmp_path, [f"{fault},gpu=1,after_collectives={after}"], strategy=strategy)
    assert run.status == 0, run.errors
    assert re.search(FAULTS[fault], run.errors), run.errors
    assert run.losses == expected[strategy]
    assert "never fired" not in run.errors


def test_a_lost_gpu_stays_lost_for_a_restart(tmp_path: Path) -> None:
    run = train(tmp_path, ["xid=79,gpu=1,after_collectives=20"])
    assert run.status == 1
    assert "GPU has fallen off the bus" in run.errors
    assert LOST_GPU in run.errors, run.errors


def test_a_slow_gpu_changes_no_loss(tmp_path: Path, expected: dict[str, dict[int, str]]) -> None:
    run = train(tmp_path, ["slow=2ms,gpu=1"])
    assert (run.status, run.losses, run.repeated) == (0, expected["ddp"], 0), run.errors


def test_a_flipped_bit_changes_losses_and_says_nothing(tmp_path: Path, expected: dict[str, dict[int, str]]) -> None:
    # Many: which op has which number differs between versions of torch, and the results of some do not matter.
    run = train(tmp_path, [f"flip=29,gpu=1,after_ops={number}" for number in range(100, 200, 7)])
    assert run.status == 0, run.errors
    assert run.losses != expected["ddp"]
    assert "rror" not in run.errors, run.errors


def test_a_killed_rank_recovers(tmp_path: Path, expected: dict[str, dict[int, str]]) -> None:
    run = train(tmp_path, ["kill,rank=1,after_ops=200"])
    assert (run.status, run.losses) == (0, expected["ddp"]), run.errors


def test_a_fault_that_never_fires_is_said_and_changes_nothing(tmp_path: Path, expected: dict[str, dict[int, str]]) -> None:
    run = train(tmp_path, ["xid=94,gpu=1,after_collectives=4000"])
    assert (run.status, run.losses, run.repeated) == (0, expected["ddp"], 0)
    assert re.search(r"the fault xid=94,gpu=1,after_collectives=4000 never fired, after \d+ collectives\n$", run.errors), (
        run.errors
    )


# ---- Random plans. ----

PLANS = 40  # 200 have run; more take hours


def make_plan(seed: int) -> list[str]:
    """Return one to three faults that depend on the seed."""
    draw = random.Random(seed)

    def make_fault() -> str:
        kinds = (
            "xid=13 xid=31 xid=48 xid=63 xid=74 xid=79 xid=92 xid=94 xid=95 xid=109,for=1 xid=119,for=1 hang hang,for=1"
            " slow=1ms slow=3ms,for=2 link,for=3 link,for=12 kill flip=" + str(draw.randrange(32))
        )
        what = draw.choice(kinds.split())
        where = f"rank={draw.randrange(2)}" if what == "kill" else draw.choice((f"gpu={draw.randrange(2)}", "rank=1"))
        clock = draw.choice(("ops", "collectives", "seconds", "probability"))
        if clock == "probability":
            return f"{what},{where},probability=0.01,seed={draw.randrange(1000)}"
        last = {"ops": 1500, "collectives": 60, "seconds": 6}[clock]
        return f"{what},{where},after_{clock}={draw.randrange(last)}"

    return [make_fault() for _ in range(draw.randrange(1, 4))]


def processes(folder: Path) -> set[str]:
    """Return the processes of a run."""
    return {path.name for path in Path("/proc").glob("[0-9]*") if os.fsencode(folder) in read(path / "cmdline")}


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


SEEDS = [pytest.param(seed, marks=() if seed < 2 else pytest.mark.exhaustive) for seed in range(PLANS)]


@pytest.mark.parametrize("seed", SEEDS)
def test_every_run_of_a_random_plan_ends_and_leaves_nothing(
    tmp_path: Path, expected: dict[str, dict[int, str]], seed: int
) -> None:
    plan = make_plan(seed)
    files = find_abandoned_files()
    run = train(tmp_path, plan)  # which has a timeout
    assert processes(tmp_path) == set(), plan
    assert find_abandoned_files() <= files, plan
    assert run.status in (0, 1), (plan, run.errors)
    is_silent = any(fault.startswith("flip") for fault in plan)
    if run.status == 0 and (run.errors.count(" never fired") == len(plan) or not is_silent):
        assert run.losses == expected["ddp"], plan
