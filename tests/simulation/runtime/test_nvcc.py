"""Programs and libraries that nvcc compiles, on simulated GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.support import run, simulated_environment
from tests.support.simulation import linux_only
from tests.support.simulation_driver import needs_cuda_torch

if TYPE_CHECKING:
    from pathlib import Path

NVCC = shutil.which("nvcc")
pytestmark = [linux_only, needs_cuda_torch, pytest.mark.slow, pytest.mark.skipif(NVCC is None, reason="needs nvcc")]

LIBRARY = """
__global__ void fill(float *x) { x[threadIdx.x] = 7; }
extern "C" void fill_unchecked(float *x, int n) { fill<<<1, n>>>(x); }
"""


def compile_cuda(source: str, output: Path, *flags: str) -> None:
    file = output.with_suffix(".cu")
    file.write_text(source)
    subprocess.run([str(NVCC), *flags, str(file), "-o", str(output)], check=True, capture_output=True, text=True)


@pytest.mark.parametrize("read", ["x.tolist()", "x.cpu()", "x[0].item()", "torch.cuda.synchronize()", "x + 1"])
def test_an_unchecked_launch_is_found(tmp_path: Path, read: str) -> None:
    library = tmp_path / "fill.so"
    compile_cuda(LIBRARY, library, "-shared", "-Xcompiler", "-fPIC", "-cudart", "shared")
    program = f"""
import torch, ctypes
x = torch.zeros(4, device="cuda")
ctypes.CDLL({os.fspath(library)!r}).fill_unchecked(ctypes.c_void_p(x.data_ptr()), 4)
try:
    {read}
except RuntimeError as error:
    print("operation not supported" in str(error))
"""
    assert run(program, simulated_environment(gpus=1)) == "True\n"


def test_a_program_with_the_static_runtime_ends_without_a_signal(tmp_path: Path) -> None:
    """Static is nvcc's default. The program checks no errors and uses memory that it did not get."""
    program = tmp_path / "program"
    compile_cuda("int main() { float *x = 0; cudaMallocManaged(&x, 4); x[0] = 1; return x[0] != 1; }", program)
    environment = simulated_environment(gpus=1)
    done = subprocess.run([program], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.endswith(
        "is linked with the static CUDA runtime, which is not simulated, so its calls fail: link it with -cudart shared\n"
    )
    compile_cuda(program.with_suffix(".cu").read_text(), program, "-cudart", "shared")
    done = subprocess.run([program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
