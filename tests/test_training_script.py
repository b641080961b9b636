"""The training scripts of docs/training.md run under torchrun, on simulated GPUs and on the CPU, with the same losses."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support import ROOT, plain_environment, simulated_environment
from tests.support.discovery import on_simulated_gpus

if TYPE_CHECKING:
    from pathlib import Path

PAGE = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
BEFORE, AFTER = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
(SHOWN,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
(MEMORY,) = re.findall(r"--memory (\w+)", PAGE)
ARGUMENTS = re.findall(r"train\.py (\d+) (\d+) \.$", PAGE, re.MULTILINE)

pytestmark = pytest.mark.slow


def train(script: str, folder: Path, environment: dict[str, str], epochs: int, batch: str) -> list[str]:
    """Run a script on two ranks until the epoch, and return the lines of rank 0. The folder keeps the checkpoints."""
    folder.mkdir(exist_ok=True)
    program = folder / "train.py"
    program.write_text(script, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(program), str(epochs), batch, "."]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout.splitlines()


def numbers(lines: list[str]) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in lines]


@on_simulated_gpus
def test_the_ported_script_has_the_losses_of_the_original(tmp_path: Path) -> None:
    """The page's lines are compared within 5 %, because bfloat16 rounds as the CPU's kernels do."""
    assert len(set(ARGUMENTS)) == 1
    epochs, batch = ARGUMENTS[0]
    environment = simulated_environment(gpus=2, memory=MEMORY, state=tmp_path / "state")
    original = train(BEFORE, tmp_path / "before", environment, int(epochs), batch)
    first = train(AFTER, tmp_path / "after", environment, 2, batch)
    resumed = train(AFTER, tmp_path / "after", environment, int(epochs), batch)
    assert [*first[:2], *resumed] == original
    assert numbers(original) == pytest.approx(numbers(SHOWN.splitlines()), rel=0.05)
    assert [line.split(" loss ")[0] for line in original[:-1]] == re.findall(r"^(epoch .*) loss", SHOWN, re.MULTILINE)


def test_the_ported_script_trains_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    environment = plain_environment()
    whole = train(AFTER, tmp_path / "whole", environment, 4, "2048")
    first = train(AFTER, tmp_path / "parts", environment, 2, "2048")
    resumed = train(AFTER, tmp_path / "parts", environment, 4, "2048")
    assert [*first[:2], *resumed] == whole
    assert numbers(whole) == pytest.approx(numbers(SHOWN.splitlines()), rel=0.05)
