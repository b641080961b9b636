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

DTYPES = ("float32", "bfloat16")
# The figures of an op, by its name and by each of these types.
RECORDED: dict[str, list[list[int]]] = json.loads(Path(__file__).with_name("h200_memory_of_ops.json").read_text())
# torch's allocator counts the rest of a block if it is smaller than this. Which block it takes depends on what ran before.
REST = 2**20
# Cases that need not agree, by the beginning of their names, and why.
EXPECTED = {
    "conv2d": "cuDNN's workspace, whose size it chooses by the GPU's model",
    "(LSTM|GRU|RNN)": "cuDNN's workspace, as above",
    "batch_norm eval channels_last": "the copy that its backward makes is not counted",
    "(nonzero|cumprod|prod)": "it depends on values, which a rehearsal does not have",
}


def differences(name: str, recorded: list[int], rehearsed: list[int]) -> list[str]:
    """Describe an op whose memory at the end or peak differs by more than 2 % of the largest figure and a block's rest."""
    tolerance = 0.02 * max(recorded) + 2 * REST
    differs = any(abs(theirs - ours) > tolerance for theirs, ours in zip(recorded, rehearsed, strict=True))
    return [f"{name}: recorded {recorded}, rehearsed {rehearsed}"] if differs else []


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", DTYPES)
def test_ops_take_the_memory_that_a_gpu_recorded(dtype: str, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "tests.recorded.memory_of_ops", str(file), dtype]
    environment = simulated_environment(name="H200", compute=False)
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    figures = {name: of_type for name, [of_type] in json.loads(file.read_text()).items()}
    position = DTYPES.index(dtype)
    recorded = {name: of_types[position] for name, of_types in RECORDED.items() if position < len(of_types)}
    assert figures.keys() == recorded.keys()
    found = [line for name, figure in figures.items() for line in differences(name, recorded[name], figure)]
    unexpected = [line for line in found if not any(re.match(pattern, line) for pattern in EXPECTED)]
    assert not unexpected, "\n".join(unexpected)


def test_that_another_figure_is_found() -> None:
    for name, of_types in RECORDED.items():
        assert [line for figures in of_types for line in differences(name, figures, figures)] == []
    recorded = RECORDED["linear (4096, 768, 3072)"][0]
    assert differences("linear", recorded, recorded) == []
    assert len(differences("linear", recorded, [*recorded[:3], recorded[3] // 2])) == 1
