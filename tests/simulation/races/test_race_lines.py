"""Which lines a report names, and how it words the memory."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from tests import support
from tests.support import simulated_environment
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = needs_cuda_torch

_REPORT = """
from accelerator import simulation
for race in simulation.races():
    print(race.message.splitlines()[0])
    print(race.first)
    print(race.second)
"""


def run(program: str, **machine: Any) -> list[str]:
    done = support.python(program + _REPORT, simulated_environment(gpus=2, races="report", **machine))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


DTYPES = ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "uint16", "bfloat16", "complex64"]


@pytest.mark.parametrize("compute", [True, False], ids=["engine", "python"])
def test_types(compute: bool) -> None:
    program = f"""
import torch
side = torch.cuda.Stream()
names = [name for name in {DTYPES!r} if hasattr(torch, name)]
tensors = [torch.zeros(64, dtype=torch.uint8, device="cuda").view(getattr(torch, name)) for name in names]
torch.cuda.synchronize()
for name, x in zip(names, tensors):
    with torch.cuda.stream(side):
        x.zero_()
    exec(compile("x.clone()", name, "exec"))  # two lines are reported once
print(names)
"""
    *lines, names = (line for line in reversed(run(program, compute=compute)) if line.startswith(("race: ", "[")))
    assert [line.partition(" of a")[2].partition(" tensor")[0].strip() for line in reversed(lines)] == ast.literal_eval(names)


def test_every_type_has_its_number() -> None:
    """The same one in the engine and in the table of Python."""
    program = """
import torch, sys
table = sys.modules["_accelerator_simulation._kernels.races"]._DTYPES
engine = sys.modules["_accelerator_simulation._kernels.engine"].engine
dtypes = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
of_engine = {each: engine._scalar_type(each) for each in dtypes if "quint" not in str(each) and "qint" not in str(each)}
print(dtypes - table.keys(), {each: number for each, number in of_engine.items() if table.get(each) != number})
"""
    done = support.python(program, simulated_environment(gpus=1, races="report"))
    assert done.stdout == "set() {}\n", done.stderr
