"""Correct programs are silent."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from tests import support
from tests.support import simulated_environment
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [needs_cuda_torch, pytest.mark.xdist_group("races")]
programs: Any = pytest.importorskip("tests.simulation.races.programs", reason="needs torch", exc_type=ImportError)

_RUN = """
import torch, json, sys, warnings
warnings.simplefilter("ignore")
from tests.simulation.races import programs
found = programs.run_all(json.loads(sys.argv[1]))
print("FOUND", json.dumps(found))
"""
# They start other processes, or import much of torch.
_SLOW = ("loader_with_workers", "saving_in_the_background")


def _run(names: list[str]) -> dict[str, list[str]]:
    done = support.python(_RUN, simulated_environment(gpus=2, races="report"), json.dumps(names), timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout.partition("FOUND ")[2])
    return found


@cache
def _found() -> dict[str, list[str]]:
    return _run([name for name in programs.PROGRAMS if name not in _SLOW])


@pytest.mark.parametrize("name", [name for name in programs.PROGRAMS if name not in _SLOW])
def test_program(name: str) -> None:
    assert _found()[name] == []


@pytest.mark.slow
def test_slow_programs_and_repetitions() -> None:
    assert not any(_run(list(programs.PROGRAMS)).values())
    for _ in range(9):
        assert not any(_run([name for name in programs.PROGRAMS if name not in _SLOW]).values())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", pytest.param("reduce-overhead", marks=pytest.mark.exhaustive)])
def test_compiled_training_step(mode: str) -> None:
    program = f"""
import torch
from accelerator import simulation
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
compiled = torch.compile(model, mode={mode!r})
for _ in range(5):
    compiled(torch.randn(16, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
print(simulation.races())
"""
    done = support.python(program, simulated_environment(gpus=1, races="report"), timeout=300)
    assert (done.returncode, done.stdout) == (0, "()\n"), done.stderr
