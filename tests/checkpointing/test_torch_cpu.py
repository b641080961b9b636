"""Cases from PyTorch's tests of checkpoints, run with our checkpoints and with torch's.

The outcomes are the same unless a comment says otherwise.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from accelerator import checkpointing
from accelerator.checkpointing.recomputation import EARLY_STOP_BYTES
from tests.support.checkpointing_cases import (
    ALL_CHECKPOINTS,
    OURS,
    RESPECTS_EARLY_STOP,
    Checkpoint,
    leaf,
    none,
    torch_non_reentrant,
)

all_checkpoints = pytest.mark.parametrize("ckpt", ALL_CHECKPOINTS, ids=["checkpoint", "non_reentrant", "torch"])
ours = pytest.mark.parametrize("ckpt", OURS, ids=["checkpoint", "non_reentrant"])


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return h * torch.tensor(2.0)


@all_checkpoints
def test_only_checkpointed_modules_are_recomputed(ckpt: Checkpoint) -> None:
    modules = [Counted() for _ in range(6)]
    h = leaf()
    out = ckpt(nn.Sequential(*modules[:3]), h)
    for module in modules[3:]:
        out = module(out)
    assert [module.calls for module in modules] == [1] * 6
    out.sum().backward()
    assert [module.calls for module in modules] == [2, 2, 2, 1, 1, 1]


@all_checkpoints
def test_grad_with_create_graph(ckpt: Checkpoint) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 5), nn.ReLU(), nn.Linear(5, 2), nn.Tanh())
    x = leaf(1, 10)
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()], create_graph=True)
    results = torch.autograd.grad(ckpt(model, x).sum(), [x, *model.parameters()], create_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(expected, results, strict=True))
    assert all(
        torch.equal(*pair) for pair in zip(*(torch.autograd.grad(g[0].sum(), x) for g in (expected, results)), strict=True)
    )


@all_checkpoints
def test_recomputation_repeats_the_dropout_mask(ckpt: Checkpoint) -> None:
    before, inside = nn.Dropout(), nn.Dropout()

    def gradient(ckpt: Checkpoint) -> torch.Tensor:
        torch.manual_seed(5)
        x = leaf(2000)
        ckpt(lambda h: inside(h).sin(), before(x)).sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(none), gradient(ckpt))


@all_checkpoints
def test_non_tensor_arguments_and_results(ckpt: Checkpoint) -> None:
    def function(a: Any, b: Any, scale: Any, c: Any) -> Any:
        return scale, (a + b * c) * scale, None, True, (a * b + c) * scale, "text", a

    a, b, c = leaf(), leaf(seed=1), leaf(seed=2).detach()
    out = ckpt(function, a, b, 3, c)
    assert (out[0], out[2], out[3], out[5]) == (3, None, True, "text")
    assert out[6] is a
    (out[1] + out[4] + out[6]).sum().backward()
    expected = torch.autograd.grad(sum(function(a, b, 3, c)[i] for i in (1, 4, 6)).sum(), (a, b))
    assert torch.equal(a.grad, expected[0])
    assert torch.equal(b.grad, expected[1])
    with pytest.raises(RuntimeError, match="second time"):
        out[1].sum().backward()


@all_checkpoints
@pytest.mark.filterwarnings("ignore:Nothing in this checkpoint")
def test_function_without_tensors(ckpt: Checkpoint) -> None:
    assert ckpt(lambda a, b: (a + b, None), 1, 2) == (3, None)


@all_checkpoints
def test_only_some_inputs_need_gradients(ckpt: Checkpoint) -> None:
    a, b = leaf(), leaf(seed=1).detach()
    out = ckpt(lambda a, b: (a.sin(), b.sin()), a, b)
    assert not out[1].requires_grad
    out[0].sum().backward()
    assert torch.equal(a.grad, a.cos())


@all_checkpoints
def test_backward_frees_recomputed_tensors_one_by_one(ckpt: Checkpoint) -> None:
    inside: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            h = h**2
            inside.append(weakref.ref(h))
            h.register_hook(lambda g: alive.append(sum(each() is not None for each in inside[4:])))
        return h.sum()

    ckpt(function, leaf()).backward()
    assert alive == sorted(alive, reverse=True)
    assert len(alive) == 4


@all_checkpoints
def test_second_backward_recomputes_again(ckpt: Checkpoint) -> None:
    runs: list[int] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return h.sin().exp()

    out = ckpt(function, leaf()).sum()
    out.backward(retain_graph=True)
    out.backward()
    assert len(runs) == 3


@all_checkpoints
def test_a_parameter_used_inside_and_outside(ckpt: Checkpoint) -> None:
    weight = leaf()

    def gradients(ckpt: Checkpoint) -> list[torch.Tensor]:
        x = leaf(seed=1)
        out = ckpt(lambda h: h * weight, x)
        out = (ckpt(lambda h: (h * weight).sin(), out) * weight).sum()
        return list(torch.autograd.grad(out, (x, weight)))

    assert all(torch.equal(*pair) for pair in zip(gradients(none), gradients(ckpt), strict=True))


@all_checkpoints
def test_detached_output(ckpt: Checkpoint) -> None:
    layer = nn.Linear(4, 4)
    x = leaf(1, 4)
    out, other = ckpt(lambda h: (layer(h), layer(h).detach()), x)
    assert not other.requires_grad
    (out * other).sum().backward()
    assert layer.weight.grad is not None


@all_checkpoints
def test_backward_inside_the_function(ckpt: Checkpoint) -> None:
    def function(h: torch.Tensor) -> torch.Tensor:
        y = h.sin()
        y.sum().backward(retain_graph=True)
        assert h.grad is not None
        return y.cos() * h.grad.detach()

    def gradient(ckpt: Checkpoint) -> tuple[torch.Tensor, torch.Tensor]:
        x = leaf()
        out = ckpt(function, x)
        (results,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
        return out.detach(), results

    with torch_checkpoint.set_checkpoint_early_stop(True):
        output, results = gradient(ckpt)
        assert torch.equal(output, gradient(none)[0])
        # The recomputation adds to h.grad again, so the gradient is not that without a checkpoint.
        assert torch.equal(results, gradient(torch_non_reentrant)[1])


@all_checkpoints
@pytest.mark.parametrize("early", [True, False])
def test_autograd_grad_inside_the_function(ckpt: Checkpoint, early: bool) -> None:
    for retain in (True, False):

        def function(h: torch.Tensor, retain: bool = retain) -> torch.Tensor:
            y = h.sin().cos()
            (inside,) = torch.autograd.grad(y.sum(), h, retain_graph=retain)
            return h.cos() * inside * (y if retain else 1)

        x = leaf()
        (expected,) = torch.autograd.grad(function(x).sum(), x)
        with torch_checkpoint.set_checkpoint_early_stop(early):
            out = ckpt(function, x)
        (results,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(results, expected)


@all_checkpoints
def test_three_levels_of_nesting(ckpt: Checkpoint) -> None:
    def gradient(ckpt: Checkpoint) -> torch.Tensor:
        x = leaf()
        sin, exp = (lambda h: h.sin().cos()), (lambda h, *, k: h.exp().sin() * k)
        middle = lambda h: ckpt(sin, ckpt(lambda g: exp(g, k=2), h)) + ckpt(sin, h)  # noqa: E731
        return torch.autograd.grad(ckpt(lambda h: ckpt(middle, h).exp(), x).sum(), x)[0]

    assert torch.equal(gradient(none), gradient(ckpt))


@all_checkpoints
def test_repeated_backward_through_nested_checkpoints(ckpt: Checkpoint) -> None:
    x = leaf()
    inner = ckpt(lambda h: h.sin().exp(), x)
    outer = ckpt(lambda h: h.cos().sin() + ckpt(torch.exp, h), inner)
    torch.autograd.grad(outer.sum(), inner, retain_graph=True)
    (second,) = torch.autograd.grad(outer.sum(), x, retain_graph=True)
    outer.sum().backward()
    assert torch.equal(second, x.grad)


def counts(ckpt: Checkpoint, size: int) -> int:
    """Return how many times the function continued after its last saved tensor."""
    calls: list[int] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        h = h.sin().cos()
        calls.append(1)
        return h.clone()

    ckpt(function, torch.ones(size, requires_grad=True)).sum().backward()
    return len(calls)


SMALL, BIG = EARLY_STOP_BYTES // 4 - 1, EARLY_STOP_BYTES // 4


def test_tensor_size_decides_early_stop_by_default() -> None:
    # torch stops early for all sizes.
    assert [counts(torch_non_reentrant, size) for size in (SMALL, BIG)] == [1, 1]
    for ckpt in OURS:
        assert [counts(ckpt, size) for size in (SMALL, BIG)] == [2, 1]


@all_checkpoints
def test_set_checkpoint_early_stop_overrides_the_default(ckpt: Checkpoint) -> None:
    for size in (SMALL, BIG):
        with torch_checkpoint.set_checkpoint_early_stop(True):
            assert counts(ckpt, size) == (1 if RESPECTS_EARLY_STOP or ckpt is torch_non_reentrant or size == BIG else 2)
            with torch_checkpoint.set_checkpoint_early_stop(False):
                assert counts(ckpt, size) == 2


@all_checkpoints
def test_function_that_saves_no_tensor_is_not_recomputed(ckpt: Checkpoint) -> None:
    calls: list[int] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return h.clone()

    ckpt(function, leaf()).sum().backward()
    assert len(calls) == 1


@all_checkpoints
@pytest.mark.parametrize("change", ["more", "fewer", "shape", "dtype"])
@pytest.mark.parametrize("early", [None, False])
def test_different_recomputation_raises(ckpt: Checkpoint, change: str, early: bool | None) -> None:
    if change == "more" and early is None:
        # torch stops early by default, so it does not detect further tensors. The next test covers the default of ours.
        early = False
    runs: list[int] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        again = len(runs) > 1
        if change == "more":
            return h.sin().exp() if again else h.sin()
        if change == "fewer":
            return h.sin() if again else h.sin().exp()
        if change == "shape":
            return (h[:2] if again else h).sin().sum()
        return (h.double() if again else h).sin().sum()

    with torch_checkpoint.set_checkpoint_early_stop(early):  # type: ignore[arg-type]
        out = ckpt(function, leaf()).sum()
    with pytest.raises(torch_checkpoint.CheckpointError):
        out.backward()


@ours
def test_additional_saved_tensor_raises_by_default(ckpt: Checkpoint) -> None:
    runs: list[int] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return h.sin() if len(runs) == 1 else h.sin().exp()

    with pytest.raises(torch_checkpoint.CheckpointError, match="saved 1 tensors in forward, but 2"):
        ckpt(function, leaf()).sum().backward()


@all_checkpoints
def test_debug_error_lists_the_operations(ckpt: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    # Older torches log records that only torch's own handler can format. pytest's handler would fail.
    monkeypatch.setattr("_pytest.logging.LogCaptureHandler.emit", lambda handler, record: None)
    runs: list[int] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return h.sin().exp() if len(runs) == 1 else h.cos()

    with torch_checkpoint.set_checkpoint_debug_enabled(True):
        out = ckpt(function, leaf()).sum()
    with pytest.raises(torch_checkpoint.CheckpointError) as caught:
        out.backward()
    text = str(caught.value)
    assert "aten.sin" in text
    assert "aten.cos" in text


@all_checkpoints
def test_context_fn_that_suppresses_exceptions(ckpt: Checkpoint) -> None:
    if ckpt is torch_non_reentrant and torch.__version__ < "2.13":
        # Its hooks would stay active as long as the exception is alive, and pytest keeps the exception.
        pytest.skip("torch before 2.13 does not leave its contexts when the function raises")

    class Swallows:
        def __enter__(self) -> None: ...

        def __exit__(self, *exc: object) -> bool:
            return True

    def fails(h: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    def contexts() -> Any:
        return Swallows(), Swallows()

    checkpointing.configure(context_fn=contexts)
    with pytest.raises((RuntimeError, UnboundLocalError)):
        if ckpt is torch_non_reentrant:
            torch_checkpoint.checkpoint(fails, leaf(), use_reentrant=False, context_fn=contexts)
        else:
            ckpt(fails, leaf())


@all_checkpoints
@pytest.mark.skipif(not hasattr(torch_checkpoint, "GraphExecGroup"), reason="this torch has no groups of backwards")
def test_graph_exec_group_recomputes_once(ckpt: Checkpoint) -> None:
    runs: list[int] = []

    def function(a: torch.Tensor, b: torch.Tensor) -> Any:
        runs.append(1)
        return a.sin().exp(), b.cos().exp()

    a, b = leaf(), leaf(seed=1)
    one, two = ckpt(function, a, b)
    with torch_checkpoint.GraphExecGroup():
        one.sum().backward()
        two.sum().backward()
    assert len(runs) == 2
    assert torch.equal(a.grad, torch.autograd.grad(a.sin().exp().sum(), a)[0])
    assert torch.equal(b.grad, torch.autograd.grad(b.cos().exp().sum(), b)[0])


def unpacked_twice(ckpt: Checkpoint) -> tuple[int, torch.Tensor]:
    runs: list[int] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(h)
            return h.exp()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            (once,), (twice,) = ctx.saved_tensors, ctx.saved_tensors
            return gradients[0] * (once.exp() + twice.exp()) / 2

    def function(h: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return Twice.apply(h.sin())  # type: ignore[no-any-return, no-untyped-call]

    x = leaf()
    ckpt(function, x).sum().backward()
    assert x.grad is not None
    return len(runs), x.grad


def test_a_tensor_unpacked_twice_is_recomputed_twice() -> None:
    # torch raises an error.
    with pytest.raises(torch_checkpoint.CheckpointError, match="unpacked once"):
        unpacked_twice(torch_non_reentrant)
    for ckpt in OURS:
        runs, gradient = unpacked_twice(ckpt)
        assert runs == 3
        assert torch.allclose(gradient, unpacked_twice(none)[1])


@all_checkpoints
def test_backward_in_another_thread(ckpt: Checkpoint) -> None:
    def gradient(ckpt: Checkpoint) -> torch.Tensor:
        torch.manual_seed(0)
        x = leaf()
        out = ckpt(lambda h: torch.nn.functional.dropout(h, 0.5).sin().exp(), x)
        thread = threading.Thread(target=lambda: out.sum().backward())
        thread.start()
        thread.join(60)
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(ckpt), gradient(none))
