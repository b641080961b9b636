"""A hook or binding that does not fit the installed torch or Triton: the feature is refused, and no import breaks."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.support import run, simulated_environment
from tests.support.simulation import linux_only
from tests.support.simulation_driver import needs_cuda_torch

torch = pytest.importorskip("torch", reason="torch is missing")
pytestmark = [linux_only, needs_cuda_torch]

BREAK = """
import sys
import torch

def fail(*_):
    raise AttributeError("no add_stages")

sys.modules["_accelerator_simulation._inside.compiled." + sys.argv[1]].__dict__[sys.argv[2]] = fail
"""
USE = """
import torch, triton
import triton.language as tl

@triton.jit
def double(x, size: tl.constexpr):
    positions = tl.arange(0, size)
    tl.store(x + positions, tl.load(x + positions) * 2)

x = torch.ones(4, device="cuda")
torch.optim.SGD([x.requires_grad_()], lr=0.1)
try:
    double[(1,)](x.detach(), 4)
except NotImplementedError as error:
    print("launch:", error)
assert torch.compile(lambda x: x + 1, backend="eager")(x).tolist() == [2] * 4
"""


@pytest.mark.slow
def test_unknown_compiler_refuses_launches_only(tmp_path: Path) -> None:
    path = tmp_path / "program.py"  # Triton reads the source of a kernel
    path.write_text(USE)
    program = BREAK + "import runpy\nrunpy.run_path(sys.argv[3])\n"
    output = run(program, simulated_environment(), "triton_compiler", "_hook_backend", str(path), timeout=300)
    assert "launch: compile is not simulated with this triton.compiler.compiler: AttributeError: no add_stages\n" in output


@pytest.mark.slow
def test_failing_hook_refuses_compiled_graphs_of_gpus_only() -> None:
    program = """
        x = torch.ones(4, device="cuda")
        torch.optim.SGD([x.requires_grad_()], lr=0.1)
        function = lambda x: x + 1
        refusal = sys.modules["_accelerator_simulation._inside.compiled.refusal"]
        refusal.guarded(fail, refusal.refuse_graphs)(torch)
        assert torch.compile(function)(torch.ones(2)).tolist() == [2, 2]
        assert torch.compile(function, backend="aot_eager")(x).tolist() == [2] * 4
        torch._dynamo.reset()
        try:
            torch.compile(function)(x)
        except Exception as error:
            print(next(line for line in str(error).splitlines() if "simulated" in line))
    """
    output = run(BREAK + textwrap.dedent(program), simulated_environment(), "dynamo", "hook_trace_rules", timeout=300)
    assert output == (
        f"NotImplementedError: torch.compile's default backend is not simulated for torch {torch.__version__}, which is older"
        ' or newer than the simulation knows; use backend="aot_eager" (compiled code is not simulated with this'
        " torch: AttributeError: no add_stages)\n"
    )


def test_missing_bindings_are_all_named() -> None:
    program = """
        import torch
        import importlib, sys
        del torch._C._get_schema, torch._C._CUDAGraph
        try:
            importlib.reload(sys.modules["_accelerator_simulation._inside.ops.bindings"])
        except RuntimeError as error:
            print(error)
    """
    output = run(program, simulated_environment())
    assert " has no torch._C._get_schema, torch._C._CUDAGraph, which simulated GPUs need: use a release of torch" in output
    assert output.count("\n") == 1


@pytest.mark.slow
def test_hook_runs_after_a_search_and_a_failed_import(tmp_path: Path) -> None:
    (tmp_path / "searched.py").touch()
    (tmp_path / "failing.py").write_text("import os\nif 'FAILS' in os.environ:\n    raise ValueError\n", encoding="utf-8")
    program = """
        import torch
        import importlib.util, os, sys
        after_import = sys.modules["_accelerator_simulation._inside.import_hook"].after_import
        sys.path.insert(0, sys.argv[1])
        hooked = []
        for name in ("searched", "failing"):
            after_import(name, hooked.append)
            assert importlib.util.find_spec(name)
        import searched
        try:
            import failing
        except ValueError:
            del os.environ["FAILS"]
        import failing
        assert hooked == [searched, failing], hooked
        importlib.reload(searched)
        assert hooked == [searched, failing], hooked
    """
    run(program, simulated_environment({"FAILS": "1"}), str(tmp_path))
