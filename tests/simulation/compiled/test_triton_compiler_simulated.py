"""Triton's compiler on simulated GPUs: what it compiles for, counts, refuses, and shows to programs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import simulated_environment

triton = pytest.importorskip("triton", reason="torch without Triton")
tl: Any = pytest.importorskip("triton.language", reason="torch without Triton")

CUDA = torch.device("cuda", 0)


@triton.jit
def _softmax(x, out, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    values = tl.load(x + index)
    values = tl.exp(values - tl.max(values, axis=0))
    tl.store(out + index, values / tl.sum(values, axis=0))


def launch_softmax(**options: Any) -> Any:
    x = torch.randn(2048, device=CUDA)
    out = torch.empty_like(x)
    kernel = _softmax[(1,)](x, out, SIZE=2048, **options)
    torch.testing.assert_close(out, x.softmax(0))
    return kernel


def test_registers_and_spills_are_those_that_ptxas_counts() -> None:
    usual, few = launch_softmax(), launch_softmax(maxnreg=24) if torch.__version__ >= (2, 7) else None
    assert usual.n_spills == 0
    assert 16 <= usual.n_regs <= 64
    # Without machine code, each kernel has 32.
    assert {usual.n_regs, launch_softmax(num_warps=8).n_regs} != {32}
    if few is not None:
        assert few.n_regs <= 24
        assert few.n_spills > 0


def test_kernels_show_code_of_each_stage() -> None:
    kernel = launch_softmax()
    assert ".target sm_89" in kernel.asm["ptx"]
    assert {"ttir", "ttgir", "llir", "ptx", "cubin"} <= kernel.asm.keys()
    assert "MUFU.EX2" in kernel.asm["sass"]
    assert kernel.metadata.shared > 0
    assert kernel.metadata.num_warps == 4


def test_programs_see_the_capability_of_the_gpu_and_kernels_that_of_their_code() -> None:
    assert torch.cuda.get_device_capability() == (9, 0)
    assert triton.runtime.driver.active.get_current_target().arch == 90
    assert launch_softmax().metadata.target.arch == 90
    if not hasattr(tl, "target_info"):
        return
    out = torch.zeros(1, dtype=torch.int32, device=CUDA)
    _newest[(1,)](out)
    assert out.item() == 89


@triton.jit
def _newest(out):
    if tl.target_info.cuda_capability_geq(9, 0):
        tl.store(out, 90)
    elif tl.target_info.cuda_capability_geq(8, 9):
        tl.store(out, 89)


def test_warmup_compiles_and_launches_nothing() -> None:
    out = torch.zeros(64, device=CUDA)
    kernel = _softmax.warmup(torch.float32, out, SIZE=64, grid=(1,))
    assert "_softmax" in kernel.asm["ptx"]
    assert out.eq(0).all()
    kernel[(1, 1, 1)](torch.zeros(64, device=CUDA), out, *([64] if torch.__version__ >= (2, 7) else []))
    assert out.eq(1 / 64).all()


@triton.jit
def _transpose(x, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(x + place, tl.trans(tl.load(x + place)))


def test_what_does_not_fit_is_refused_and_the_autotuner_takes_the_next() -> None:
    x = torch.eye(256, device=CUDA)
    with pytest.raises(triton.runtime.errors.OutOfResources, match="shared memory"):
        _transpose[(1,)](x, SIZE=256, num_warps=32)
    sizes = [(256, 32), (32, 128), (16, 2), (32, 4)]
    if "n_max_threads" in triton.compiler.CompiledKernel._init_handles.__code__.co_names:
        error, message = triton.runtime.errors.OutOfResources, "threads, Required: 4096, Hardware limit: 1024"
    else:  # Triton leaves it to the driver, and the autotuner does not catch the driver's error
        error, message = RuntimeError, r"Triton Error \[CUDA\]: invalid argument"
        sizes.remove((32, 128))
    with pytest.raises(error, match=message):
        _transpose[(1,)](x, SIZE=16, num_warps=128)
    choices = [triton.Config({"SIZE": size}, num_warps=warps) for size, warps in sizes]
    tuned = triton.autotune(choices, key=[])(_transpose)
    tuned[(1,)](x)
    assert tuned.best_config.kwargs == {"SIZE": 16}


@triton.jit
def _assembly(x, CODE: tl.constexpr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    value = tl.inline_asm_elementwise(CODE, "=r,r", [tl.load(x + index)], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(x + index, value)


def test_inline_assembly(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.arange(64, dtype=torch.int32, device=CUDA)
    _assembly[(1,)](x, CODE="brev.b32 $0, $1;", SIZE=64)
    assert x[:3].tolist() == [0, -(2**31), 2**30]
    with pytest.raises(Exception, match="Not a name of any known instruction: 'nonsense'"):
        _assembly[(1,)](x, CODE="nonsense $0, $1;", SIZE=64)


def make_kernel(constant: Any, function: Any) -> Any:
    @triton.jit
    def kernel(x, out, SIZE: tl.constexpr):
        index = tl.arange(0, SIZE)
        tl.store(out + index, function(tl.load(x + index)) * constant)

    return kernel


@triton.jit
def _square(value):
    return value * value


@pytest.mark.skipif(torch.__version__ < (2, 7), reason="torch 2.6 brings a Triton without it")
def test_kernels_made_in_a_function_use_its_variables() -> None:
    x = torch.randn(64, device="cuda:1")
    out = torch.empty_like(x)
    with torch.cuda.device(1):
        make_kernel(tl.constexpr(3), _square)[(1,)](x, out, SIZE=64)
    torch.testing.assert_close(out, x * x * 3)


def test_launch_hooks_are_called() -> None:
    calls: list[str] = []
    if hasattr(triton, "knobs"):
        hooks = triton.knobs.runtime.launch_enter_hook
        if hasattr(hooks, "add"):
            hook = lambda metadata: calls.append(metadata.get()["name"])  # noqa: E731
            hooks.add(hook)
            launch_softmax()
            hooks.remove(hook)
            assert calls == ["_softmax"]


def run(program: Path, **machine: Any) -> subprocess.CompletedProcess[str]:
    extra = machine.pop("env", {})
    env = simulated_environment(extra, **machine)
    return subprocess.run([sys.executable, "-W", "ignore", str(program)], env=env, capture_output=True, text=True, check=False)


PROGRAM = """
import sys, torch, triton, triton.language as tl
import torch.multiprocessing as mp

@triton.jit
def add(x, out, SIZE: tl.constexpr, FACTOR: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out + index, tl.load(x + index) + FACTOR)

def work(rank, factor=7):
    torch.cuda.set_device(rank)
    x = torch.full((128,), float(rank), device="cuda")
    add[(1,)](x, x, SIZE=128, FACTOR=factor)
    assert x.eq(rank + factor).all()
    return x
"""


@pytest.fixture
def program(tmp_path: Path) -> Any:
    def write(end: str) -> Path:
        path = tmp_path / "program.py"  # Triton reads the source of a kernel
        path.write_text(PROGRAM + end)
        return path

    return write


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_that_a_program_starts(program: Any, method: str) -> None:
    end = f"if __name__ == '__main__':\n    mp.start_processes(work, nprocs=2, start_method={method!r})\n    print('right')"
    done = run(program(end), gpus=2)
    assert done.stdout == "right\n", done.stderr


@pytest.mark.slow
def test_tune_times_every_configuration(program: Any) -> None:
    end = """
configs = [triton.Config({"FACTOR": factor}) for factor in (1, 2, 3)]
tuned = triton.autotune(configs, key=[])(add)
x = torch.zeros(128, device="cuda")
tuned[(1,)](x, x, SIZE=128)
print(len(tuned.configs_timings), all(0 < each[0] < 1000 for each in tuned.configs_timings.values()))
"""
    assert run(program(end), tune=True).stdout == "3 True\n"
    assert run(program(end)).stdout == "3 False\n", "the first is taken, the others have no time"


@pytest.mark.slow
def test_the_cache_of_a_simulated_gpu_is_not_that_of_a_real_one(program: Any, tmp_path: Path) -> None:
    """The compilation for a real GPU is that of a rehearsal, whose GPUs compute nothing."""
    end = "\nkernel = add[(1,)](*[torch.zeros(128, device='cuda')] * 2, SIZE=128, FACTOR=1)\nprint(kernel.hash)\n"
    env = {"TRITON_CACHE_DIR": str(tmp_path / "cache")}
    real = run(program(end), env=env, compute=False, capability="8.9").stdout
    simulated = {run(program(end), env=env, capability="8.9").stdout for _ in range(2)}
    assert len(simulated) == 1
    assert real not in simulated


@pytest.mark.slow
def test_what_the_launcher_lacks_is_named(program: Any, tmp_path: Path) -> None:
    env = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "CC": "/nowhere/gcc"}
    prepared = "\nimport shutil; shutil.which = lambda *_, **__: None\nwork(0)\n"
    done = run(program(prepared), env=env)
    assert done.stderr.endswith(
        "RuntimeError: Triton's launcher needs a C compiler, on a GPU too: none was found; install gcc, or set CC\n"
    )
    prepared = "\nimport sysconfig; sysconfig.get_paths = lambda *_, **__: {'include': '/nowhere'}\nwork(0)\n"
    last = run(program(prepared), env=env).stderr.splitlines()[-1]
    assert "Python's headers, on a GPU too: /nowhere/Python.h is missing" in last


@pytest.mark.slow
def test_a_program_may_ask_for_tritons_interpreter(program: Any) -> None:
    end = "\nprint(type(add).__name__, int(work(0).sum()))\n"
    assert run(program(end), env={"TRITON_INTERPRET": "1"}).stdout == "InterpretedFunction 896\n"
    assert run(program(end), env={"TRITON_INTERPRET": "0"}).stdout == "JITFunction 896\n"


@pytest.mark.slow
def test_device_assert_and_device_print(program: Any) -> None:
    end = """
@triton.jit
def check(x, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.device_assert(tl.load(x + index) < 3, "too large")

@triton.jit
def show(x):
    tl.device_print("value", tl.load(x))

x = torch.arange(4, device="cuda")
if sys.argv[1:] == ["print"]:
    show[(1,)](x + 5, num_warps=1)
    torch.cuda.synchronize()
    raise SystemExit
try:
    check[(1,)](x, SIZE=4, num_warps=1, debug=True)
    torch.cuda.synchronize()
except RuntimeError as error:
    print("device-side assert" in str(error))
"""
    env = simulated_environment({"TRITON_DEBUG": "1"})
    command = [sys.executable, "-W", "ignore", str(program(end))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr
    assert "Assertion `too large` failed" in done.stderr


def test_this_process_runs_no_interpreter() -> None:
    assert os.environ.get("TRITON_INTERPRET") is None
