"""Tests of both checkpoint functions. The same cases run without checkpoints and with torch's checkpoint."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from accelerator import checkpointing
from accelerator.checkpointing import bindings
from tests.support import plain_environment, run
from tests.support.checkpointing_cases import (
    ALL_CHECKPOINTS,
    CASES,
    OURS,
    RESPECTS_EARLY_STOP,
    UNSUPPORTED_BY_TORCH,
    Block,
    Checkpoint,
    Pair,
    none,
    torch_non_reentrant,
    x,
)


@pytest.mark.parametrize("ckpt", ALL_CHECKPOINTS, ids=["checkpoint", "non_reentrant", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_values_equal_no_checkpointing(name: str, ckpt: Checkpoint) -> None:
    if ckpt is torch_non_reentrant and name in UNSUPPORTED_BY_TORCH:
        pytest.skip("torch's own does not take this")
    expected, results = CASES[name](none), CASES[name](ckpt)
    assert len(expected) == len(results)
    for one, other in zip(expected, results, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", CASES)
def test_values_equal_if_torch_does_not_report_hooks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = CASES[name](none)
    monkeypatch.setattr(bindings, "innermost_hooks", None)
    assert all(torch.equal(one, other) for one, other in zip(expected, CASES[name](checkpointing.checkpoint), strict=True))


@pytest.mark.parametrize("ckpt", OURS)
def test_output_types_are_kept(ckpt: Checkpoint) -> None:
    a = x()
    for make in (
        lambda a: None,
        lambda a: {"a": a.sin(), "n": None},
        lambda a: [a.sin()],
        lambda a: (a.sin(),),
        lambda a: Pair(a.sin(), 1),
        lambda a: (a.sin(), "text", None),
    ):
        expected, out = make(a), ckpt(make, a)
        assert type(out) is type(expected)
        if expected is not None:
            assert len(out) == len(expected)


def test_all_keywords_go_to_the_function() -> None:
    received: dict[str, Any] = {}

    def function(a: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        received.update(kwargs)
        return a.sin()

    checkpointing.checkpoint(function, x(), use_reentrant=1, preserve_rng_state=2, function=3, context_fn=4, debug=5)
    assert received == {"use_reentrant": 1, "preserve_rng_state": 2, "function": 3, "context_fn": 4, "debug": 5}


def test_function_gets_the_same_tensor_objects() -> None:
    a, received = x(), []

    def function(item: torch.Tensor) -> torch.Tensor:
        received.append(item)
        return item.sin().cos()

    checkpointing.checkpoint(function, a).sum().backward()
    assert len(received) == 2
    assert all(item is a for item in received)


def test_recomputation_ignores_a_later_list_edit() -> None:
    a, items = x(), [1.0]
    out = checkpointing.checkpoint(lambda a, items: a.sin() * items[0], a, items)
    items[0] = 5.0
    out.sum().backward()
    assert torch.equal(a.grad, a.cos())


@pytest.mark.parametrize("ckpt", OURS)
def test_bypass_without_grad(ckpt: Checkpoint) -> None:
    a = x()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            out = ckpt(lambda a: a.sin(), a)
            assert not out.requires_grad
            assert torch.equal(out, a.sin())


@pytest.mark.parametrize("ckpt", OURS)
def test_warns_if_nothing_requires_a_gradient(ckpt: Checkpoint) -> None:
    with pytest.warns(UserWarning, match="nothing in this checkpoint requires a gradient") as caught:
        ckpt(lambda a: a.sin(), torch.ones(2))
    assert caught[0].filename == __file__


@pytest.mark.parametrize("ckpt", OURS)
def test_no_warning_if_something_requires_a_gradient(ckpt: Checkpoint, recwarn: pytest.WarningsRecorder) -> None:
    layer = nn.Linear(2, 2)
    ckpt(layer, torch.ones(1, 2)).sum().backward()
    ckpt(lambda a: a + 1, torch.ones(1, requires_grad=True))
    ckpt(lambda a: None, torch.ones(1, requires_grad=True))
    assert layer.weight.grad is not None
    assert not [w for w in recwarn if "checkpoint" in str(w.message)]


def counted(ckpt: Checkpoint, early: bool = True) -> int:
    runs = []

    def function(a: torch.Tensor) -> torch.Tensor:
        a = a.sin().exp()
        runs.append(1)
        return a + 1

    a = x()
    with torch_checkpoint.set_checkpoint_early_stop(early):
        out = ckpt(function, a)
    out.sum().backward()
    assert torch.equal(a.grad, a.cos() * a.sin().exp())
    return len(runs)


@pytest.mark.parametrize("ckpt", ALL_CHECKPOINTS, ids=["checkpoint", "non_reentrant", "torch"])
def test_early_stop(ckpt: Checkpoint) -> None:
    # If our checkpoint ignores the switch, it does not stop early, because the tensors are small.
    assert counted(ckpt) == (1 if RESPECTS_EARLY_STOP or ckpt is torch_non_reentrant else 2)
    assert counted(ckpt, early=False) == 2


@pytest.mark.parametrize("early", [True, False])
def test_early_stop_is_not_caught_by_the_function(early: bool) -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        try:
            return a.sin().exp()
        except Exception:
            return a

    a = x()
    with torch_checkpoint.set_checkpoint_early_stop(early):
        checkpointing.checkpoint(function, a).sum().backward()
    assert torch.equal(a.grad, a.cos() * a.sin().exp())


@pytest.mark.parametrize("early", [True, False])
def test_early_stop_works_if_the_function_catches_it(early: bool) -> None:
    attempts = []

    def function(a: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            attempts.append(early)
            try:
                return a.sin().exp()
            except BaseException:
                pass
        return a

    a = x()
    with torch_checkpoint.set_checkpoint_early_stop(early):
        checkpointing.checkpoint(function, a).sum().backward()
    assert torch.equal(a.grad, a.cos() * a.sin().exp())
    assert len(attempts) == (3 if early and RESPECTS_EARLY_STOP else 2)


@pytest.mark.parametrize("ckpt", ALL_CHECKPOINTS, ids=["checkpoint", "non_reentrant", "torch"])
@pytest.mark.parametrize("change", ["shape", "dtype", "fewer"])
def test_a_different_recomputation_is_an_error(ckpt: Checkpoint, change: str) -> None:
    runs = []

    def function(a: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if len(runs) == 1:
            return a.sin().exp().cos().sum()
        if change == "shape":
            return a[:1].sin().exp().cos().sum()
        if change == "dtype":
            return a.double().sin().exp().cos().sum().float()
        return a.sin().sum()

    out = ckpt(function, x())
    with pytest.raises(torch_checkpoint.CheckpointError):
        out.backward()


def test_determinism_check_none_accepts_different_metadata() -> None:
    runs = []

    def function(a: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return (a if len(runs) == 1 else a.double()).sin().float()

    checkpointing.configure(determinism_check="none")
    checkpointing.checkpoint(function, x()).sum().backward()
    assert len(runs) == 2


def test_debug_detects_different_values() -> None:
    runs = []

    def function(a: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return (a * len(runs)).sin().exp()

    checkpointing.configure(determinism_check="debug")
    with pytest.raises(torch_checkpoint.CheckpointError, match="digest"):
        checkpointing.checkpoint(function, x()).sum().backward()
    runs.clear()
    a = x()
    checkpointing.checkpoint(lambda a: a.sin().exp(), a).sum().backward()
    assert a.grad is not None


def test_debug_compares_conjugates() -> None:
    """A conjugate is a lazy view. It has no bytes to compare until torch computes it."""
    runs: list[int] = []

    def square(a: torch.Tensor) -> torch.Tensor:
        return (a.conj() * a.conj()).real.sum()

    def function(a: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return square(a * len(runs))

    checkpointed, plain = (torch.tensor([1 + 1j, 2 - 3j], requires_grad=True) for _ in range(2))
    checkpointing.configure(determinism_check="debug")
    checkpointing.checkpoint(square, checkpointed).backward()
    square(plain).backward()
    assert torch.equal(checkpointed.grad, plain.grad)
    with pytest.raises(torch_checkpoint.CheckpointError, match="digest"):
        checkpointing.checkpoint(function, checkpointed).backward()


def test_debug_ignores_statistics_edited_by_the_function() -> None:
    checkpointing.configure(determinism_check="debug")
    norm, a = nn.BatchNorm1d(8), x()
    checkpointing.checkpoint(lambda a: norm(a.sin()).exp(), a).sum().backward()
    assert a.grad is not None


@pytest.mark.parametrize("create_graph", [False, True])
def test_debug_ignores_statistics_if_the_function_calls_backward(create_graph: bool) -> None:
    checkpointing.configure(determinism_check="debug")

    def gradient_penalty(ckpt: Checkpoint) -> list[torch.Tensor | None]:
        norm, a = nn.BatchNorm1d(8), x()

        def function(b: torch.Tensor) -> torch.Tensor:
            out = norm(b).sin()
            (gradient,) = torch.autograd.grad(out.exp().sum(), b, retain_graph=True, create_graph=create_graph)
            return out.sum() + gradient.square().sum()

        out = ckpt(function, a)
        out.backward()
        return [out, a.grad, norm.weight.grad]

    torch.testing.assert_close(gradient_penalty(checkpointing.checkpoint), gradient_penalty(none))


def test_debug_detects_state_edited_outside_the_function() -> None:
    checkpointing.configure(determinism_check="debug")
    norm = nn.BatchNorm1d(8).eval()
    out = checkpointing.checkpoint(lambda a: norm(a.sin()).exp(), x()).sum()
    assert norm.running_mean is not None
    norm.running_mean.add_(1)
    with pytest.raises(torch_checkpoint.CheckpointError, match="digest"):
        out.backward()


@pytest.mark.parametrize("ckpt", ALL_CHECKPOINTS, ids=["checkpoint", "non_reentrant", "torch"])
def test_context_fn_with_debug_enabled_raises(ckpt: Checkpoint) -> None:
    def contexts() -> tuple[Any, Any]:
        return contextlib.nullcontext(), contextlib.nullcontext()

    checkpointing.configure(context_fn=contexts)
    options = {"use_reentrant": False, "context_fn": contexts} if ckpt is torch_non_reentrant else {}
    run = torch_checkpoint.checkpoint if ckpt is torch_non_reentrant else ckpt
    message = "debug=True is incompatible with non-default context_fn"
    with torch_checkpoint.set_checkpoint_debug_enabled(True), pytest.raises(ValueError, match=message):
        run(torch.sin, x(), **options)


@pytest.mark.parametrize("ckpt", ALL_CHECKPOINTS, ids=["checkpoint", "non_reentrant", "torch"])
def test_in_place_edit_of_an_argument_is_an_error(ckpt: Checkpoint) -> None:
    a = x() * 1
    out = ckpt(lambda a: a.sin().exp(), a)
    a.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_in_place_edit_of_a_nested_argument_is_an_error() -> None:
    a = x() * 1
    out = checkpointing.checkpoint(lambda a: a[0]["a"].sin().exp(), [{"a": a}])
    a.add_(1)
    # torch 2.6 does not report the active hooks. There autograd saves the arguments, and its error does not name them.
    which = r"argument 0\[0\]\['a'\]" if bindings.innermost_hooks else ""
    with pytest.raises(RuntimeError, match="modified by an inplace operation.*" + which):
        out.sum().backward()


def test_in_place_edit_of_an_intermediate_is_an_error() -> None:
    # torch's checkpoint does not detect this edit and returns wrong gradients.
    def function(a: torch.Tensor) -> torch.Tensor:
        b = a.sin()
        c = b.cos()
        b.add_(1)
        return c.exp() * b

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        checkpointing.checkpoint(function, x()).sum().backward()


def test_in_place_edit_by_the_function_raises_without_leak() -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return a.sin().exp()

    a = x() * 1
    out = checkpointing.checkpoint(function, a)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    reference = weakref.ref(a)
    del a, out
    assert reference() is None


@pytest.mark.parametrize("ckpt", OURS)
def test_exception_in_forward(ckpt: Checkpoint) -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        torch.rand(1)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        ckpt(function, x())
    # The checkpoint has removed its hooks.
    a = x()
    a.sin().sum().backward()
    assert torch.equal(a.grad, a.cos())


@pytest.mark.parametrize("ckpt", ALL_CHECKPOINTS, ids=["checkpoint", "non_reentrant", "torch"])
def test_exception_in_the_recomputation(ckpt: Checkpoint) -> None:
    runs = []

    def function(a: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        a = torch.nn.functional.dropout(a, 0.5)
        if len(runs) == 2:
            raise ValueError("mine")
        return a.sin().exp()

    a = x()
    out = ckpt(function, a)
    torch.rand(3)
    before = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(ValueError, match="mine"):
            out.sum().backward(retain_graph=True)
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()
    # Another backward can recompute the same checkpoint.
    out.sum().backward()
    assert a.grad is not None


def test_preserve_rng_state_can_be_disabled() -> None:
    checkpointing.configure(preserve_rng_state=False)
    torch.manual_seed(0)
    out = checkpointing.checkpoint(lambda a: torch.nn.functional.dropout(a, 0.5).exp(), x())
    before = torch.get_rng_state()
    out.sum().backward()
    assert not torch.equal(torch.get_rng_state(), before)


def test_saved_tensors_read_twice_in_one_backward() -> None:
    class Reader(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(h)
            return h * 2

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            (once,), (twice,) = ctx.saved_tensors, ctx.saved_tensors
            assert torch.equal(once, twice)
            return gradients[0] * 2

    a = x()
    checkpointing.checkpoint(lambda a: Reader.apply(a.sin()), a).sum().backward()
    assert torch.equal(a.grad, a.cos() * 2)


def test_saved_tensor_read_outside_of_backward() -> None:
    a = x()
    out = checkpointing.checkpoint(lambda a: a.sin().exp(), a)
    assert torch.equal(out.grad_fn._saved_result, a.sin().exp())
    out.sum().backward()
    assert a.grad is not None


def test_intermediates_and_inputs_are_freed() -> None:
    inside: list[weakref.ref[torch.Tensor]] = []

    def function(a: torch.Tensor) -> torch.Tensor:
        b = a.sin()
        inside.append(weakref.ref(b))
        return b.exp() * 2

    gc.disable()
    try:
        h = x() * 1
        reference = weakref.ref(h)
        out = checkpointing.checkpoint(function, h)
        assert inside[0]() is None
        del h
        assert reference() is not None
        out.sum().backward()
        assert inside[1]() is None
        assert reference() is None
        # The graph may also be deleted without a backward.
        h = x() * 1
        reference = weakref.ref(h)
        out = checkpointing.checkpoint(function, h)
        del h, out
        assert reference() is None
    finally:
        gc.enable()


def test_nested_checkpoints_keep_only_the_outermost_inputs() -> None:
    boundary: list[weakref.ref[torch.Tensor]] = []

    def outer(a: torch.Tensor) -> torch.Tensor:
        b = a.sin()
        boundary.append(weakref.ref(b))
        return checkpointing.checkpoint(lambda b: b.exp().cos(), b)

    out = checkpointing.checkpoint(outer, x())
    assert boundary[0]() is None
    out.sum().backward()


def test_concurrent_threads_have_correct_gradients() -> None:
    torch.manual_seed(0)
    block = Block(dropout=0.0)
    inputs = [x(seed=i) for i in range(8)]
    expected = [torch.autograd.grad(block(item).sum(), item)[0] for item in inputs]
    results: dict[int, torch.Tensor] = {}

    def work(i: int) -> None:
        mine = copy.deepcopy(inputs[i].detach()).requires_grad_()
        for _ in range(10):
            results[i] = torch.autograd.grad(checkpointing.checkpoint(block, mine).sum(), mine)[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(results[i], expected[i]) for i in range(8))


def test_concurrent_backwards_on_one_graph() -> None:
    a = x(64, 64)
    out = checkpointing.checkpoint(lambda a: a.sin().exp().cos(), a)
    expected = torch.autograd.grad(a.sin().exp().cos().sum(), a)[0]
    results: list[torch.Tensor] = []
    threads = [
        threading.Thread(target=lambda: results.append(torch.autograd.grad(out.sum(), a, retain_graph=True)[0]))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 6
    assert all(torch.equal(each, expected) for each in results)


def test_disabled_saved_tensor_hooks_raise() -> None:
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"), pytest.raises(RuntimeError, match="not here"):
        checkpointing.checkpoint(lambda a: a.sin(), x())


def test_import_does_not_import_dynamo() -> None:
    run("import torch\nimport sys, accelerator.checkpointing; assert 'torch._dynamo' not in sys.modules", plain_environment())
