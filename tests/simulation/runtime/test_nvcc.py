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


MACHINE_CODE = ("-gencode", "arch=compute_80,code=sm_80")
PTX = ("-gencode", "arch=compute_80,code=compute_80")


@pytest.mark.parametrize("read", ["x.tolist()", "x.cpu()", "x[0].item()", "torch.cuda.synchronize()", "x + 1"])
def test_an_unchecked_launch_is_found(tmp_path: Path, read: str) -> None:
    library = tmp_path / "fill.so"
    compile_cuda(LIBRARY, library, "-shared", "-Xcompiler", "-fPIC", "-cudart", "shared", *MACHINE_CODE)
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


PROGRAM = """
#include <cooperative_groups.h>
#include <cstdio>
#include <cuda_fp16.h>
namespace cg = cooperative_groups;

__constant__ float table[4] = {1, 2, 3, 4};
__managed__ int launches = 0;
__device__ __noinline__ int fibonacci(int n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }
__global__ void scale(const __half *x, __half *y, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        y[i] = __hmul(x[i], __float2half(table[i % 4]));
    if (i == 0)
        launches++;
}
__global__ void sum(const int *x, int *parts, int *out)
{
    int value = x[blockIdx.x * blockDim.x + threadIdx.x];
    for (int offset = 16; offset; offset /= 2)
        value += __shfl_down_sync(~0u, value, offset);
    if (threadIdx.x == 0)
        parts[blockIdx.x] = value;
    cg::this_grid().sync();
    if (blockIdx.x == 0 && threadIdx.x == 0)
        for (int i = 0; i < gridDim.x; i++)
            *out += parts[i];
}
__global__ void recurse(int *out) { *out = fibonacci(threadIdx.x + 15); }

int main()
{
    __half *halves;
    int *numbers, host[257];
    cudaMallocManaged(&halves, 8 * sizeof(__half));
    cudaMalloc(&numbers, sizeof host);
    for (int i = 0; i < 8; i++)
        halves[i] = __float2half(0.5f + i);
    float two = 2;
    cudaMemcpyToSymbol(table, &two, sizeof two, sizeof two);
    scale<<<2, 4>>>(halves, halves, 8);
    cudaDeviceSynchronize();
    for (int i = 0; i < 8; i++)
        printf("%g ", __half2float(halves[i]));
    for (int i = 0; i < 257; i++)
        host[i] = i < 128 ? i : 0;
    cudaMemcpy(numbers, host, sizeof host, cudaMemcpyHostToDevice);
    int *parts = numbers + 128, *out = numbers + 256;
    void *arguments[] = {&numbers, &parts, &out};
    cudaLaunchCooperativeKernel((void *)sum, dim3(4), dim3(32), arguments, 0, 0);
    cudaMemcpy(host, out, sizeof *host, cudaMemcpyDeviceToHost);
    recurse<<<1, 1>>>(numbers);
    cudaMemcpy(host + 1, numbers, sizeof *host, cudaMemcpyDeviceToHost);
    printf("%d %d %d %s\\n", host[0], host[1], launches, cudaGetErrorName(cudaGetLastError()));
}
"""


@pytest.mark.parametrize("mode", ["none", "speed", "size"])
def test_a_program_runs_its_kernels(tmp_path: Path, mode: str) -> None:
    program = tmp_path / "program"
    compile_cuda(PROGRAM, program, "-cudart", "shared", *PTX, *compression(mode))
    done = subprocess.run([program], env=simulated_environment(gpus=1), capture_output=True, text=True)
    assert done.stdout == "0.5 3 7.5 14 4.5 11 19.5 30 8128 610 1 cudaSuccess\n", done.stderr


def compression(mode: str) -> tuple[str, ...]:
    """Return nvcc's flag, which nvcc 12.4 and newer have."""
    done = subprocess.run([str(NVCC), "--help"], capture_output=True, text=True, check=True)
    return (f"--compress-mode={mode}",) if "--compress-mode" in done.stdout else ()


def test_modules_are_linked(tmp_path: Path) -> None:
    (tmp_path / "function.cu").write_text("__device__ int offset = 5; __device__ int twice(int x) { return 2 * x + offset; }")
    main = """
#include <cstdio>
extern __device__ int offset;
__device__ int twice(int x);
__global__ void call(int *out) { offset++; *out = twice(10); }
int main()
{
    int *out, host;
    cudaMalloc(&out, sizeof host);
    call<<<1, 1>>>(out);
    cudaMemcpy(&host, out, sizeof host, cudaMemcpyDeviceToHost);
    printf("%d\\n", host);
}
"""
    program = tmp_path / "program"
    compile_cuda(main, program, "-cudart", "shared", "-rdc=true", *PTX, *MACHINE_CODE, str(tmp_path / "function.cu"))
    done = subprocess.run([program], env=simulated_environment(gpus=1), capture_output=True, text=True)
    assert done.stdout == "26\n", done.stderr


def test_the_line_of_an_access_out_of_bounds_is_named(tmp_path: Path) -> None:
    source = """
__global__ void fill(float *x) { x[threadIdx.x] = 7; }
int main()
{
    float *x;
    cudaMalloc(&x, 4 * sizeof *x);
    fill<<<1, 5>>>(x);
    return cudaGetLastError() ? 1 : cudaDeviceSynchronize() == cudaErrorIllegalAddress ? 0 : 2;
}
"""
    program = tmp_path / "program"
    compile_cuda(source, program, "-cudart", "shared", "-lineinfo", *PTX)
    done = subprocess.run([program], env=simulated_environment(gpus=1), capture_output=True, text=True)
    assert done.returncode == 0
    assert "thread (4,0,0): st.global" in done.stderr
    assert "(program.cu:2) accesses 4 bytes" in done.stderr
    assert "0 bytes after 16 bytes of device memory" in done.stderr


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
