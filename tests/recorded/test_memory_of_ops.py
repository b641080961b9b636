"""The memory of ops in rehearsals, compared with what a GPU took: an H200, driver 580.159, torch 2.11 for CUDA 13.0."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT, simulated_environment
from tests.support.simulation import linux_only
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [linux_only, needs_cuda_torch, pytest.mark.slow]

RECORDED: dict[str, list[int]] = json.loads(Path(__file__).with_name("h200_memory_of_ops.json").read_text())
# torch's allocator counts the rest of a block if it is smaller than this. Which block it takes depends on what ran before.
REST = 2**20
# Cases that need not agree, by the beginning of their names, and why.
EXPECTED = {
    "conv2d": "cuDNN's workspace, whose size it chooses by the GPU's model",
    "(LSTM|GRU|RNN)": "cuDNN's workspace, as above",
    "batch_norm eval channels_last": "the copy that its backward makes is not counted",
    "(nonzero|cumprod|prod)": "it depends on values, which a rehearsal does not have",
}


def differences(rehearsed: dict[str, list[int]]) -> list[str]:
    """Describe the cases whose memory at the end or peak differs by more than 2 % of the largest figure and a block's rest."""
    found = []
    for name, figures in rehearsed.items():
        recorded = RECORDED[name]
        tolerance = 0.02 * max(recorded[:2] + recorded[3:5]) + 2 * REST
        pairs = [(recorded[i], figures[i]) for i in (0, 1, 3, 4) if i < len(recorded)]
        if any(abs(theirs - ours) > tolerance for theirs, ours in pairs):
            found.append(f"{name}: recorded {[a for a, _ in pairs]}, rehearsed {[b for _, b in pairs]}")
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ops_take_the_memory_that_a_gpu_recorded(dtype: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.recorded.memory_of_ops", str(file), dtype]
    environment = simulated_environment(name="H200", compute=False)
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    assert figures.keys() == {name for name in RECORDED if name.endswith(dtype)}
    found = differences(figures)
    unexpected = [line for line in found if not any(re.match(pattern, line) for pattern in EXPECTED)]
    assert not unexpected, "\n".join(unexpected)


def test_that_another_figure_is_found() -> None:
    assert differences(RECORDED) == []
    name = "linear (4096, 768, 3072) float32"
    changed = {**RECORDED, name: [*RECORDED[name][:4], RECORDED[name][4] // 2, RECORDED[name][5]]}
    assert [line.partition(":")[0] for line in differences(changed)] == [name]
