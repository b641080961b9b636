"""A forked child cannot use the parent's GPU: ops that write device memory raise, and the parent's memory stays as it was.

The cases are the calls of PyTorch's operator database that write: in place, with ``out=``, over lists, of indices, copies,
random numbers and fused optimizers.
"""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

from tests.programs import in_child
from tests.simulation.ops import operators

pytestmark = pytest.mark.xdist_group("operators")

BAD_FORK = re.compile("Cannot re-initialize CUDA in forked subprocess|initialization error")
# In place, these change only sizes and strides, which are the child's own.
CHANGES_NO_MEMORY = {
    *("as_strided", "as_strided.partial_views", "resize_", "resize_as_", "squeeze", "squeeze.multiple", "swapaxes", "swapdims"),
    *("t", "transpose", "unsqueeze"),
}


class Case(NamedTuple):
    """A call that writes tensors of the GPU, which are all of ``tensors``."""

    name: str
    call: Callable[[], Any]
    tensors: list[torch.Tensor]


def first_sample(op: Any) -> Any:
    """Return an entry's first sample on the GPU that has a tensor with elements, or None."""
    dtype = operators.dtype_of(op)
    if dtype is None:
        return None
    for sample in op.sample_inputs("cpu", dtype):
        there = copy.copy(sample)
        there.input, there.args, there.kwargs = operators._to((sample.input, sample.args, sample.kwargs), "cuda")
        if any(tensor.numel() for tensor in operators._tensors(there.input)):
            return there
    return None


def in_place(name: str, op: Any, sample: Any) -> Iterator[Case]:
    inputs = (sample.input, *sample.args), sample.kwargs
    if op.inplace_variant is not None and name not in CHANGES_NO_MEMORY:
        yield Case(
            f"{name} in place",
            lambda: op.inplace_variant(sample.input, *sample.args, **sample.kwargs),
            operators._tensors(inputs),
        )


def with_out(name: str, op: Any, sample: Any) -> Iterator[Case]:
    if not op.supports_out:
        return
    try:
        result = op(sample.input, *sample.args, **sample.kwargs)
    except RuntimeError:  # not supported on the GPU
        return
    if isinstance(result, torch.Tensor):
        out: Any = result.detach().clone()
    elif isinstance(result, tuple) and all(isinstance(item, torch.Tensor) for item in result):
        out = tuple(item.detach().clone() for item in result)
    else:
        return
    tensors = operators._tensors((out, sample.input, sample.args, sample.kwargs))
    yield Case(f"{name} out=", lambda: op(sample.input, *sample.args, **sample.kwargs, out=out), tensors)


def over_lists(step: int) -> Iterator[Case]:
    database = operators.database()
    lists = [getattr(database, name) for name in vars(database) if re.fullmatch(r"foreach_\w+_op_db", name)]
    for op in [op for ops in lists for op in ops][::step]:
        sample = first_sample(op)
        if sample is not None and op.inplace_variant is not None:
            for case in in_place(op.name, op, sample):
                yield case._replace(name=f"{op.name} over a list")


def fused_optimizers() -> Iterator[Case]:
    for name in ("Adam", "AdamW", "SGD", "Adagrad"):
        parameters = [torch.ones(5, device="cuda").requires_grad_() for _ in range(3)]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        try:
            optimizer = getattr(torch.optim, name)(parameters, lr=0.1, fused=True)
            optimizer.step()
        except RuntimeError:  # older torch
            continue
        state = operators._tensors([list(values.values()) for values in optimizer.state.values()])
        yield Case(f"fused {name}", optimizer.step, [*parameters, *state])


def indices_copies_and_random_numbers() -> Iterator[Case]:
    x, y = torch.ones(6, device="cuda"), torch.zeros(6, device="cuda")
    on_host, transposed = torch.ones(6), torch.zeros(2, 3, device="cuda").t()
    index, mask = torch.tensor([0, 2], device="cuda"), torch.tensor([True, False] * 3, device="cuda")
    calls: dict[str, Callable[[], Any]] = {
        "index": lambda: x.__setitem__(index, 5.0),
        "mask": lambda: x.__setitem__(mask, 5.0),
        "slice": lambda: x.__setitem__(slice(1, 3), 5.0),
        "number": lambda: x.__setitem__(0, 5.0),
        "index_put_": lambda: x.index_put_((index,), y[:2], accumulate=True),
        "copy of the host": lambda: x.copy_(on_host),
        "copy on the GPU": lambda: x.copy_(y),
        "copy to other strides": lambda: transposed.copy_(x.view(3, 2)),
        "copy of another type": lambda: x.copy_(mask),
        "conj_physical_": lambda: x.conj_physical_(),
        "set_data": lambda: setattr(x, "data", y + 1),
        "dropout in place": lambda: torch.nn.functional.dropout(x, inplace=True),
        **{
            f"{name}_": lambda name=name, arguments=arguments: getattr(x, f"{name}_")(*arguments)  # type: ignore[misc]
            for name, arguments in (
                *(("bernoulli", ()), ("cauchy", ()), ("exponential", ()), ("geometric", (0.5,)), ("log_normal", ())),
                *(("normal", ()), ("random", ()), ("uniform", ())),
            )
        },
    }
    return (Case(name, call, [x, y, transposed, index, mask]) for name, call in calls.items())


def cases(step: int) -> list[Case]:
    """Return the calls of each ``step``-th operator and of more of those over lists, and all others."""
    found: list[Case] = []
    for name, op in [*operators.entries().items()][::step]:
        if not name.startswith("jiterator") and (op.inplace_variant is not None or op.supports_out):
            for make in (in_place, with_out):
                sample = first_sample(op)
                found += make(name, op, sample) if sample is not None else ()
    return [*found, *over_lists(-(-step // 6)), *fused_optimizers(), *indices_copies_and_random_numbers()]


def runs(case: Case) -> bool:
    """Return whether a call succeeds in the parent, so that only the fork can be why it fails in the child."""
    try:
        case.call()
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


def outcome(case: Case) -> str:
    """Return what a call does in the child if it does not raise the error of a bad fork, else an empty text."""
    try:
        case.call()
    except Exception as error:
        return "" if BAD_FORK.search(str(error)) else f"{type(error).__name__}: {error}"
    return "no error"


def raise_if_a_call_succeeds(chosen: list[Case]) -> None:
    torch.set_num_threads(1)  # a child has none of the parent's threads, for which a kernel that computes would wait
    assert {case.name: result for case in chosen if (result := outcome(case))} == {}


def contents(chosen: list[Case]) -> list[list[torch.Tensor]]:
    return [[tensor.detach().cpu().clone() for tensor in case.tensors] for case in chosen]


# Without the slow tests, a part of the cases.
@pytest.mark.parametrize("step", [pytest.param(1, marks=[pytest.mark.slow, pytest.mark.exhaustive]), 36])
@torch.no_grad()
def test_no_call_writes_the_memory_of_the_parent(step: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # An op's first call takes another way than the later ones.
        chosen = [case for case in cases(step) if runs(case)]
        names = {case.name for case in chosen}
        assert len(names) > 400 / step
        if step == 1:
            assert {"add in place", "mm out=", "index_add in place", "_foreach_add over a list"} <= names
        assert "fused AdamW" in names
        assert sum(name.endswith("over a list") for name in names) > 40 / step
        before = contents(chosen)
        in_child(lambda: raise_if_a_call_succeeds(chosen))
        after = contents(chosen)
    changed = [
        case.name for case, *states in zip(chosen, before, after, strict=True) if operators._same(*states, torch.float64)
    ]
    assert changed == []


@torch.no_grad()
def test_first_call_of_an_op_in_the_child() -> None:
    x = torch.ones(3, device="cuda")

    def call() -> None:
        with pytest.raises(RuntimeError, match=BAD_FORK):
            x.sinc_()

    in_child(call)
    assert x.tolist() == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_child_of_a_parent_that_captures() -> None:
    """The child raises also while the parent takes the slow way for another reason."""
    x = torch.ones(3, device="cuda")
    x.add_(0)

    def call() -> None:
        with pytest.raises(RuntimeError, match=BAD_FORK):
            x.add_(1)

    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        in_child(call)
    assert x.tolist() == [1, 1, 1]


def test_grandchild() -> None:
    x = torch.ones(3, device="cuda")
    x.add_(0)

    def call() -> None:
        with pytest.raises(RuntimeError, match=BAD_FORK):
            x.add_(1)

    in_child(lambda: in_child(call))
    assert x.tolist() == [1, 1, 1]


def test_ops_of_the_cpu_work_in_the_child() -> None:
    torch.ones(3, device="cuda")
    host = torch.ones(3)

    def call() -> None:
        assert host.add_(1).tolist() == [2, 2, 2]
        assert os.getpid() != os.getppid()

    in_child(call)
