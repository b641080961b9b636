"""Triton kernels, which Triton compiles and launches on simulated GPUs, return the results of torch."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from tests.support import simulated_environment
from tests.support.simulation_driver import end_invalidated_capture

triton = pytest.importorskip("triton", reason="torch without Triton")
tl: Any = pytest.importorskip("triton.language", reason="torch without Triton")
libdevice: Any = pytest.importorskip("triton.language.extra.libdevice", reason="torch without Triton")

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def randn(*size: int, **options: Any) -> torch.Tensor:
    return torch.randn(*size, device=CUDA, **options)


@triton.jit
def _add(x, y, out, size, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    tl.store(out + index, tl.load(x + index, mask=inside) + tl.load(y + index, mask=inside), mask=inside)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    _add[(triton.cdiv(x.numel(), 64),)](x, y, out, x.numel(), BLOCK=64)
    return out


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (torch.float16, torch.int32, torch.float64)),
    ],
)
def test_add(dtype: torch.dtype) -> None:
    x, y = (randn(1000).mul(10).to(dtype) for _ in range(2))
    torch.testing.assert_close(add(x, y), x + y)


def test_launch_on_a_view_changes_only_the_view() -> None:
    memory = torch.full((300,), 7.0, device=CUDA)
    view = memory[100:200]
    x = randn(100)
    _add[(2,)](x, x, view, 100, BLOCK=64)
    assert torch.equal(view, x * 2)
    assert memory[:100].eq(7).all()
    assert memory[200:].eq(7).all()


def test_host_tensors_raise() -> None:
    x = randn(4)
    with pytest.raises(ValueError, match="cpu tensor"):
        _add[(1,)](x, x, torch.empty(4), 4, BLOCK=64)
    pinned = torch.empty(4).pin_memory()
    _add[(1,)](x, x, pinned, 4, BLOCK=64)
    assert torch.equal(pinned, x.cpu() * 2)


@pytest.mark.parametrize("index", [0, 1])
def test_replay_launches_the_kernel(index: int) -> None:
    with torch.cuda.device(index):
        x, y = (torch.randn(100, device="cuda") for _ in range(2))
        before = x + y
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            out = add(x, y)
        assert not torch.equal(out, before), "the capture computes nothing"
        for _ in range(2):
            x.add_(1)
            graph.replay()
            assert torch.equal(out, x + y)


def test_host_tensor_raises_in_the_capture() -> None:
    x, out, graph = randn(64), randn(64), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="cpu tensor"):
            _add[(1,)](x, x, torch.empty(64), 64, BLOCK=64)
        _add[(1,)](x, x, out, 64, BLOCK=64)
    graph.replay()
    assert torch.equal(out, x * 2)


@triton.jit
def _multiply(x, out, size, factor, BLOCK: "tl.constexpr"):  # noqa: UP037
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, tl.load(x + index, mask=index < size) * factor, mask=index < size)


def test_text_annotation_makes_a_constant() -> None:
    x, out = randn(100), randn(100)
    _multiply[(2,)](x, out, 100, 2.0, BLOCK=64)
    assert torch.equal(out, x * 2)


@triton.jit
def _copy_while(x, out, size, limit, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for step in range(2):
        inside = (step < limit) & (index < size)
        tl.store(out + index + step * size, tl.load(x + index, mask=inside), mask=inside)


def test_mask_from_a_scalar_and_a_block() -> None:
    x, out = randn(100), torch.zeros(200, device=CUDA)
    _copy_while[(2,)](x, out, 100, 1, BLOCK=64)
    assert torch.equal(out, torch.cat([x, torch.zeros_like(x)]))


@triton.jit
def _scale(x, out, factor, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(out + place, tl.load(x + place) * factor.to(tl.float32))


def test_python_float_argument_is_float32() -> None:
    x = randn(16, dtype=torch.float16)
    out = torch.empty(16, device=CUDA)
    _scale[(1,)](x, out, 0.1, SIZE=16)
    assert torch.equal(out, x.float() * 0.1)


@triton.jit
def _softmax(x, out, columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + index, mask=index < columns, other=-float("inf"))
    values = tl.exp(values - tl.max(values, axis=0))
    tl.store(out + row * stride + index, values / tl.sum(values, axis=0), mask=index < columns)


def test_fused_softmax() -> None:
    x = randn(5, 37)
    out = torch.empty_like(x)
    _softmax[(5,)](x, out, 37, x.stride(0), BLOCK=64)
    torch.testing.assert_close(out, x.softmax(-1))


@triton.autotune(
    configs=[triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in ((16, 4), (32, 8))], key=["size"]
)
@triton.heuristics({"EVEN": lambda arguments: arguments["size"] % arguments["BLOCK"] == 0})
@triton.jit
def _product(a, b, c, size, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, size, BLOCK):
        inner = start + tl.arange(0, BLOCK)
        if EVEN:
            left = tl.load(a + rows[:, None] * size + inner[None, :])
            right = tl.load(b + inner[:, None] * size + columns[None, :])
        else:
            left = tl.load(
                a + rows[:, None] * size + inner[None, :], mask=(rows[:, None] < size) & (inner[None, :] < size), other=0.0
            )
            right = tl.load(
                b + inner[:, None] * size + columns[None, :],
                mask=(inner[:, None] < size) & (columns[None, :] < size),
                other=0.0,
            )
        total += tl.dot(left, right)
    tl.store(c + rows[:, None] * size + columns[None, :], total, mask=(rows[:, None] < size) & (columns[None, :] < size))


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    size = a.shape[0]
    c = torch.empty_like(a)
    _product[lambda meta: (triton.cdiv(size, meta["BLOCK"]),) * 2](a, b, c, size)
    return c


@pytest.mark.slow
@pytest.mark.parametrize(("size", "dtype"), [(64, torch.float32), (50, torch.float32), (64, torch.float16)])
def test_autotuned_matrix_product(size: int, dtype: torch.dtype) -> None:
    a, b = randn(size, size, dtype=dtype), randn(size, size, dtype=dtype)
    # Triton multiplies float32 as tf32: both factors are rounded to 10 bits.
    torch.testing.assert_close(product(a, b), a @ b, rtol=2e-2, atol=5e-2)


@triton.jit
def _multiply_one(x, FACTOR: tl.constexpr):
    tl.store(x, tl.load(x) * FACTOR)


def test_autotuner_runs_the_first_configuration_and_takes_it() -> None:
    configurations = [triton.Config({"FACTOR": factor}) for factor in (2, 3, 5)]
    tuned = triton.autotune(configurations, key=[])(_multiply_one)
    x = torch.ones(1, device=CUDA)
    for expected in (2 * 2, 2 * 2 * 2):
        tuned[(1,)](x)
        assert x.item() == expected


@pytest.mark.skipif(torch.__version__ < (2, 7), reason="torch 2.6's Triton does not hand on do_bench")
def test_autotuner_with_the_programs_own_measurement() -> None:
    times = iter((3.0, 1.0, 2.0))
    configurations = [triton.Config({"FACTOR": factor}) for factor in (2, 3, 5)]
    tuned = triton.autotune(configurations, key=[], do_bench=lambda call, quantiles: [next(times)] * len(quantiles))
    kernel, x = tuned(_multiply_one), torch.ones(1, device=CUDA)
    kernel[(1,)](x)
    assert x.item() == 3


def test_tuning_fails_in_a_capture() -> None:
    tuned = triton.autotune([triton.Config({"BLOCK": size}, num_warps=2) for size in (32, 64)], key=["size"])(_add)
    x, y = randn(100), randn(100)
    out = torch.empty_like(x)
    # The outer context restores the stream: torch.cuda.graph does not if the capture has failed.
    stream, pool = torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph_pool_handle()
    with stream, pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool):
        tuned[(4,)](x, y, out, x.numel())
    end_invalidated_capture(pool)
    tuned[(4,)](x, y, out, x.numel())
    assert torch.equal(out, x + y)


@triton.jit
def _add_atomically(x):
    tl.atomic_add(x, tl.load(x))


@triton.jit
def _bfloat16(x, y, out, sums, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    left, right = tl.load(x + place), tl.load(y + place)
    result = tl.where(left > right, tl.abs(left) * 2 - right, tl.dot(left, right).to(tl.bfloat16))
    tl.store(out + place, result)
    tl.store(sums + tl.arange(0, SIZE), tl.sum(left.to(tl.float32), axis=0) + tl.max(right, axis=0))


@pytest.mark.skipif(torch.__version__ < (2, 8), reason="torch before 2.8 brings a Triton without it below 9.0")
def test_atomic_addition_of_bfloat16() -> None:
    x = torch.ones(4, device=CUDA, dtype=torch.bfloat16)
    _add_atomically[(3,)](x)
    assert x.tolist() == [8, 1, 1, 1]


def test_bfloat16() -> None:
    x, y = randn(16, 16).bfloat16(), randn(16, 16).bfloat16()
    out, sums = torch.empty_like(x), randn(16)
    _bfloat16[(1,)](x, y, out, sums, SIZE=16)
    torch.testing.assert_close(out, torch.where(x > y, x.abs() * 2 - y, x @ y), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(sums, x.float().sum(0) + y.float().amax(0), rtol=1e-5, atol=1e-5)


@triton.jit
def _rounded(x, out, SIZE: tl.constexpr, CASTS: tl.constexpr):
    index = tl.arange(0, SIZE)
    value = tl.load(x + index)
    tl.store(out + index, value.to(tl.bfloat16) if CASTS else value)


@pytest.mark.parametrize("casts", [True, False])
def test_bfloat16_is_rounded_as_in_torch(casts: bool) -> None:
    """Values halfway between two of bfloat16, below and above, to an even and to an odd one, and values without a neighbour."""
    odd_and_even = torch.arange(0x3F80, 0x3F84, dtype=torch.int32) << 16
    finite = (odd_and_even[:, None] + torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)).flatten()
    special = torch.tensor([0x7F7FFFFF, 0x7F800000, 0x00008000, 0x00018000], dtype=torch.int32)
    positive = torch.cat([finite, special]).view(torch.float32)
    values = torch.cat([positive, -positive, torch.zeros(64 - 2 * positive.numel())])
    x, out = values.to(CUDA), torch.empty(64, device=CUDA, dtype=torch.bfloat16)
    _rounded[(1,)](x, out, SIZE=64, CASTS=casts)
    assert out.view(torch.int16).tolist() == values.bfloat16().view(torch.int16).tolist()


@triton.jit
def _conversions(x, whole, bits, halves, doubles, back, of_whole, numbers, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    value = tl.load(x + index)
    tl.store(whole + index, value.to(tl.int32) * 4)
    tl.store(bits + index, value.to(tl.int16, bitcast=True))
    tl.store(halves + index, value.to(tl.float16))
    tl.store(doubles + index, value.to(tl.float64))
    tl.store(back + index, tl.load(bits + index).to(tl.bfloat16, bitcast=True))
    tl.store(of_whole + index, (tl.load(whole + index) + 257).to(tl.bfloat16).to(tl.float32))
    tl.store(numbers + index, tl.load(x + index, mask=index < 2, other=2.5) + tl.full((SIZE,), 1.005, tl.bfloat16))


def test_conversions_of_bfloat16() -> None:
    values = torch.tensor([1.5, -2.0, 3.25, 300.0, -0.0, 7.0, 1e-3, -65.5]).bfloat16()
    x = values.to(CUDA)
    types = (torch.int32, torch.int16, torch.float16, torch.float64, torch.bfloat16, torch.float32, torch.bfloat16)
    results = [torch.zeros(8, dtype=dtype, device=CUDA) for dtype in types]
    _conversions[(1,)](x, *results, SIZE=8)
    loaded = torch.tensor([1.5, -2.0, *[2.5] * 6]).bfloat16()
    expected = [
        *(values.to(torch.int32) * 4, values.view(torch.int16), values.half(), values.double(), values),
        *((values.to(torch.int32) * 4 + 257).bfloat16().float(), loaded + torch.tensor(1.005).bfloat16()),
    ]
    for result, wanted in zip(results, expected, strict=True):
        assert result.tolist() == wanted.tolist()


class _Pair(NamedTuple):
    source: torch.Tensor
    target: torch.Tensor


@triton.jit
def _copy_pair(pair, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(pair.target + index, tl.load(pair.source + index))


@triton.jit
def _copy_tuple(pair, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(pair[1] + index, tl.load(pair[0] + index))


@pytest.mark.skipif(torch.__version__ < (2, 7), reason="torch 2.6 brings a Triton without tuples")
@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.parametrize(("kernel", "make"), [(_copy_pair, _Pair), (_copy_tuple, _Pair), (_copy_tuple, lambda *pair: pair)])
def test_tuple_of_tensors_keeps_its_type(kernel: Any, make: Any, captures: bool) -> None:
    x, out = randn(16), torch.zeros(16, device=CUDA)
    if captures:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernel[(1,)](make(x, out), SIZE=16)
        graph.replay()
    else:
        kernel[(1,)](make(x, out), SIZE=16)
    assert torch.equal(out, x)


@triton.jit
def _libdevice(x, out, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    values = tl.load(x + index)
    positive = libdevice.pow(libdevice.tanh(values), 2.0) + libdevice.exp(values) + libdevice.copysign(values, -1.0)
    tl.store(out + index, tl.where(libdevice.isnan(values).to(tl.int1), -1.0, positive))


def test_functions_of_libdevice() -> None:
    x = randn(16)
    x[3] = math.nan
    out = torch.empty_like(x)
    _libdevice[(1,)](x, out, SIZE=16)
    expected = torch.where(x.isnan(), -1.0, x.tanh() ** 2 + x.exp() - x.abs())
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@triton.jit
def _apply(x, y, z, out, scalars, FUNCTION: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    if COUNT == 1:
        tl.store(out + index, FUNCTION(tl.load(x + index)))
        tl.store(scalars, FUNCTION(tl.load(x + 1)))
    elif COUNT == 2:
        tl.store(out + index, FUNCTION(tl.load(x + index), tl.load(y + index)))
        tl.store(scalars, FUNCTION(tl.load(x + 1), tl.load(y + 1)))
    else:
        tl.store(out + index, FUNCTION(tl.load(x + index), tl.load(y + index), tl.load(z + index)))
        tl.store(scalars, FUNCTION(tl.load(x + 1), tl.load(y + 1), tl.load(z + 1)))


_SMALL = [-0.9, -0.75, -0.5, -0.25, 0.25, 0.5, 0.75, 0.9]
_POSITIVE = [0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 10.0]
_HALVES = [-2.5, -1.5, -0.75, -0.5, 0.5, 1.5, 2.5, 3.75]
_SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 2.0]
_BESSEL = [1.0, 2.0] * 4


def _cases_of_libdevice() -> dict[str, tuple[Callable[..., Any] | list[float], list[list[float]]]]:
    """Return for each function what computes it with Python's numbers, or its results, and arguments."""
    names = "acos asin asinh atan atanh cos cosh erf erfc exp expm1 sin sinh tan tanh".split()
    cases: dict[str, Any] = {name: (getattr(math, name), [_SMALL]) for name in names}
    cases |= {name: (getattr(math, name), [_POSITIVE]) for name in "lgamma log log10 log1p log2 sqrt".split()}
    cases |= {name: (getattr(math, name), [_HALVES]) for name in "ceil floor trunc".split()}
    cases |= {f"fast_{name}f": (getattr(math, name), [_SMALL]) for name in "sin cos exp tanh tan".split()}
    cases |= {f"fast_{name}f": (getattr(math, name), [_POSITIVE]) for name in "log2 log log10".split()}
    cases |= {name: (round, [_HALVES]) for name in "rint nearbyint llrint".split()}
    cases |= {name: (lambda x, y: x / y, [_HALVES, _POSITIVE]) for name in "div_rn fast_dividef".split()}
    cases |= {name: (lambda x, y: x**y, [_POSITIVE, _HALVES]) for name in "pow fast_powf".split()}
    cases |= {name: (lambda x: x**-0.5, [_POSITIVE]) for name in "rsqrt rsqrt_rn".split()}
    cases |= {name: (getattr(math, name), [_HALVES, _SMALL]) for name in "atan2 copysign fmod hypot remainder".split()}
    cases |= {name: (lambda x: int(math.isfinite(x)), [_SPECIAL]) for name in "finitef".split()}
    root = 2**0.5
    return cases | {
        "abs": (abs, [_HALVES]),
        "acosh": (math.acosh, [[x + 1 for x in _POSITIVE]]),
        "cbrt": ([-3.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 3.0], [[-27.0, -8.0, -1.0, -0.125, 0.125, 1.0, 8.0, 27.0]]),
        "cyl_bessel_i0": ([1.2660658778, 2.2795853023] * 4, [_BESSEL]),
        "cyl_bessel_i1": ([0.5651591040, 1.5906368546] * 4, [_BESSEL]),
        "erfcx": (lambda x: math.exp(x * x) * math.erfc(x), [_HALVES]),
        "erfinv": (_SMALL, [[math.erf(x) for x in _SMALL]]),
        "exp2": (lambda x: 2**x, [_HALVES]),
        "fma": (lambda x, y, z: x * y + z, [_HALVES, _POSITIVE, _SMALL]),
        "isinf": (lambda x: int(math.isinf(x)), [_SPECIAL]),
        "isnan": (lambda x: int(math.isnan(x)), [_SPECIAL]),
        "j0": ([0.7651976866, 0.2238907791] * 4, [_BESSEL]),
        "j1": ([0.4400505857, 0.5767248078] * 4, [_BESSEL]),
        "ldexp": (lambda x, y: x * 2**y, [_SMALL, [float(n) for n in range(-3, 5)]]),
        "nextafter": ([1 - 2**-24, 1 + 2**-23] * 4, [[1.0] * 8, [0.0, 2.0] * 4]),
        "normcdf": (lambda x: math.erfc(-x / root) / 2, [_HALVES]),
        "normcdfinv": (_SMALL, [[math.erfc(-x / root) / 2 for x in _SMALL]]),
        "round": ([-3.0, -2.0, -1.0, -1.0, 1.0, 2.0, 3.0, 4.0], [_HALVES]),
        "signbit": (lambda x: int(math.copysign(1, x) < 0), [[*_SPECIAL[1:], -2.0]]),
        "sqrt_rn": (math.sqrt, [_POSITIVE]),
        "y0": ([0.0882569642, 0.5103756726] * 4, [_BESSEL]),
        "y1": ([-0.7812128213, -0.1070324315] * 4, [_BESSEL]),
    }


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < (2, 7), reason="torch 2.6, whose Triton takes no function as an argument")
def test_functions_of_libdevice_one_by_one() -> None:
    from triton.language.extra.cuda import libdevice as of_cuda

    cases = _cases_of_libdevice()
    out, scalar = torch.empty(8, device=CUDA), torch.empty(1, device=CUDA)
    for name, (function, arguments) in cases.items():
        if not hasattr(of_cuda, name):  # another version of Triton
            continue
        expected = function if isinstance(function, list) else list(map(function, *arguments))
        tensors = [torch.tensor(values, device=CUDA) for values in arguments]
        if name == "ldexp":
            tensors[1] = tensors[1].int()
        padded = [*tensors, *[out] * (3 - len(tensors))]
        _apply[(1,)](*padded, out, scalar, FUNCTION=getattr(of_cuda, name), COUNT=len(tensors), SIZE=8)
        tolerance = 0 if name == "nextafter" else 1e-5
        assert out.tolist() == pytest.approx(expected, rel=tolerance, abs=tolerance), name
        assert scalar.item() == out.tolist()[1], name


@triton.jit
def _update(x, out, exponent, SIZE: tl.constexpr, HAS_BRANCHES: tl.constexpr):
    value = tl.broadcast_to(tl.load(x), [SIZE]) + 1.0
    if HAS_BRANCHES:
        value = libdevice.pow(value, tl.load(exponent))
    tl.store(out + tl.full([SIZE], 0, tl.int32), value)


@pytest.mark.parametrize("has_branches", [False, True])
def test_all_warps_have_loaded_what_each_of_them_changes(has_branches: bool) -> None:
    """As on a GPU, whose warps begin together: Inductor's code for optimizers adds 1 to a step in each thread."""
    x, exponent = torch.ones(1, device=CUDA), torch.ones(1, device=CUDA)
    _update[(1,)](x, x, exponent, SIZE=1024, HAS_BRANCHES=has_branches, num_warps=8)
    assert x.item() == pytest.approx(2)


@triton.jit
def _dropout(x, out, size, probability, seed, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    keep = tl.rand(seed, index) > probability
    values = tl.load(x + index, mask=inside)
    tl.store(out + index, tl.where(keep, values / (1 - probability), 0.0), mask=inside)


@pytest.mark.slow
def test_dropout_with_a_seed() -> None:
    x = torch.ones(2000, device=CUDA)
    results = []
    for seed in (1, 1, 2):
        results.append(torch.empty_like(x))
        _dropout[(8,)](x, results[-1], 2000, 0.5, seed, BLOCK=256)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert set(results[0].unique().tolist()) == {0.0, 2.0}
    assert 0.45 < results[0].eq(0).float().mean() < 0.55


@triton.jit
def _layer_norm(x, weight, bias, out, mean, inverse, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    inside = index < columns
    values = tl.load(x + row * columns + index, mask=inside, other=0.0)
    average = tl.sum(values, axis=0) / columns
    centered = tl.where(inside, values - average, 0.0)
    scale = 1 / tl.sqrt(tl.sum(centered * centered, axis=0) / columns + eps)
    tl.store(mean + row, average)
    tl.store(inverse + row, scale)
    result = centered * scale * tl.load(weight + index, mask=inside) + tl.load(bias + index, mask=inside)
    tl.store(out + row * columns + index, result, mask=inside)


@triton.jit
def _layer_norm_backward(grad, x, weight, mean, inverse, grad_x, grad_weight, grad_bias, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    inside = index < columns
    upstream = tl.load(grad + row * columns + index, mask=inside, other=0.0)
    scale = tl.load(inverse + row)
    normal = tl.where(inside, (tl.load(x + row * columns + index, mask=inside, other=0.0) - tl.load(mean + row)) * scale, 0.0)
    weighted = tl.load(weight + index, mask=inside, other=0.0) * upstream
    first, second = tl.sum(normal * weighted, axis=0) / columns, tl.sum(weighted, axis=0) / columns
    tl.store(grad_x + row * columns + index, (weighted - (normal * first + second)) * scale, mask=inside)
    tl.atomic_add(grad_weight + index, upstream * normal, mask=inside)
    tl.atomic_add(grad_bias + index, upstream, mask=inside)


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        rows, columns = x.shape
        out, mean, inverse = torch.empty_like(x), x.new_empty(rows), x.new_empty(rows)
        _layer_norm[(rows,)](x, weight, bias, out, mean, inverse, columns, 1e-5, BLOCK=64)
        ctx.save_for_backward(x, weight, mean, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, mean, inverse = ctx.saved_tensors
        grads = torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(weight)
        _layer_norm_backward[(x.shape[0],)](grad, x, weight, mean, inverse, *grads, x.shape[1], BLOCK=64)
        return grads


@pytest.mark.slow
def test_layer_norm_forward_and_backward() -> None:
    inputs = [tensor.requires_grad_() for tensor in (randn(7, 48), randn(48), randn(48))]
    results = [LayerNorm.apply(*inputs), F.layer_norm(inputs[0], (48,), *inputs[1:])]
    torch.testing.assert_close(*results)
    upstream = randn(7, 48)
    for gradient, expected in zip(*(torch.autograd.grad(result, inputs, upstream) for result in results), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)


@triton.jit
def _attention(q, k, v, out, length, scale, D: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr):
    start, head = tl.program_id(0) * BLOCK, tl.program_id(1) * length * D
    rows, inner = start + tl.arange(0, BLOCK), tl.arange(0, D)
    queries = tl.load(q + head + rows[:, None] * D + inner[None, :])
    highest = tl.full((BLOCK,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    result = tl.zeros((BLOCK, D), dtype=tl.float32)
    for position in range(0, start + BLOCK if CAUSAL else length, BLOCK):
        columns = position + tl.arange(0, BLOCK)
        scores = tl.dot(queries, tl.trans(tl.load(k + head + columns[:, None] * D + inner[None, :]))) * scale
        if CAUSAL:
            scores = tl.where(rows[:, None] >= columns[None, :], scores, -float("inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - new_highest[:, None])
        correction = tl.exp(highest - new_highest)
        total = total * correction + tl.sum(weights, 1)
        result = result * correction[:, None] + tl.dot(weights, tl.load(v + head + columns[:, None] * D + inner[None, :]))
        highest = new_highest
    tl.store(out + head + rows[:, None] * D + inner[None, :], result / total[:, None])


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_fused_attention(causal: bool) -> None:
    q, k, v = (randn(2, 64, 16) for _ in range(3))
    out = torch.empty_like(q)
    _attention[(4, 2)](q, k, v, out, 64, 1 / math.sqrt(16), D=16, BLOCK=16, CAUSAL=causal)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, is_causal=causal), rtol=1e-2, atol=1e-2)


@triton.jit
def _grouped_product(lefts, rights, outs, sizes, groups, SIZE: tl.constexpr):
    for group in range(tl.program_id(0), groups, tl.num_programs(0)):
        rows = tl.load(sizes + group)
        left = tl.load(lefts + group).to(tl.pointer_type(tl.float32))
        right = tl.load(rights + group).to(tl.pointer_type(tl.float32))
        out = tl.load(outs + group).to(tl.pointer_type(tl.float32))
        index = tl.arange(0, SIZE)
        inside = index[:, None] < rows
        place = index[:, None] * SIZE + index[None, :]
        tl.store(out + place, tl.dot(tl.load(left + place, mask=inside, other=0.0), tl.load(right + place)), mask=inside)


@pytest.mark.slow
def test_grouped_products_with_pointer_tensors() -> None:
    lefts = [randn(rows, 16) for rows in (16, 5, 9)]
    rights = [randn(16, 16) for _ in lefts]
    outs = [torch.empty_like(left) for left in lefts]
    addresses = [torch.tensor([each.data_ptr() for each in group], device=CUDA) for group in (lefts, rights, outs)]
    sizes = torch.tensor([left.shape[0] for left in lefts], device=CUDA)
    _grouped_product[(2,)](*addresses, sizes, 3, SIZE=16)
    for left, right, out in zip(lefts, rights, outs, strict=True):
        torch.testing.assert_close(out, left @ right, rtol=2e-2, atol=2e-2)


@triton.jit
def _transposed_by_block_pointers(x, scales, out, rows, columns, BLOCK: tl.constexpr):
    source = tl.make_block_ptr(
        x, (rows, columns), (columns, 1), (tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK), (BLOCK, BLOCK), (1, 0)
    )
    target = tl.make_block_ptr(
        out, (columns, rows), (rows, 1), (tl.program_id(1) * BLOCK, tl.program_id(0) * BLOCK), (BLOCK, BLOCK), (1, 0)
    )
    values = tl.load(source, boundary_check=(0, 1), padding_option="zero")
    scale = tl.load(scales + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1))
    tl.store(target, tl.trans(values) * scale, boundary_check=(0, 1))


@triton.jit
def _transposed_by_descriptors(x, scales, out, rows, columns, BLOCK: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [BLOCK, BLOCK])
    target = tl.make_tensor_descriptor(out, [columns, rows], [rows, 1], [BLOCK, BLOCK])
    row, column = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    scale = tl.load(scales + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1))
    target.store([column, row], tl.trans(source.load([row, column])) * scale)


@pytest.mark.slow
def test_block_scaled_transpose() -> None:
    x, scales = randn(20, 36), randn(2, 3)
    out = torch.empty(36, 20, device=CUDA)
    # Newer versions of Triton refuse block pointers.
    kernel = _transposed_by_block_pointers if torch.__version__ < (2, 10) else _transposed_by_descriptors
    kernel[(2, 3)](x, scales, out, 20, 36, BLOCK=16)
    expanded = scales.repeat_interleave(16, 0)[:20].repeat_interleave(16, 1)[:, :36]
    torch.testing.assert_close(out, (x * expanded).t())


@triton.jit
def _histogram(x, counts, size, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    tl.atomic_add(counts + tl.load(x + index, mask=inside, other=0), 1, mask=inside)


def test_histogram_by_atomics() -> None:
    x = torch.randint(10, (500,), device=CUDA)
    counts = torch.zeros(10, dtype=torch.int32, device=CUDA)
    _histogram[(8,)](x, counts, 500, BLOCK=64)
    assert torch.equal(counts.long(), x.bincount(minlength=10))


@triton.jit
def _exchange(x, new, old, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    inside = index < SIZE - 1
    tl.store(old + index, tl.atomic_xchg(x + index, tl.load(new + index), mask=inside), mask=inside)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(each, marks=pytest.mark.slow) for each in (torch.float64, torch.int32, torch.int64))],
)
def test_exchange_by_atomics(dtype: torch.dtype) -> None:
    x, new = (randn(16).mul(100).to(dtype) for _ in range(2))
    before, old = x.clone(), torch.zeros_like(x)
    _exchange[(1,)](x, new, old, SIZE=16)
    assert torch.equal(x, torch.cat([new[:15], before[15:]]))
    assert torch.equal(old[:15], before[:15])


@triton.jit
def _persistent(x, out, size, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    for block in tl.range(tl.program_id(0), tl.cdiv(size, BLOCK), PROGRAMS):
        index = block * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + index, tl.load(x + index, mask=index < size) * 2 + block, mask=index < size)


def test_persistent_kernel() -> None:
    x = randn(450)
    out = torch.empty_like(x)
    _persistent[(3,)](x, out, 450, PROGRAMS=3, BLOCK=64)
    torch.testing.assert_close(out, x * 2 + torch.arange(450, device=CUDA) // 64)


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < (2, 9), reason="torch 2.8's Triton links its launcher with libcuda.so, which CI lacks")
def test_launch_without_triton_raises() -> None:
    program = f"import sys; sys.path.insert(0, {__file__!r}.rpartition('/tests/')[0]); import pytest, torch\n"
    program += "import tests.simulation.compiled.test_triton_simulated as t\n"
    program += "try:\n    t.add(t.randn(4), t.randn(4))\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
    done = subprocess.run(
        [sys.executable, "-c", program], env=simulated_environment(triton=False), capture_output=True, text=True
    )
    assert "operation not supported" in done.stdout, done.stdout + done.stderr
