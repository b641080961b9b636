"""Kernels that NVRTC compiles while a program runs."""

from __future__ import annotations

import textwrap

import pytest

from tests.support import python, simulated_environment
from tests.support.simulation import linux_only
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [linux_only, needs_cuda_torch, pytest.mark.xdist_group("extensions")]


def output(program: str) -> list[str]:
    done = python(textwrap.dedent(program), simulated_environment(gpus=2))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_compile_kernel_before_any_tensor() -> None:
    lines = output("""
        import torch
        if not hasattr(torch.cuda, "_compile_kernel"):  # before torch 2.9
            print("absent")
            raise SystemExit
        text = 'extern "C" __global__ void twice(float *x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }'
        kernel = torch.cuda._compile_kernel(text, "twice")
        x = torch.arange(4.0, device="cuda")
        kernel((1, 1, 1), (4, 1, 1), [x, 3])
        print(x.tolist())
        """)
    assert lines in (["[0.0, 2.0, 4.0, 3.0]"], ["absent"])
