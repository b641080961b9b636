"""Lightning and Hugging Face accelerate on two ranks under torchrun: a restart after a fault continues with the same losses."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.simulation.faults.test_recovery import Run, run_program
from tests.support import ROOT
from tests.support.simulation import linux_only
from tests.support.simulation_driver import LOST_GPU, needs_cuda_torch

pytestmark = [linux_only, needs_cuda_torch, pytest.mark.slow]

STEPS = 16
# After which collective of the rank the fault fires: in the third of four epochs.
LIBRARIES = {"lightning": 60, "accelerate": 28}
each_library = pytest.mark.parametrize(
    "library",
    [
        pytest.param(name, marks=pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs {name}"))
        for name in LIBRARIES
    ],
)


def program(library: str) -> Path:
    return Path(__file__).with_name(f"with_{library}.py")


def train(library: str, folder: Path, xid: int | None = None) -> Run:
    folder.mkdir()
    faults = [] if xid is None else [f"xid={xid},rank=1,after_collectives={LIBRARIES[library]}"]
    return run_program([str(program(library)), str(folder)], faults)


@each_library
def test_a_restart_continues_with_the_same_losses(library: str, tmp_path: Path) -> None:
    whole, restarted = train(library, tmp_path / "whole"), train(library, tmp_path / "restarted", xid=94)
    assert (whole.status, [*whole.losses]) == (0, [*range(1, STEPS + 1)]), whole.errors
    assert (restarted.status, restarted.losses) == (0, whole.losses), restarted.errors
    assert "uncorrectable ECC error encountered" in restarted.errors
    assert restarted.repeated < 5  # from the last checkpoint, not from the first step


@each_library
def test_a_lost_gpu_stays_lost_for_a_restart(library: str, tmp_path: Path) -> None:
    run = train(library, tmp_path / "lost", xid=79)
    assert run.status == 1
    assert "GPU has fallen off the bus" in run.errors
    assert re.search(f"{LOST_GPU}|Invalid device id", run.errors), run.errors
    assert STEPS not in run.losses


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_guide_has_lines_of_the_program(library: str) -> None:
    page = (ROOT / "docs/faults.md").read_text(encoding="utf-8")
    (code,) = re.findall(rf"<!-- run: never, lines of with_{library}\.py -->\n```python\n(.*?)```", page, re.DOTALL)
    lines = {line.strip() for line in program(library).read_text(encoding="utf-8").splitlines()} | {"..."}
    assert [line for line in code.splitlines() if line.strip() not in lines] == []
