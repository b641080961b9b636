"""Launches of Triton kernels inside graphs: ``torch.compile(fullgraph=True)``, ``triton_op``, ``make_fx``."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

if torch.__version__ < (2, 8):
    pytest.skip("torch 2.8 is the oldest whose compiled code is simulated", allow_module_level=True)

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
    add_with_heuristics,
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_float_of_a_size_that_may_change(backend: str) -> None:
    compiled = torch.compile(scale_by_size, fullgraph=True, dynamic=True, backend=backend)
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


# What a kernel writes


@triton.jit
def _store_at(pointer, index, value):
    tl.store(pointer + index, value)


@triton.jit
def _pick(first, second, FIRST: tl.constexpr):
    return first if FIRST else second


@triton.jit
def _writes_through_helpers(x, y, out, size, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    _store_at(out, index, tl.load(x + index))
    tl.atomic_add(_pick(y, y, True) + index, 1.0)


@triton.jit
def _writes_where_another_points(x, places, out, BLOCK: tl.constexpr):
    index = tl.load(places + tl.arange(0, BLOCK))
    total = tl.sum(tl.load(x + index), axis=0)
    tl.store(out + index, total)


@triton.jit
def _writes_by_a_descriptor(x, out, rows, BLOCK: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, BLOCK], [BLOCK, 1], [BLOCK, BLOCK])
    target = tl.make_tensor_descriptor(out, [rows, BLOCK], [BLOCK, 1], [BLOCK, BLOCK])
    target.store([0, 0], source.load([0, 0]))


@triton.jit
def _swaps(x, y, size, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    left, right = x, y
    for _ in range(2):
        left, right = right, left
    tl.store(left + index, tl.load(right + index))


@triton.jit
def _reads(x, out, FUNCTION: tl.constexpr):
    value = tl.load(x)
    if value > 0:
        tl.store(pointer=out, value=FUNCTION(value))


@triton.jit
def _put(pointer, value):
    tl.store(pointer, value)


@triton.jit
def _writes_by_keywords(x, y, out):
    _put(value=tl.load(x), pointer=out)
    _put(y, value=tl.load(x))


@triton.jit
def _calls_itself(x, y, out, DEPTH: tl.constexpr):
    if DEPTH > 0:
        _calls_itself(x, y, out, DEPTH - 1)


def not_a_kernel(*pointers: Any) -> None:
    pass


@triton.jit
def _calls_what_is_not_understood(x, y, out):
    not_a_kernel(x, out)
    tl.store(tl.load(y), 1.0)


@triton.jit
def _put_second(value, pointer):
    tl.store(pointer, value)


@triton.jit
def _calls_with_a_star(x, y, out):
    _put_second(*(tl.load(x), out))


@triton.jit
def _has_assembly(x, out):
    tl.inline_asm_elementwise("st.global.b32 [$1], 0;", "=r,l", [out], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _reads_in_every_way(x, y, out):
    tl.device_print("x", x)
    print(y)
    tl.static_assert(len([x, y]) == 2)
    tl.store(out, tl.load(x) + tl.sum(tl.load(y.to(tl.pointer_type(tl.int32))), axis=0))


@triton.jit
def _names_in_every_way(x, y, out, places):
    place: tl.tensor = x
    tl.atomic_cas(place, 0, 1)
    if (other := y) is not None:
        tl.atomic_xchg(other, 1)
    for each in (places, places):
        tl.atomic_max(each, 1)


@triton.jit
def _writes_by_a_descriptors_methods(x, y, out, rows):
    target = tl.make_tensor_descriptor(out, [rows, 16], [16, 1], [16, 16])
    indices = tl.load(x + tl.arange(0, 16))
    target.scatter(tl.load(y), indices, 0)


def _with_a_helper_in_a_closure() -> Any:
    @triton.jit
    def peek(pointer):
        return tl.load(pointer)

    @triton.jit
    def kernel(x, out):
        tl.store(out, peek(x))

    return kernel


@pytest.mark.parametrize(
    ("kernel", "written"),
    [
        (_add, {"out"}),
        (_double, {"x"}),
        (_writes_through_helpers, {"y", "out"}),
        (_writes_where_another_points, {"out"}),
        (_writes_by_a_descriptor, {"out"}),
        (_swaps, {"x", "y"}),
        (_writes_by_keywords, {"y", "out"}),
        (_reads, {"out"}),
        (_calls_itself, {"x", "y", "out"}),
        (_calls_what_is_not_understood, {"x", "out"}),
        (_calls_with_a_star, {"out"}),
        (_has_assembly, {"out"}),
        (_reads_in_every_way, {"out"}),
        (_names_in_every_way, {"x", "y", "places"}),
        (_writes_by_a_descriptors_methods, {"out"}),
        (_with_a_helper_in_a_closure(), {"out"}),
    ],
)
def test_written_parameters(kernel: Any, written: set[str]) -> None:
    # The name under which the simulation is loaded in a simulated process.
    written_parameters = sys.modules["_accelerator_simulation._compile.triton_writes"].written_parameters
    tensors = {"x", "y", "out", "places"}
    assert written_parameters(kernel.fn) & tensors == written
