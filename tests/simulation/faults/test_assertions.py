"""Device-side assertions: an index out of range is CUDA's error, asynchronous and sticky."""

from __future__ import annotations

from functools import cache

import pytest

from tests import support
from tests.support import simulated_environment
from tests.support.simulation import linux_only
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [linux_only, needs_cuda_torch, pytest.mark.xdist_group("assertions")]

PRELUDE = """
import torch
import torch.nn.functional as F

x, bad = torch.ones(3, 4, device="cuda"), torch.tensor([9], device="cuda")
def error(function):
    try:
        function()
    except (RuntimeError, IndexError) as raised:
        return f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
"""
ASSERT = "CUDA error: device-side assert triggered"
NAMES = (f"AcceleratorError: {ASSERT}", f"RuntimeError: {ASSERT}")  # before and from torch 2.8

# Name of the op on stderr, what the kernel asserts, and the call. A thread of bernoulli's kernel checks up to four values.
CALLS = {
    "index": ('"index out of bounds"', "x[bad]"),
    "_index_put_impl_": ('"index out of bounds"', "x.index_put_((bad,), torch.tensor(1., device='cuda'))"),
    "index_select of embedding": ("srcIndex < srcSelectDimSize", "F.embedding(bad, x)"),
    "_embedding_bag_forward_only": ("index out of range [0, numRows)", "F.embedding_bag(bad[None], x)"),
    "_embedding_bag_forward_only of a decreasing offset": (
        "end >= begin",
        "F.embedding_bag((bad * 0).expand(3).contiguous(), x, torch.cat([bad * 0, bad // 4, bad // 9]))",
    ),
    "_embedding_bag_forward_only of an offset behind the end": (
        "end >= begin",
        "F.embedding_bag((bad * 0).expand(3).contiguous(), x, torch.cat([bad * 0, bad]))",
    ),
    "masked_scatter_": ("totalElements <= srcSize", "x.masked_scatter_(x < bad, x[0, :1].clone())"),
    "gather": ('"scatter gather kernel index out of bounds"', "x.gather(0, bad[None])"),
    "scatter_": ('index out of bounds"', "x.scatter_(0, bad[None], 1.)"),
    "scatter_add_": ('"scatter gather kernel index out of bounds"', "x.scatter_add_(0, bad[None], x[:1, :1].clone())"),
    "index_select": ("srcIndex < srcSelectDimSize", "x.index_select(0, bad)"),
    "index_add_": ("dstIndex < dstAddDimSize", "x.index_add_(0, bad, x[:1].clone())"),
    "index_copy_": ("index_copy_(): index out of bounds", "x.index_copy_(0, bad, x[:1].clone())"),
    "index_fill_": ('"index out of bounds"', "x.index_fill_(0, bad, 1.)"),
    "take": ("idx < numel && idx >= -numel", "x.take(bad + 90)"),
    "put_": ("idx < numel && idx >= -numel", "x.put_(bad + 90, x[0, :1].clone())"),
    "nll_loss_forward": ("t >= 0 && t < n_classes", "F.cross_entropy(x[:1], bad)"),
    "nll_loss2d_forward": ("t >= 0 && t < n_classes", "F.nll_loss(x[None, :, :, None], bad.expand(1, 4, 1))"),
    "binary_cross_entropy": ("input_val >= zero && input_val <= one", "F.binary_cross_entropy(x + 1, x)"),
    "multinomial": ("!(val < zero)", "torch.multinomial(x - bad, 2, replacement=True)"),
    "multinomial without a sum": ("cumdist[size - 1] > ", "torch.multinomial(x * (bad == 0), 2, replacement=True)"),
    "multinomial of infinity": ("cumdist[size - 1] > ", "torch.multinomial(x / (bad == 0), 2, replacement=True)"),
    "bernoulli_ out of place": (" <= 1", "torch.bernoulli(x + bad)"),
    "bernoulli_": (" <= 1", "x.bernoulli_(x + bad)"),
    "bernoulli_ of nan": (" <= 1", "torch.bernoulli(0 / (bad == 0))"),
    "poisson": ("invalid Poisson rate", "torch.poisson(-x * bad)"),
    "_assert_async": ("", "torch._assert_async(x[0, 0] != x[0, 0])"),
    "_assert_async with a message": ("unequal", "torch._assert_async(x[0, 0] != x[0, 0], 'unequal')"),
}


def run(program: str, gpus: int = 1, **variables: str) -> tuple[list[str], str]:
    done = support.python(PRELUDE + program, simulated_environment(variables, gpus=gpus))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


@cache
def outcomes() -> dict[str, tuple[list[str], str]]:
    """Return what each call prints and writes to stderr, if each has a GPU of its own, which it breaks."""
    program = "import sys\n"
    for gpu, (_, call) in enumerate(CALLS.values()):
        valid = call.replace("(bad == 0)", "x").replace("bad", "torch.zeros_like(bad)").replace("x + 1", "x")
        program += f"""
print("next call", file=sys.stderr, flush=True)
with torch.cuda.device({gpu}):
    x, bad = torch.ones(3, 4, device="cuda"), torch.tensor([9], device="cuda")
    try:
        {valid.replace("!=", "==").replace("+ 90", "+ 1")}
    except IndexError:
        pass
    print(error(lambda: {call}))
    print(error(torch.cuda.synchronize), error(lambda: x + 1), error(x.cpu), sep="|")
print((torch.ones(2, device="cuda:{len(CALLS)}") + 1).sum().item())
"""
    lines, errors = run(program, gpus=len(CALLS) + 1)
    triples, parts = zip(lines[0::3], lines[1::3], lines[2::3], strict=True), errors.split("next call\n")[1:]
    return {op: ([*triple], part) for op, triple, part in zip(CALLS, triples, parts, strict=True)}


@pytest.mark.parametrize("op", CALLS)
def test_the_call_returns_and_the_next_one_raises(op: str) -> None:
    assertion, _ = CALLS[op]
    lines, errors = outcomes()[op]
    assert lines[0] == "None", errors
    assert lines[1] in ("|".join([name] * 3) for name in NAMES)
    assert lines[2] == "4.0"
    assert errors.count("Assertion") == 1
    assert f": {op.partition(' ')[0]}: block: [0,0,0], thread: [0,0,0] Assertion `" in errors
    assert assertion in errors


def test_an_assertion_without_a_message_has_no_text() -> None:
    _, errors = run("torch._assert_async(x[0, 0] != x[0, 0])")
    assert "_assert_async: block: [0,0,0], thread: [0,0,0] Assertion `` failed." in errors


def test_one_hot_raises_like_the_scatter_that_it_is() -> None:
    lines, errors = run("print(error(lambda: F.one_hot(bad, 3)), error(torch.cuda.synchronize), sep='|')")
    assert lines[0] in [f"None|{name}" for name in NAMES], errors


def test_launch_blocking_raises_at_the_op() -> None:
    lines, _ = run("print(error(lambda: x[bad]))", CUDA_LAUNCH_BLOCKING="1")
    assert lines[0] in NAMES


def test_what_the_host_checks_is_still_its_error() -> None:
    program = """
zeros = torch.zeros(2, dtype=torch.long, device="cuda")
print(error(lambda: x[9]), error(lambda: x.gather(5, bad[None])), error(lambda: x[zeros, zeros.repeat(2)[:3]]), sep="|")
print(error(torch.cuda.synchronize), error(lambda: x[zeros.float()]), sep="|")
"""
    lines, errors = run(program)
    first, second, third = lines[0].split("|")
    assert first == "IndexError: index 9 is out of bounds for dimension 0 with size 3"
    assert second.startswith("IndexError: Dimension out of range")
    assert third.startswith("IndexError: shape mismatch")
    assert lines[1].startswith("None|IndexError: tensors used as indices must be")
    assert "Assertion" not in errors


def test_a_dimension_without_elements_raises_at_the_op() -> None:
    lines, _ = run("print(error(lambda: x[:0].gather(0, bad[None])))")
    assert lines[0] in NAMES


def test_a_replay_of_a_graph_raises_the_same_error() -> None:
    program = """
index = torch.zeros_like(bad)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    x.index_select(0, index)
graph.replay()
index.fill_(7)
print(error(graph.replay), error(torch.cuda.synchronize), sep="|")
"""
    lines, errors = run(program)
    assert lines[0] in [f"None|{name}" for name in NAMES]
    assert "index_select: block: [0,0,0], thread: [0,0,0] Assertion `" in errors


@pytest.mark.slow
def test_compiled_code_raises_the_same_error() -> None:
    program = """
compiled = torch.compile(lambda table, index: table[index] * 2)
print(compiled(x, torch.zeros_like(bad)).sum().item())
first = error(lambda: compiled(x, bad))
print(first or error(torch.cuda.synchronize))
"""
    lines, errors = run(program)
    assert lines[0] == "8.0"
    assert lines[1] in NAMES, errors
    assert "Assertion" in errors


def test_backward_of_a_failed_forward_raises() -> None:
    program = """
table = torch.ones(3, 4, device="cuda", requires_grad=True)
looked_up = F.embedding(bad, table)
gradient = torch.ones(1, 4)
print(error(lambda: looked_up.backward(gradient.cuda())), error(looked_up.tolist), sep="|")
"""
    lines, _ = run(program)
    assert lines[0].split("|")[1] in NAMES
    assert lines[0].split("|")[0] in NAMES
