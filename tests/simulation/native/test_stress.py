"""Some runs of the stress program, which runs thousands by hand: forks, threads and exits beside ops."""

from __future__ import annotations

import pytest

from tests.support import module, simulated_environment
from tests.support.simulation import linux_only
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [linux_only, needs_cuda_torch, pytest.mark.slow]


def test_runs_end() -> None:
    counts = ("--runs", "8", "--processes", "1")
    child = module("tests.simulation.native.stress", simulated_environment(gpus=2), *counts, timeout=540)
    assert child.returncode == 0, child.stdout + child.stderr[-3000:]
    assert child.stdout.count(" 9 (0 failed, ") == 3, child.stdout
