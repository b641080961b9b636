"""Tests ``simulate --compile triton``: Triton's interpreter runs the Triton code that Inductor generates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import simulated_environment
from tests.support.simulation import linux_only
from tests.support.simulation_driver import needs_compiled_code, needs_cuda_torch

pytestmark = [linux_only, needs_cuda_torch, needs_compiled_code, pytest.mark.slow]

PROGRAM = """
import torch
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code

torch.manual_seed(0)
x, w = torch.randn(8, 16, device="cuda"), torch.randn(16, 16, device="cuda", requires_grad=True)

def loss(x, w):
    return F.cross_entropy(F.gelu(F.layer_norm(x @ w, (16,))).sort(-1).values.softmax(-1), torch.arange(8, device="cuda"))

result, code = run_and_get_code(torch.compile(loss), x, w)
assert "@triton.jit" in code[0]
torch.testing.assert_close(result, loss(x, w), rtol=1e-4, atol=1e-4)
expected, = torch.autograd.grad(loss(x, w), w)
torch.testing.assert_close(torch.autograd.grad(result, w)[0], expected, rtol=1e-4, atol=1e-5)

dropped = torch.compile(lambda x: F.dropout(x, 0.5))(torch.ones(1000, device="cuda"))
assert set(dropped.unique().tolist()) == {0.0, 2.0}
assert 0.4 < dropped.eq(0).float().mean() < 0.6
print("right")
"""


def test_triton_interpreter_runs_inductors_code(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    env = simulated_environment({"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}, compile="triton")
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr


# The interpreter reads the source of a kernel, so the program is a file.
LAUNCHES = """
import torch, triton
import triton.language as tl

@triton.jit
def double(x, out, size, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, tl.load(x + index, mask=index < size) * 2, mask=index < size)

def function(x):
    out = torch.empty_like(x)
    double[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x.sin(), out, x.numel(), BLOCK=32)
    return out + 1

for size in (100, 130):
    x = torch.randn(size, device="cuda")
    torch.testing.assert_close(torch.compile(function, fullgraph=True)(x), x.sin() * 2 + 1)
print("right")
"""


def test_launches_beside_inductors_code(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    program = tmp_path / "program.py"
    program.write_text(LAUNCHES)
    env = simulated_environment({"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}, compile="triton")
    done = subprocess.run([sys.executable, str(program)], env=env, capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr
