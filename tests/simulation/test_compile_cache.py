"""Inductor's cache on simulated machines: processes share it, a second process compiles nothing, all files are in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT, simulated_environment
from tests.support.discovery import BUILD
from tests.support.simulation import linux_only
from tests.support.simulation_driver import needs_cuda_torch

assert BUILD
pytestmark = [
    linux_only,
    needs_cuda_torch,
    pytest.mark.slow,
    pytest.mark.skipif(
        BUILD.version.startswith(("2.6", "2.7")), reason="torch 2.8 is the oldest whose compiled code is simulated"
    ),
]

PROGRAM = """
import torch
import torch._inductor.config

torch._inductor.config.cpp_cache_precompile_headers = False  # compiling them takes longer than they save here
x = torch.ones(5, device="cuda", requires_grad=True)
result = torch.compile(lambda x: (x.sin() * 2).softmax(0).square().sum())(x)
result.backward()
print(round(float(result), 4), x.device, round(float(x.grad.abs().sum()), 4))
"""
COMPILER = """#!/bin/sh
echo compiles >> "$COMPILATIONS"
exec g++ "$@"
"""


class Machine:
    """A simulated machine with its own home, folder for temporary files, working directory and cache."""

    def __init__(self, folder: Path) -> None:
        self.folders = {name: folder / name for name in ("home", "temporary", "work", "cache")}
        for path in self.folders.values():
            path.mkdir()
        (folder / "g++").write_text(COMPILER)
        (folder / "g++").chmod(0o755)
        self.compilations = folder / "compilations"
        self.compilations.touch()
        self._env = simulated_environment(
            {
                "HOME": str(self.folders["home"]),
                "TMPDIR": str(self.folders["temporary"]),
                "TORCHINDUCTOR_CACHE_DIR": str(self.folders["cache"]),
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
                "CXX": str(folder / "g++"),
                "COMPILATIONS": str(self.compilations),
                "PYTHONPATH": str(ROOT),
                "TRITON_DEFAULT_FP_FUSION": "1",  # Triton 3.9 warns without it
            }
        )

    def start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=self._env,
            cwd=self.folders["work"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def count_compilations(self) -> int:
        return len(self.compilations.read_text().splitlines())


def test_a_second_process_compiles_nothing_and_no_file_is_elsewhere(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    first = machine.start().communicate()
    compilations = machine.count_compilations()
    assert compilations > 0
    second = machine.start().communicate()
    assert machine.count_compilations() == compilations
    assert first == second == ("0.2 cuda:0 0.0\n", "")
    assert any(machine.folders["cache"].rglob("*.so"))
    for name in ("home", "temporary", "work"):
        assert [str(path) for path in machine.folders[name].rglob("*")] == []


def test_concurrent_processes_share_the_cache(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    processes = [machine.start() for _ in range(2)]
    results = [process.communicate() for process in processes]
    assert results == [("0.2 cuda:0 0.0\n", "")] * 2
