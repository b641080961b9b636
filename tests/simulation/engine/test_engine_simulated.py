"""The engine returns the CPU's values. It copies no results, and a forked child cannot write its parent's memory.

Without a C++ compiler, the same calls run in Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support import run, simulated_environment

aten = torch.ops.aten
# Missing on a GPU that is not simulated, where this module is collected too.
engine: Any = getattr(sys.modules.get("_accelerator_simulation._inside.ops.engine"), "engine", None)
count_copies: Callable[[], int] = engine.count_copies if engine is not None else lambda: 0

Call = Callable[..., Any]
Function = Callable[[torch.Tensor], Any]
# Functions of a tensor of 8 x 6 x 40 x 40 floats.
FUNCTIONS: dict[str, Function] = {
    "add": lambda x: x + x,
    "sub": lambda x: torch.sub(x, x, alpha=2),
    "mul": lambda x: x * x,
    "div": lambda x: x / x,
    "pow": lambda x: x**2,
    "number": lambda x: x * 2,
    "number_": lambda x: x.clone().div_(3),
    "subtracted_number": lambda x: torch.sub(x, 2.5, alpha=2),
    "relu": lambda x: x.relu(),
    "threshold_backward": lambda x: aten.threshold_backward(x, x, 0),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_backward": lambda x: aten.gelu_backward(x, x),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh_backward": lambda x: aten.tanh_backward(x, x),
    "leaky_relu": F.leaky_relu,
    "mm": lambda x: x.view(-1, 240) @ x.view(240, -1),
    "addmm": lambda x: torch.addmm(x.view(-1)[:240], x.view(-1, 40), x.view(40, -1)[:, :240]),
    "batch_norm": lambda x: aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5),
    "eval_batch_norm": lambda x: F.batch_norm(x, x[0, :, 0, 0], x[0, :, 0, 1].abs()),
    "max_pool": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "strided_max_pool": lambda x: F.max_pool2d(x, (3, 2), (1, 3), return_indices=True),
    "max_pool_backward": lambda x: aten.max_pool2d_with_indices_backward(
        x[..., ::2, ::2].contiguous(), x, [2, 2], [2, 2], [0, 0], [1, 1], False, F.max_pool2d(x, 2, return_indices=True)[1]
    ),
    "broadcast": lambda x: x + x[:1],
    "promoted": lambda x: x * x.double(),
    "transposed": lambda x: x.transpose(-1, -2) + x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last).relu(),
    "complex_number": lambda x: x * 2j,
    "complex_exponent": lambda x: x**2j,
    "padded_max_pool": lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True),
    "dilated_max_pool": lambda x: F.max_pool2d(x, 2, 2, 0, 3, return_indices=True),
    "ceiled_max_pool": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True, return_indices=True),
    "max_pool_of_three_dimensions": lambda x: F.max_pool2d(x.flatten(0, 1), 2, return_indices=True),
    "divided_integers_by_a_number": lambda x: x.int() / 2,
    "integers": lambda x: x.int() + x.int(),
    "divided_integers": lambda x: x.int() / x.int(),
    "half": lambda x: x.half() + x.half(),
    "complex": lambda x: torch.complex(x, x) * torch.complex(x, x),
    "mixed_batch_norm": lambda x: F.batch_norm(x.bfloat16(), torch.zeros(6).to(x), torch.ones(6).to(x), training=True),
}  # fmt: skip
IN_PYTHON = ("eval_batch_norm", "mixed_batch_norm")


def random_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def assert_same(there: Any, here: Any) -> None:
    pairs = zip(there, here, strict=True) if isinstance(here, (tuple, list)) else [(there, here)]
    for a, b in pairs:
        assert a.is_cuda
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        torch.testing.assert_close(a.cpu(), b, rtol=1e-6, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values(name: str) -> None:
    function = FUNCTIONS[name]
    x = random_tensor(8, 6, 40, 40)
    for _ in range(3):  # the first call runs in Python, the second learns where results are allocated
        assert_same(function(x.cuda()), function(x))


@pytest.mark.parametrize("name", sorted({*FUNCTIONS} - {*IN_PYTHON}))
def test_results_are_not_copied(name: str) -> None:
    x = random_tensor(8, 6, 40, 40).cuda()
    function = FUNCTIONS[name]
    for _ in range(3):  # the first call runs in Python, the second may allocate memory that its kernel keeps
        function(x)
    copies = count_copies()
    result = function(x)
    assert count_copies() == copies
    assert result is not None


def test_many_calls_of_a_loop_copy_nothing() -> None:
    """As many calls as a training step has, of as many sizes: none makes the engine forget another."""
    x = torch.ones(301, device="cuda")
    for step in range(4):
        copies = count_copies()
        for count in range(1, 301):
            x[:count] + 1
        assert step < 3 or count_copies() == copies


# Calls whose CUDA kernels take memory beside their results: names and functions of a tensor of 64 x 16 x 40 x 40 floats.
WITH_MEMORY: dict[str, Function] = {
    "gradient of a bias": lambda x: aten.convolution_backward(
        x, x[:, :3].contiguous(), x[:16, :3, :3, :3].contiguous(), [16], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True] * 3
    ),
    "sum": lambda x: x.sum((0, 2, 3)),
    "unaligned sum": lambda x: x.flatten()[1 : 1 + 2**20].view(1024, 1024).sum(0),
    "sum of converted numbers": lambda x: x.sum((0, 2, 3), dtype=torch.float64),
    "sort": lambda x: x.flatten().sort(),
    "topk": lambda x: x.flatten().topk(3),
    "accumulated": lambda x: x.flatten().index_put(
        (torch.arange(2**17, device="cuda") % 5,), x.flatten()[: 2**17], accumulate=True
    ),
    "distances": lambda x: aten._cdist_backward(x[0, 0], x[0, 1], x[0, 2], 2.0, x[0, 3]),
    "distances, no norm": lambda x: aten._cdist_backward(x[0, 0], x[0, 1], x[0, 2], 0.0, x[0, 3]),
    "loss": lambda x: F.mse_loss(x, x + 1),
}


@pytest.fixture(scope="module")
def large() -> torch.Tensor:
    return torch.randn(64, 16, 40, 40, device="cuda")


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_engine_takes_the_memory_of_kernels(name: str, large: torch.Tensor, by_engine: Call) -> None:
    """Python takes it in the first calls, and tells the engine how much."""
    function = WITH_MEMORY[name]

    def figures() -> tuple[int, int]:
        torch.cuda.reset_peak_memory_stats()
        allocations = torch.cuda.memory_stats()["allocation.all.allocated"]
        before = torch.cuda.memory_allocated()
        function(large)
        count = torch.cuda.memory_stats()["allocation.all.allocated"] - allocations
        return torch.cuda.max_memory_allocated() - before, count

    first = figures()
    by_engine(function, large)
    assert figures() == first


def test_fast_path_raises_torchs_errors() -> None:
    x = random_tensor(300, 200).cuda()
    x + x, x @ x.t()  # later calls take the fast path
    with pytest.raises(RuntimeError, match="must match the size"):
        x + random_tensor(300, 199).cuda()
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        x @ x
    images = random_tensor(2, 3, 80, 80).cuda()
    F.max_pool2d(images, 2)
    with pytest.raises(RuntimeError, match="Output size is too small"):
        F.max_pool2d(images, 81)
    for step in (0, -1):
        with pytest.raises(RuntimeError, match="stride"):
            F.max_pool2d(images, 2, step)
    with pytest.raises(RuntimeError, match="Boolean inputs not supported"):
        torch.ones(300, 600, dtype=torch.bool, device="cuda").relu()


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, grad: torch.Tensor) -> Any:
    """Return the results of memory-efficient attention, the gradients, and the memory that they take."""
    before = torch.cuda.memory_allocated()
    forward = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal)
    mask = [True, True, True, False]
    backward = aten._scaled_dot_product_efficient_attention_backward(grad, q, k, v, None, *forward, 0.0, mask, is_causal)
    return (*forward, *backward), torch.cuda.memory_allocated() - before


# The logsumexp has a multiple of 32 queries.
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(33, 7), (33, 33), (32, 7), (64, 33), (1, 32), (33, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("are_heads_inside", [False, True])
def test_attention_is_that_of_python(
    dtype: torch.dtype, queries: int, keys: int, is_causal: bool, are_heads_inside: bool
) -> None:
    """The engine's results have the values, strides, types and memory of those of Python, which handles captures."""
    lengths = queries, keys, keys, queries
    if are_heads_inside:  # (batch, length, heads, features) in memory
        q, k, v, grad = (random_tensor(2, n, 3, 8).to(dtype).cuda().transpose(1, 2) for n in lengths)
    else:
        q, k, v, grad = (random_tensor(2, 3, n, 8).to(dtype).cuda() for n in lengths)
    first, _ = attend(q, k, v, is_causal, grad)  # in Python, as every first call
    actual, memory = attend(q, k, v, is_causal, grad)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, captured_memory = attend(q, k, v, is_causal, grad)
    graph.replay()
    assert memory == captured_memory
    assert actual[1].shape == (2, 3, -(-queries // 32) * 32)
    for position, length in (
        (0, queries),
        (4, queries),
        (5, keys),
        (6, keys),
    ):  # the output and the gradients, as CUDA's kernels
        assert actual[position].stride() == torch.empty(2, length, 3, 8, device="meta").transpose(1, 2).stride()
    for one, other, third in zip(actual, captured, first, strict=True):
        assert (one is None) == (other is None) == (third is None)
        if one is not None:
            assert one.stride() == other.stride() == third.stride()
            assert torch.equal(one, other)
            assert torch.equal(one, third)


@pytest.mark.parametrize("queries", [1, pytest.param(64, marks=pytest.mark.slow)])  # 64: the logsumexp needs no padding
def test_first_attention_of_a_process_has_the_strides_of_cuda(queries: int) -> None:
    program = f"""
import torch
aten = torch.ops.aten
q, k = torch.randn(2, 3, {queries}, 8, device="cuda"), torch.randn(2, 3, 32, 8, device="cuda")
for _ in range(2):
    forward = aten._scaled_dot_product_efficient_attention(q, k, k, None, True)
    mask = [True, True, True, False]
    backward = aten._scaled_dot_product_efficient_attention_backward(q, q, k, k, None, *forward, 0.0, mask)
    print([tensor.stride() for tensor in (*forward[:2], *backward[:3])])
"""
    output = run(program, simulated_environment(gpus=2))
    of_queries, of_keys = (24 * queries, 8, 24, 1), (768, 8, 24, 1)
    length = -(-queries // 32) * 32
    assert output.splitlines() == [str([of_queries, (3 * length, length, 1), of_queries, of_keys, of_keys])] * 2


def test_usual_calls_of_attention_run_in_the_engine(by_engine: Function) -> None:
    q = random_tensor(2, 3, 64, 8).cuda()
    is_wanted = True, False
    lengths = [
        by_engine(lambda x: aten._scaled_dot_product_efficient_attention(x, x, x, None, each, 0.0), q)[1].size(2)  # noqa: B023
        for each in is_wanted
    ]
    assert lengths == [64, 0]


def test_attention_without_dropout_draws_no_random_numbers() -> None:
    q = random_tensor(1, 1, 4, 8).cuda()
    for kernel in (aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_flash_attention):
        arguments = (q, q, q, None, True) if "efficient" in str(kernel) else (q, q, q)
        for dropout in (0.0, 0.0, 0.5):
            before = torch.cuda.default_generators[0].get_offset()
            kernel(*arguments, dropout)
            assert (torch.cuda.default_generators[0].get_offset() > before) == (dropout > 0)


def test_second_device_and_gradients() -> None:
    x = random_tensor(8, 6, 40, 40)
    there = x.to("cuda:1").requires_grad_()
    here = x.clone().requires_grad_()
    for tensor in (there, here):
        (F.max_pool2d(tensor.relu() * tensor, 2).tanh() ** 2).sum().backward()
    assert there.grad is not None
    assert there.grad.device == torch.device("cuda:1")
    torch.testing.assert_close(there.grad.cpu(), here.grad)


@pytest.mark.parametrize("current", [0, 1])
def test_op_on_another_device_leaves_the_current_device(current: int) -> None:
    torch.cuda.set_device(current)
    x = torch.ones(4, device=f"cuda:{1 - current}")
    for _ in range(2):
        assert (x + 1).device == x.device
        assert torch.cuda.current_device() == current


LISTS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "add": lambda xs: torch._foreach_add(xs, 1.5),
    "add_lists": lambda xs: torch._foreach_add(xs, xs, alpha=2),
    "add_": lambda xs: torch._foreach_add_(xs, 2) or xs,
    "mul_scalars": lambda xs: torch._foreach_mul(xs, [1.0, 2.0, 3.0][: len(xs)]),
    "addcdiv_": lambda xs: torch._foreach_addcdiv_(xs, [x + 3 for x in xs], [x * x + 1 for x in xs], 0.5) or xs,
    "lerp_": lambda xs: torch._foreach_lerp_(xs, [x * 2 for x in xs], 0.25) or xs,
    "sqrt": lambda xs: torch._foreach_sqrt([x.abs() for x in xs]),
    "norm": torch._foreach_norm,
    "cat": lambda xs: torch.cat([x.flatten() for x in xs]),
    "copy_": lambda xs: torch._foreach_copy_([torch.zeros_like(x) for x in xs], xs) or xs,
}
INPUTS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "tensors": lambda: [random_tensor(3), random_tensor(2, 4), random_tensor(1, 1)],
    "parameters": lambda: [nn.Parameter(random_tensor(3)), nn.Parameter(random_tensor(5))],
    "transposed": lambda: [random_tensor(3, 4).t(), random_tensor(4)[::2]],
    "empty": lambda: [random_tensor(3), random_tensor(0)],
    "mixed": lambda: [random_tensor(3), random_tensor(3).double(), random_tensor(3).half()],
    "complex": lambda: [random_tensor(3), torch.complex(random_tensor(3), random_tensor(3))],
    "offset": lambda: [random_tensor(9)[1:], random_tensor(9)[3:]],
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", LISTS)
def test_lists(name: str, inputs: str) -> None:
    if name == "lerp_" and inputs in ("mixed", "complex"):
        pytest.skip("torch does not interpolate half on the CPU in 2.6")
    with torch.no_grad():
        for _ in range(2):
            here = INPUTS[inputs]()
            there = [nn.Parameter(x.cuda()) if isinstance(x, nn.Parameter) else x.cuda() for x in here]
            expected, actual = LISTS[name](here), LISTS[name](there)
            pairs = zip(actual, expected, strict=True) if isinstance(expected, (list, tuple)) else [(actual, expected)]
            for a, b in pairs:
                assert a.is_cuda
                torch.testing.assert_close(a.cpu(), b, rtol=2e-3, atol=1e-5)


def test_lists_on_two_devices() -> None:
    xs = [random_tensor(3).cuda(), random_tensor(3).to("cuda:1")]
    results = torch._foreach_add(xs, 1.0)
    assert [result.device for result in results] == [x.device for x in xs]
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.cat(xs)


INDICES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "rows": lambda x, i: x[i],
    "columns": lambda x, i: x[:, i],
    "both": lambda x, i: x[i, i],
    "mask": lambda x, i: x[x > 0],
    "mask of rows": lambda x, i: x[i == 2],
    "assignment": lambda x, i: x.index_put_((i,), x[0].clone(), accumulate=True),
    "host": lambda x, i: x[[2, 0]],
    "nonzero": lambda x, i: x.nonzero(),
    "masked_select": lambda x, i: x.masked_select(x > 0),
    "unique": lambda x, i: i.unique(return_counts=True),
    "repeated": lambda x, i: x.repeat_interleave(i, 0),
    "repeated to a size": lambda x, i: x.repeat_interleave(i, 0, output_size=3),
}


@pytest.mark.parametrize("name", INDICES)
def test_indices(name: str) -> None:
    x, index = random_tensor(3, 4), torch.tensor([2, 0, 1])
    for _ in range(3):
        assert_same(INDICES[name](x.cuda(), index.cuda()), INDICES[name](x.clone(), index))


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda x: x.add_(1),
    "filled": lambda x: x.fill_(1),
    "zeroed": lambda x: x.zero_(),
    "zeroed pages": lambda x: x.expand(1, -1).clone().zero_(),
    "out": lambda x: torch.add(x, 1, out=x),
    "foreach": lambda x: torch._foreach_add_([x, x], 1.0),
    "fused": lambda x: torch._fused_sgd_(
        [x], [x + 0], [], weight_decay=0, momentum=0, lr=1, dampening=0, nesterov=False, maximize=False, is_first_step=True
    ),
    "index": lambda x: x.__setitem__(torch.tensor([0], device="cuda"), 5),
    "copy": lambda x: x.copy_(torch.ones(3, device="cuda")),
    "copy from the host": lambda x: x.copy_(torch.ones(3)),
    "random": lambda x: x.uniform_(),
    "new": lambda x: x + 1,
}


BAD_FORK = "Cannot re-initialize CUDA in forked subprocess|CUDA error: initialization error"


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_forked_child_does_not_write(name: str, is_known: bool) -> None:
    """A child of an initialized process gets torch's error for all ops, whether the parent has called them or not."""
    write = WRITES[name]
    x = torch.full((3,), 7.0, device="cuda")
    ones = torch.ones(3, device="cuda")
    if is_known:
        write(x.clone()), write(x.clone())
    child = os.fork()
    if child == 0:
        try:
            write(x)
        except RuntimeError as error:
            os._exit(0 if re.search(BAD_FORK, str(error)) else 2)
        except BaseException:
            os._exit(3)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert x.tolist() == [7.0] * 3
    assert (x + ones).tolist() == [8.0] * 3  # the parent goes on


# Of a large matrix. The driver clears large tensors, so an op on a part must not take the part's bounds for its memory.
VIEWS: dict[str, Function] = {
    "every other column": lambda x: x[:, ::2],
    "middle columns": lambda x: x[:, 100:900],
    "middle rows": lambda x: x[100:900],
    "transposed rows": lambda x: x[100:].t(),
    "every other row": lambda x: x[::2],
}
FILLS: dict[str, Function] = {
    "zero_": torch.Tensor.zero_,
    "fill_": lambda x: x.fill_(3),
    "mul_": lambda x: x.mul_(2),
    "copy_": lambda x: x.copy_(x.flip(0)),
    "copy_ of a number": lambda x: x.copy_(torch.tensor(4.0, device=x.device)),
    "out": lambda x: torch.add(x, 1, out=x),
    "foreach": lambda x: torch._foreach_zero_([x]),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("fill", FILLS)
def test_writes_of_a_large_part_leave_the_rest(fill: str, view: str, by_engine: Function) -> None:
    here = random_tensor(1000, 1000)
    there = here.cuda()
    by_engine(FILLS[fill], VIEWS[view](there))
    FILLS[fill](VIEWS[view](here))
    assert torch.equal(there.cpu(), here)


def test_scratch_memory_is_not_charged() -> None:
    """The CPU's kernel copies the transposed input and sorts indices in memory of its own; only results count."""
    x = torch.randn(512, 256, device="cuda").t()
    for _ in range(3):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        values, indices = x.sort(dim=0, stable=True)
        size = values.nbytes + indices.nbytes
        assert torch.cuda.max_memory_allocated() - before == torch.cuda.memory_allocated() - before == size
        del values, indices


def test_result_keeps_its_memory_after_the_op() -> None:
    x = torch.randn(1000, 100, device="cuda")
    results = [x * factor for factor in range(4)]
    addresses = {result.data_ptr() for result in results}
    assert len(addresses) == 4
    for factor, result in enumerate(results):
        torch.testing.assert_close(result.cpu(), x.cpu() * factor)


def test_results_belong_to_the_current_stream() -> None:
    """A result is in the pool of its stream: after it is freed, another stream does not get its memory."""
    x = torch.randn(1000, 100, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(3):
        with torch.cuda.stream(stream):
            result = x * 2
        address = result.data_ptr()
        del result
        assert (x * 3).data_ptr() != address


def test_results_belong_to_the_device_of_the_arguments() -> None:
    x = torch.randn(1024, 256, device="cuda:1")
    results = []
    for _ in range(3):
        before = [torch.cuda.memory_allocated(device) for device in range(2)]
        results.append(x * 2)
        assert torch.cuda.memory_allocated(0) == before[0]
        assert torch.cuda.memory_allocated(1) == before[1] + x.nbytes


def test_out_argument_grows() -> None:
    x = torch.randn(300, 200, device="cuda")
    for _ in range(3):
        out = torch.empty(0, device="cuda")
        torch.mul(x, 2, out=out)
        torch.testing.assert_close(out.cpu(), x.cpu() * 2)
        wrong = torch.ones(2, 2, device="cuda")
        with pytest.warns(UserWarning, match="was resized"):
            torch.mul(x, 2, out=wrong)
        torch.testing.assert_close(wrong.cpu(), x.cpu() * 2)
        assert wrong.untyped_storage().nbytes() == x.nbytes
        view = torch.zeros(10, device="cuda")
        torch.mul(x[0, :4], 2, out=view[3:7])
        torch.testing.assert_close(view.cpu(), F.pad(x[0, :4].cpu() * 2, (3, 3)))


def test_overlapping_arguments_are_refused() -> None:
    x = torch.zeros(10, device="cuda")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="unsupported operation"):
            x[1:].add_(x[:-1])


def test_overlapping_out_arguments_are_refused() -> None:
    """Python handles the first call of an op, the engine the others. No other test calls this op with ``out=``."""
    x = torch.ones(10, device="cuda")
    for _ in range(3):
        with pytest.raises(RuntimeError, match="unsupported operation"):
            torch.hypot(x[:-1], x[:-1], out=x[1:])
        assert x.tolist() == [1.0] * 10
    for _ in range(3):
        torch.hypot(x[:5], x[:5], out=x[5:])
        torch.testing.assert_close(x.cpu(), torch.tensor([1.0] * 5 + [2**0.5] * 5))


# Functions of a tensor of 4 MiB whose first allocation is of results at least as large.
ALLOCATING: dict[str, Function] = {
    name: getattr(torch, name)
    for name in (
        *(
            "abs",
            "neg",
            "exp",
            "log",
            "sin",
            "cos",
            "tanh",
            "sigmoid",
            "relu",
            "sqrt",
            "floor",
            "round",
            "sign",
            "isnan",
            "square",
        ),
        *("cumsum", "cumprod", "sort", "argsort", "flip", "softmax", "log_softmax", "logcumsumexp", "clone", "erf", "expm1"),
        *("zeros_like", "ones_like", "rand_like", "randn_like", "reciprocal", "rsqrt", "sinh", "cosh", "asinh", "trunc"),
    )
}
ALLOCATING.update(
    {
        **{
            name: partial(getattr(torch, name), dim=0)
            for name in ("cumsum", "cumprod", "softmax", "log_softmax", "logcumsumexp")
        },
        "flip": lambda x: x.flip(0),
        "add": lambda x: x + x,
        "number": lambda x: x + 1,
        "where": lambda x: torch.where(x > 0, x, x),
        "gelu": F.gelu,
        "mm": lambda x: x @ x,
        "addmm": lambda x: torch.addmm(x, x, x),
        "layer_norm": lambda x: F.layer_norm(x, (1024,)),
        "index": lambda x: x[torch.arange(1024, device="cuda")],
        "foreach": lambda x: torch._foreach_add([x, x], 1),
        "cat": lambda x: torch.cat([x, x]),
        "double": torch.Tensor.double,
        "transposed": lambda x: x.t().contiguous(),
    }
)


# One of each kind. The others are slow tests.
SAMPLE = ("abs", "sort", "cumsum", "softmax", "clone", "rand_like", "add", "mm", "layer_norm", "index", "foreach", "cat")


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in ALLOCATING])
def test_out_of_memory(name: str, is_known: bool) -> None:
    """An op without memory for its results raises torch's error, leaks nothing and changes no argument."""
    function = ALLOCATING[name]
    x = random_tensor(1024, 1024).abs().cuda()
    expected = x.clone()
    torch.randn(8, 8, device="cuda") @ torch.randn(8, 8, device="cuda")  # allocates cuBLAS's workspace
    if is_known:
        for _ in range(3):
            function(x)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with no_free_memory(), pytest.raises(torch.OutOfMemoryError):
        function(x)
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(x, expected)
    assert function(x) is not None


# Functions that change running statistics beside returning new tensors, and their arguments. The first is of 4 MiB.
CHANGING: dict[str, tuple[Callable[..., Any], Callable[[], list[torch.Tensor]]]] = {
    "batch_norm": (
        lambda x, mean, var: F.batch_norm(x, mean, var, training=True),
        lambda: [random_tensor(64, 16, 32, 32), torch.zeros(16), torch.ones(16)],
    ),
    "batch_norm_without_cudnn": (
        lambda x, mean, var: aten.native_batch_norm(x, None, None, mean, var, True, 0.1, 1e-5),
        lambda: [random_tensor(64, 16, 32, 32), torch.zeros(16), torch.ones(16)],
    ),
    "batch_norm_of_half": (
        lambda x, mean, var: aten.native_batch_norm(x, None, None, mean, var, True, 0.1, 1e-5),
        lambda: [random_tensor(64, 32, 32, 32).bfloat16(), torch.zeros(32), torch.ones(32)],
    ),
    "batch_norm_legit": (
        lambda x, mean, var: aten._native_batch_norm_legit(x, None, None, mean, var, True, 0.1, 1e-5),
        lambda: [random_tensor(64, 16, 32, 32), torch.zeros(16), torch.ones(16)],
    ),
    "batch_norm_with_update": (
        lambda x, mean, var: aten._batch_norm_with_update(x, None, None, mean, var, 0.1, 1e-5),
        lambda: [random_tensor(64, 16, 32, 32), torch.zeros(16), torch.ones(16)],
    ),
    "synchronized_batch_norm": (
        lambda x, mean, var: aten.batch_norm_gather_stats_with_counts(x, x, x, mean, var, 0.1, 1e-5, mean[:1] + 4),
        lambda: [random_tensor(1, 1 << 20).abs(), torch.zeros(1 << 20), torch.ones(1 << 20)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("calls", ["none", pytest.param("of other sizes", marks=pytest.mark.slow), "of the same sizes"])
@pytest.mark.parametrize("name", CHANGING)
def test_out_of_memory_leaves_running_statistics(name: str, calls: str) -> None:
    """As on a GPU, whose kernels allocate their results first."""
    function, make = CHANGING[name]
    changed, same = ([tensor.cuda() for tensor in make()] for _ in range(2))
    if calls == "of other sizes":
        function(*(tensor[..., : tensor.shape[-1] // 2] if tensor.numel() == changed[0].numel() else tensor for tensor in same))
    elif calls == "of the same sizes":
        for _ in range(3):
            function(*same)
    expected = [tensor.clone() for tensor in changed]
    gc.collect()
    torch.cuda.empty_cache()
    with no_free_memory(), pytest.raises(torch.OutOfMemoryError):
        function(*changed)
    for tensor, value in zip(changed, expected, strict=True):
        assert torch.equal(tensor, value)
    assert function(*changed) is not None
    assert not all(torch.equal(tensor, value) for tensor, value in zip(changed, expected, strict=True))


@contextlib.contextmanager
def no_free_memory() -> Iterator[None]:
    """Let the allocator have no free block of 1 MiB and get no further memory from the device."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        fillers = fill_cache()
        yield
        del fillers
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def fill_cache() -> list[torch.Tensor]:
    """Take all free blocks of 1 MiB that the allocator has. It takes up to 1 MiB from other blocks than larger sizes."""
    fillers: list[torch.Tensor] = []
    for size in (2**21, 2**20):
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                fillers.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    return fillers


ACCESSES: list[Function] = [
    lambda x: x + 1,
    lambda x: x.mul_(2),
    lambda x: torch.add(torch.ones_like(x), 1, out=x),
    lambda x: x.new_ones(4, 4).copy_(x),
    lambda x: x.cpu(),
    lambda x: x[0, 0].item(),
    lambda x: torch._foreach_add([x], 1),
    lambda x: x @ x,
    lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    lambda x: x.uniform_(),
    repr,
]


@pytest.mark.parametrize("access", ACCESSES)
def test_a_storage_whose_access_is_an_error(access: Function) -> None:
    """As CUDA graph trees mark the outputs that a later run has overwritten: tensors, and storages that others share."""
    for _ in range(2):  # Python handles the first call of an op
        x, y = torch.ones(4, 4, device="cuda"), torch.ones(4, 4, device="cuda")
        torch._C._set_storage_access_error_msg(x, "it was overwritten")
        torch._C._set_storage_data_ptr_access_error_msg(y.untyped_storage()._cdata, "it was overwritten")
        for each in (x, y):
            with pytest.raises(RuntimeError, match="it was overwritten"):
                access(each)


class _Shims:
    """The functions by which code of AOTInductor calls ops, called as C calls them."""

    def __init__(self) -> None:
        self._library: Any = ctypes.CDLL(None)
        self._new_capsule: Any = ctypes.pythonapi.PyCapsule_New
        self._new_capsule.restype, self._new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p] * 3

    def call(self, name: str, *arguments: Any, results: int = 1) -> list[torch.Tensor]:
        converted: list[Any] = []
        for value in arguments:
            if isinstance(value, torch.Tensor):  # a C++ tensor is a pointer
                converted.append(ctypes.byref(ctypes.c_void_p(value._cdata)))
            elif isinstance(value, list):
                converted += [(ctypes.c_int64 * len(value))(*value), ctypes.c_int64(len(value))]
            elif isinstance(value, float):
                converted.append(ctypes.c_double(value))
            else:
                converted.append(ctypes.c_int64(value) if isinstance(value, int) else value)
        handles = [ctypes.c_void_p() for _ in range(results)]
        status = self._library[f"aoti_torch_cuda_{name}"](*converted, *map(ctypes.byref, handles))
        assert status == 0
        take = torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr
        return [take(self._new_capsule(each, None, None)) for each in handles]


def test_functions_of_aotinductors_code_run_on_simulated_gpus() -> None:
    shims = _Shims()
    x, y, out = (torch.randn(4, 4, device="cuda") for _ in range(3))
    image, weight, bias = (torch.randn(*sizes, device="cuda") for sizes in ((1, 2, 6, 6), (3, 2, 3, 3), (3,)))
    with torch.no_grad():
        shims.call("mm_out", out, x, y, results=0)
        torch.testing.assert_close(out, x @ y)
        shims.call("addmm_out", out, x[0], x, y, 0.5, 2.0, results=0)
        torch.testing.assert_close(out, torch.addmm(x[0], x, y, beta=0.5, alpha=2.0))
        optional = ctypes.byref(ctypes.pointer(ctypes.c_void_p(bias._cdata)))
        (result,) = shims.call("convolution", image, weight, optional, [1, 1], [1, 1], [1, 1], 0, [0, 0], 1)
        torch.testing.assert_close(result, F.conv2d(image, weight, bias, padding=1))
        (result,) = shims.call("convolution", image, weight, None, [1, 1], [1, 1], [1, 1], 0, [0, 0], 1)
        torch.testing.assert_close(result, F.conv2d(image, weight, padding=1))
        values, indices = shims.call("sort_stable", x, ctypes.byref(ctypes.c_int32(1)), -1, 1, results=2)
        assert torch.equal(values, x.sort(-1, descending=True).values)
        assert torch.equal(indices, x.argsort(-1, descending=True))
        index = torch.tensor([1, 3], device="cuda")
        given = ctypes.pointer(ctypes.pointer(ctypes.c_void_p(index._cdata)))
        (result,) = shims.call("index_put", x, (ctypes.c_void_p * 2)(None, ctypes.cast(given, ctypes.c_void_p)), 2, bias[0], 0)
        x[:, index] = bias[0]
        assert torch.equal(result, x)
