"""Launches of Triton kernels inside graphs: ``torch.compile(fullgraph=True)``, ``triton_op``, ``make_fx``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="torch without Triton")
tl: Any = pytest.importorskip("triton.language", reason="torch without Triton")

CUDA = torch.device("cuda", 0)
# AOTAutograd finds out what a kernel writes, so this backend tests all but the generated code.
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def randn(*size: int, **options: Any) -> torch.Tensor:
    return torch.randn(*size, device=CUDA, **options)


def assert_compiled_is_eager(function: Any, *inputs: torch.Tensor, backend: str, **options: Any) -> None:
    """Compare results, changed arguments and gradients of a function with those of its only graph."""
    copies = [each.detach().clone().requires_grad_(each.requires_grad) for each in inputs]
    expected = function(*inputs)
    result = torch.compile(function, fullgraph=True, backend=backend, **options)(*copies)
    torch.testing.assert_close((result, copies), (expected, list(inputs)))
    if any(each.requires_grad for each in inputs):
        expected.sum().backward()
        result.sum().backward()
        torch.testing.assert_close([each.grad for each in copies], [each.grad for each in inputs])


@triton.jit
def _add(x, y, out, size, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    tl.store(out + index, tl.load(x + index, mask=inside) + tl.load(y + index, mask=inside), mask=inside)


@triton.jit
def _double(x, size, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pointers = x
    pointers += index
    tl.store(pointers, tl.load(pointers, mask=index < size) * 2, mask=index < size)


_add_tuned = triton.autotune([triton.Config({"BLOCK": size}, num_warps=2) for size in (32, 64)], key=["size"])(_add)
_add_heuristic = triton.heuristics({"BLOCK": lambda arguments: 64 if arguments["size"] > 32 else 32})(_add)
_add_both = triton.autotune([triton.Config({}, num_warps=warps) for warps in (2, 4)], key=["size"])(_add_heuristic)


def blocks(size: Any) -> Any:
    return lambda meta: (triton.cdiv(size, meta["BLOCK"]),)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    _add[blocks(x.numel())](x, y, out, x.numel(), BLOCK=32)
    return out


def add_with_a_grid_of_numbers(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    _add[(triton.cdiv(x.numel(), 32),)](x, y, out, x.numel(), BLOCK=32)
    return out


def add_by_run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    _add.run(x, y, size=x.numel(), out=out, BLOCK=32, num_warps=2, grid=(4,), warmup=False)
    return out


def add_autotuned(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    _add_tuned[blocks(x.numel())](x, y, out, x.numel())
    return out


def add_with_heuristics(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out, other = torch.empty_like(x), torch.empty_like(x)
    _add_heuristic[(4,)](x, y, out, x.numel())
    _add_both[blocks(x.numel())](out, y, other, x.numel())
    return other


def several(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result = add(x.sin(), y).cos()
    for _ in range(3):
        result = add_autotuned(result, x)
    _double[blocks(x.numel())](result, x.numel(), BLOCK=32)
    return result + y


def change_arguments(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    between = x.exp()
    for each in (x, between, y[10:50]):
        _double[blocks(each.numel())](each, each.numel(), BLOCK=32)
    return between + x


FUNCTIONS = [
    add,
    add_with_a_grid_of_numbers,
    add_by_run,
    add_autotuned,
    pytest.param(
        add_with_heuristics,
        marks=pytest.mark.skipif(torch.__version__ < (2, 8), reason="torch 2.6 compiles no heuristics of autotuners"),
    ),
    several,
    change_arguments,
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_launches_in_one_graph(function: Any, backend: str) -> None:
    assert_compiled_is_eager(function, randn(100), randn(100), backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes_may_change(backend: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(several, fullgraph=True, backend=counter, dynamic=True)
    for size in (100, 130, 70):
        x, y = randn(size), randn(size)
        torch.testing.assert_close(compiled(x, y), several(x, y))
    assert counter.frame_count == 1, "each size was compiled"


class Product(torch.autograd.Function):
    """The sum of two tensors twice, forward and backward by kernels."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return add(x, y)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return add(grad.contiguous(), x), add_autotuned(grad.contiguous(), grad.contiguous())


@triton.jit
def _scale(x, out, factor, size, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, tl.load(x + index, mask=index < size) * factor, mask=index < size)


def scale_by_size(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    _scale[blocks(x.numel())](x, out, 1 / x.shape[0], x.numel(), BLOCK=32)
    return out


def test_float_of_a_size_that_may_change() -> None:
    # Inductor passes the float as an integer, on a GPU too.
    compiled = torch.compile(scale_by_size, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (40, 70):
        x = randn(size)
        torch.testing.assert_close(compiled(x), x / size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autograd_function(backend: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return Product.apply(x.sin(), y) ** 2

    assert_compiled_is_eager(function, randn(100, requires_grad=True), randn(100, requires_grad=True), backend=backend)


_calls = 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kernel", [_add, _add_tuned])
def test_triton_op(backend: str, kernel: Any) -> None:
    global _calls
    _calls += 1
    constants = {} if kernel is _add_tuned else {"BLOCK": 32}

    @torch.library.triton_op(f"accelerator_tests::add_{_calls}", mutates_args={"out"})
    def operator(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        torch.library.wrap_triton(kernel)[blocks(x.numel())](x, x, out, x.numel(), **constants)
        return out + 1

    def function(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return operator(x.sin(), out) * 2

    assert_compiled_is_eager(function, randn(100), randn(100), backend=backend)


def test_make_fx_records_a_wrapped_kernel() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.library.wrap_triton(_add)[(4,)](x, x, out, x.numel(), BLOCK=32)
        return out

    x = randn(100)
    graph = make_fx(function, tracing_mode="fake")(x)
    assert torch.equal(graph(x), x * 2)
    assert torch.equal(function(x), x * 2)
    assert function(x.to("meta")).is_meta


@triton.jit
def _multiply(x, out, FACTOR: tl.constexpr, SIZE: tl.constexpr):
    index = tl.arange(0, SIZE)
    tl.store(out + index, tl.load(x + index) * FACTOR)


@pytest.mark.skipif(torch.__version__ < (2, 8), reason="torch 2.6 compiles no autotuner with these arguments")
@pytest.mark.parametrize("backend", BACKENDS)
def test_replaced_configurations_compile_again(backend: str) -> None:
    """torch guards the configurations of an autotuned kernel if the program chooses among them."""
    tune = triton.autotune(
        [triton.Config({"FACTOR": 2}), triton.Config({"FACTOR": 2}, num_warps=2)],
        key=[],
        prune_configs_by={"early_config_prune": lambda configs, arguments, **options: configs},
    )
    kernel = tune(_multiply)

    @torch.compile(fullgraph=True, backend=backend)
    def multiply(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        kernel[(1,)](x, out, SIZE=16)
        return out

    x = randn(16)
    torch.testing.assert_close(multiply(x), x * 2)
    kernel.configs = [triton.Config({"FACTOR": 3})]
    torch.testing.assert_close(multiply(x), x * 3)


@pytest.mark.slow
def test_tuning_of_compiled_launches_changes_no_argument() -> None:
    tuned = triton.autotune([triton.Config({"BLOCK": size}, num_warps=2) for size in (32, 64)], key=["size"])(_double)

    def function(x: torch.Tensor) -> torch.Tensor:
        tuned[blocks(x.numel())](x, x.numel())
        return x + 1

    compiled, graph, x = torch.compile(function, fullgraph=True), torch.cuda.CUDAGraph(), randn(100)
    for each in (compiled, torch.compile(function, fullgraph=True, mode="reduce-overhead")):
        for _ in range(2):
            expected = x * 2
            assert torch.equal(each(x), expected + 1)
            assert torch.equal(x, expected)
    with torch.cuda.graph(graph):
        out = compiled(x)
    assert torch.equal(x, expected), "the capture has changed the argument"
    for _ in range(2):
        expected = x * 2
        graph.replay()
        assert torch.equal(x, expected)
        assert torch.equal(out, expected + 1)


@triton.jit
def _subtract(x, y, out, size, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, tl.load(x + index, mask=index < size) - tl.load(y + index, mask=index < size), mask=index < size)


@pytest.mark.slow
def test_compiled_launch_with_one_tensor_twice_and_then_with_two() -> None:
    def subtract(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        _subtract[(4,)](x, y, out, x.numel(), BLOCK=32)
        return out

    x, y = randn(100), randn(100)
    assert_compiled_is_eager(lambda x: subtract(x, x), x, backend="inductor")
    torch._dynamo.reset()  # the next launch gets the numbers of this one in torch's tables
    assert_compiled_is_eager(subtract, x, y, backend="inductor")


@pytest.mark.slow
def test_compiled_launches_in_a_captured_graph() -> None:
    x, y = randn(100), randn(100)
    compiled = torch.compile(several, fullgraph=True)
    compiled(x, y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(x, y)
    for _ in range(2):
        x.add_(1)
        graph.replay()
        torch.testing.assert_close(out, several(x, y))
