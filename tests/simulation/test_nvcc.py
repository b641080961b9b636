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
