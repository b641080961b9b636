"""Kernels that NVRTC compiles while a program runs."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.support import python, simulated_environment
from tests.support.simulation import linux_only
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [linux_only, needs_cuda_torch, pytest.mark.xdist_group("extensions")]


def output(program: str, **variables: str) -> list[str]:
    done = python(textwrap.dedent(program), simulated_environment(variables, gpus=2))
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


@pytest.mark.slow
def test_ops_with_kernels_of_their_own_in_compiled_code() -> None:
    """The values are small integers: compiled code adds products without rounding them before."""
    lines = output("""
        import torch
        if not hasattr(torch.cuda, "_compile_kernel"):
            print("absent")
            raise SystemExit
        body = "if (threadIdx.x < n) y[threadIdx.x] = 2 * x[threadIdx.x];"
        text = 'extern "C" __global__ void twice(const float *x, float *y, int n) { ' + body + ' }'
        kernel = torch.cuda._compile_kernel(text, "twice")

        @torch.library.custom_op("accelerator_test::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            y = torch.empty_like(x)
            kernel((1, 1, 1), (64, 1, 1), [x, y, x.numel()])
            return y

        twice.register_fake(torch.empty_like)

        @torch.library.custom_op("accelerator_test::double_all_", mutates_args=("xs", "z"))
        def double_all_(xs: list[torch.Tensor], z: torch.Tensor) -> None:
            for x in (*xs, z):
                for row in x if x.dim() > 1 else [x]:
                    kernel((1, 1, 1), (64, 1, 1), [row, row, row.numel()])

        def function(x):
            y, z, column = x + 1, x - 1, (x * 3)[:, 1]
            double_all_([y, x], z)
            rows = x + 5
            double_all_([rows[0::2], rows[1::2]], rows[3])  # views between one another, and over one another
            return rows * 3, twice(x + 1) - 3, y * 3, z * 3, column + twice(column.contiguous()), twice(x)

        for name, x in (("first", torch.arange(32.0, device="cuda").view(4, 8)), ("second", torch.ones(4, 8, device="cuda"))):
            expected, found = (each(x.clone()) for each in (function, torch.compile(function)))
            print(name, all(map(torch.equal, expected, found)))
        """)
    assert lines in (["first True", "second True"], ["absent"])


JITERATOR = """
    import torch
    from torch.cuda.jiterator import _create_jit_fn, _create_multi_output_jit_fn
    scaled = _create_jit_fn("template <typename T> T scaled(T x, T y, T alpha) { return alpha * x + y; }", alpha=1)
    x, y = torch.arange(6.0, device="cuda").view(2, 3), torch.arange(3, dtype=torch.float64, device="cuda")
    print(torch.equal(scaled(x.t(), x.t() + 1, alpha=2), 3 * x.t() + 1), scaled(x, y).dtype, torch.equal(scaled(x, y), x + y))
    split = "template <typename T> void split(T x, T &whole, T &rest) { whole = floor(x); rest = x - floor(x); }"
    whole, rest = _create_multi_output_jit_fn(split, 2)(x / 4)
    print(torch.equal(whole, (x / 4).floor()), torch.equal(rest, (x / 4).frac()))
    """


@pytest.mark.slow
def test_jiterator() -> None:
    lines = output(JITERATOR, USE_PYTORCH_KERNEL_CACHE="0")
    assert lines == ["True torch.float64 True", "True True"]


@pytest.mark.slow
def test_jiterator_loads_what_it_has_kept(tmp_path: Path) -> None:
    kept = [output(JITERATOR, PYTORCH_KERNEL_CACHE_PATH=str(tmp_path)) for _ in range(2)]
    assert kept[0] == kept[1] == ["True torch.float64 True", "True True"]
    assert {file.read_bytes()[:2] for file in tmp_path.iterdir()} == {b"//"}  # PTX
