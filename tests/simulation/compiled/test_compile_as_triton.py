"""Tests ``simulate --compile triton``: the Triton code that Inductor generates for a GPU runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import simulated_environment
from tests.support.simulation import linux_only
from tests.support.simulation_driver import needs_cuda_torch

torch = pytest.importorskip("torch", reason="torch is missing")
pytestmark = [linux_only, needs_cuda_torch, pytest.mark.slow]

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


def run(program: str, tmp_path: Path, **machine: object) -> str:
    pytest.importorskip("triton")
    path = tmp_path / "program.py"  # Triton reads the source of a kernel
    path.write_text(program)
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    env = simulated_environment(caches, compile="triton", **machine)
    done = subprocess.run([sys.executable, "-W", "ignore", str(path)], env=env, capture_output=True, text=True, check=False)
    return done.stdout or done.stderr


def test_inductors_own_code_runs(tmp_path: Path) -> None:
    assert run(PROGRAM, tmp_path) == "right\n"


IN_A_GRAPH = """
import torch

side = torch.cuda.Stream()

def function(x):
    y = x + 1
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        z = (y * 2).softmax(-1)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    return z.sum(0)

for size in (20, 30):
    x = torch.randn(size, 40, device="cuda")
    torch.testing.assert_close(torch.compile(function, dynamic=True)(x), function(x))

@torch.compile(mode="reduce-overhead")
def replayed(x):
    return x.sin() + 1

x = torch.randn(40, device="cuda")
for _ in range(4):
    torch.compiler.cudagraph_mark_step_begin()
    torch.testing.assert_close(replayed(x), x.sin() + 1)
print("right")
"""


@pytest.mark.skipif(torch.__version__ < (2, 10), reason="torch before 2.10 breaks the graph at some of these calls")
def test_streams_sizes_that_change_and_cuda_graphs(tmp_path: Path) -> None:
    assert run(IN_A_GRAPH, tmp_path) == "right\n"


AHEAD_OF_TIME = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x.softmax(-1).sin().sum(0) * 2

model, x = Model().cuda(), torch.randn(20, 40, device="cuda")
package = torch._inductor.aoti_compile_and_package(torch.export.export(model, (x,)), package_path="model.pt2")
torch.testing.assert_close(torch._inductor.aoti_load_package(package)(x), model(x))
print("right")
"""


@pytest.mark.exhaustive
def test_aotinductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(AHEAD_OF_TIME, tmp_path) == "right\n"


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
    assert run(LAUNCHES, tmp_path) == "right\n"
