"""A torch that is newer than the tables of simulated GPUs is used with the newest table, and one line says so once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelerator.simulation._settings import torch_versions
from tests.simulation.ops import new_torch
from tests.support import ROOT, simulated_environment
from tests.support.simulation_driver import needs_cuda_torch

PROGRAM = "import torch; print(torch.__version__, (torch.ones(2, device='cuda') + 1).tolist())"


def test_the_newest_torch_has_a_table() -> None:
    tables = json.loads((ROOT / "accelerator/simulation/_inside/ops/dtypes.json").read_text(encoding="utf-8"))
    assert max(map(torch_versions.release, tables)) == torch_versions.NEWEST_TORCH


@pytest.mark.slow
@needs_cuda_torch
def test_newer_torch_is_reported_once(tmp_path: Path) -> None:
    # This plug-in of torch.backends is loaded before the simulation's and changes the version that the installed torch reports.
    info = tmp_path / "newer-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: newer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nnewer = newer:load\n")
    (tmp_path / "newer.py").write_text("def load():\n    import torch\n    torch.__version__ = '2.99.0'\n")
    environment = {**simulated_environment(gpus=1), "XDG_CACHE_HOME": str(tmp_path), "CXX": "missing-compiler"}
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), environment["PYTHONPATH"]))
    lines = []
    for _ in range(2):
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.stdout == "2.99.0 [2.0, 2.0]\n", done.stderr
        lines.append([line for line in done.stderr.splitlines() if line.startswith("accelerator: torch 2.99 is newer than")])
    assert [len(found) for found in lines] == [1, 0]


def test_parameters_that_differ_are_named() -> None:
    def agrees(tensor: object, generator: object, *, out: object) -> None: ...

    def lacks_one(*, out: object) -> None: ...

    def has_another_keyword(query: object, *, result: object) -> None: ...

    def takes_all(*args: object, **kwargs: object) -> None: ...

    assert new_torch.compare_parameters(agrees, ["query"], ["out"]) is None
    assert new_torch.compare_parameters(takes_all, ["query"], ["out"]) is None
    for function in (lacks_one, has_another_keyword):
        difference = new_torch.compare_parameters(function, ["query"], ["out"])
        assert difference
        assert difference.endswith("torch has (query, out)")
