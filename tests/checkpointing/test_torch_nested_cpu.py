"""Cases from PyTorch's tests of nested checkpoints and higher derivatives, run with our checkpoints and with torch's."""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from accelerator import checkpointing
from accelerator.checkpointing.recomputation import EARLY_STOP_BYTES
from tests.support.checkpointing_cases import ALL_CHECKPOINTS, OURS, Checkpoint, leaf, none, torch_non_reentrant

all_checkpoints = pytest.mark.parametrize("ckpt", ALL_CHECKPOINTS, ids=["checkpoint", "non_reentrant", "torch"])
with_and_without_early_stop = pytest.mark.parametrize("early", [True, False], ids=["early stop", "no early stop"])
Function = Callable[[torch.Tensor], torch.Tensor]


def gradient_of(function: Function) -> Function:
    def gradient(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(function(x).sum(), x, create_graph=True)[0]

    return gradient


def survivors(function: Function) -> list[str]:
    """Return the nodes of a function's graph that are alive after the result was deleted."""
    alive: list[weakref.ref[Any]] = []

    class Mark:
        def __init__(self, name: str) -> None:
            self.name = name

    def nodes(root: Any) -> Iterator[Any]:
        recorded, left = {root}, collections.deque([root])
        while left:
            node = left.popleft()
            yield node
            for following, _ in node.next_functions:
                if following is not None and following not in recorded:
                    recorded.add(following)
                    left.append(following)

    def graph() -> None:
        for index, node in enumerate(nodes(function(leaf(1)).grad_fn)):
            mark = Mark(f"{index}: {node.name()}")
            node.metadata["mark"] = mark
            alive.append(weakref.ref(mark))

    graph()
    assert alive
    return [mark.name for each in alive if (mark := each()) is not None]


def chain(h: torch.Tensor) -> torch.Tensor:
    return h.sin().exp().sin()


def gradients_inside(h: torch.Tensor) -> torch.Tensor:
    first, second = h.sin().exp().sin(), h.sin().exp().sin()
    torch.autograd.grad(first.sum(), h)
    (gradient,) = torch.autograd.grad(second.sum(), h)
    return h.sin() * gradient.detach()


# Layers around a function, the innermost first: g takes the gradient, c adds a checkpoint. All items of a line have the same
# result.
NESTINGS = (
    ("", "c", "cc"),
    ("g", "cg", "ccg"),
    ("gg", "gcg", "cggc", "cgcg", "gcgc"),
    ("ggg", "cggcg", "cgcgcg", "gcgcgc"),
)


def nested(function: Function, layers: str, ckpt: Checkpoint) -> Function:
    def checkpointed(inner: Function) -> Function:
        return lambda h: ckpt(inner, h)

    for layer in layers:
        function = gradient_of(function) if layer == "g" else checkpointed(function)
    return function


@all_checkpoints
@with_and_without_early_stop
@pytest.mark.parametrize("function", [chain, gradients_inside])
@pytest.mark.parametrize("layers", NESTINGS, ids=" ".join)
def test_higher_derivatives_of_nested_checkpoints(
    ckpt: Checkpoint, early: bool, function: Function, layers: tuple[str, ...]
) -> None:
    x = leaf(3)
    expected = nested(function, layers[0], none)(x)
    with torch_checkpoint.set_checkpoint_early_stop(early):
        for each in layers[1:]:
            whole = nested(function, each, ckpt)
            torch.testing.assert_close(whole(x), expected, msg=each)
            assert survivors(whole) == [], each


@all_checkpoints
@with_and_without_early_stop
def test_two_checkpoints_inside_one(ckpt: Checkpoint, early: bool) -> None:
    def other(h: torch.Tensor) -> torch.Tensor:
        return h.cos().sin().exp()

    def inner(h: torch.Tensor) -> torch.Tensor:
        return ckpt(other, ckpt(chain, h))

    x = leaf(3, 3)
    expected = gradient_of(gradient_of(lambda h: other(chain(h))))(x)
    with torch_checkpoint.set_checkpoint_early_stop(early):
        assert survivors(nested(inner, "cg", ckpt)) == []
        for layers in ("cgg", "cgcg"):
            whole = nested(inner, layers, ckpt)
            torch.testing.assert_close(whole(x), expected)
            assert survivors(whole) == []


@all_checkpoints
@with_and_without_early_stop
def test_function_argument_and_text_result(ckpt: Checkpoint, early: bool) -> None:
    def function(scale: int, a: torch.Tensor, b: torch.Tensor, last: Function) -> Any:
        return last(scale * a * b.exp()), 1, "text"

    a, b = leaf(1), leaf(1, seed=1)
    with torch_checkpoint.set_checkpoint_early_stop(early):
        out, index, text = ckpt(function, 3, a, b, torch.sin)
    assert (index, text) == (1, "text")
    results = torch.autograd.grad(out, (a, b))
    assert results == torch.autograd.grad((3 * a * b.exp()).sin(), (a, b))


@all_checkpoints
@with_and_without_early_stop
@pytest.mark.parametrize("passed", [True, False])
def test_optional_tensor_keyword(ckpt: Checkpoint, early: bool, passed: bool) -> None:
    def function(h: torch.Tensor, factor: torch.Tensor | None = None) -> torch.Tensor:
        h = h.sin().exp()
        return (h if factor is None else h * factor).sin().exp().sum()

    x, keywords = leaf(), {"factor": leaf(seed=1)} if passed else {}
    inputs = (x, *keywords.values())
    with torch_checkpoint.set_checkpoint_early_stop(early):
        results = torch.autograd.grad(ckpt(function, x, **keywords), inputs)
    expected = torch.autograd.grad(function(x, **keywords), inputs)
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@all_checkpoints
@with_and_without_early_stop
def test_backward_runs_through_the_forward_graph(ckpt: Checkpoint, early: bool) -> None:
    calls: list[int] = []
    with torch_checkpoint.set_checkpoint_early_stop(early):
        out = ckpt(lambda h: h.sin().cos().sin(), leaf(1))
    out.grad_fn.next_functions[0][0].register_hook(lambda *gradients: calls.append(1))
    out.backward()
    assert calls == [1]


@all_checkpoints
@with_and_without_early_stop
def test_backward_inside_a_backward_hook(ckpt: Checkpoint, early: bool) -> None:
    a = leaf(1)

    def function(h: torch.Tensor) -> Any:
        middle = h.sin().cos()
        return middle, middle.sin()

    with torch_checkpoint.set_checkpoint_early_stop(early):
        middle, out = ckpt(function, a)
    # The inner backward does not run the node that has the hook.
    out.grad_fn.register_hook(lambda *gradients: middle.backward(retain_graph=True))
    out.backward(retain_graph=True)
    expected = torch.autograd.grad(a.sin().cos(), a)[0] + torch.autograd.grad(a.sin().cos().sin(), a)[0]
    torch.testing.assert_close(a.grad, expected)


class Sines(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.sin.default
        return func(*args, **(kwargs or {}))


@all_checkpoints
@with_and_without_early_stop
def test_early_stop_skips_the_last_operation(ckpt: Checkpoint, early: bool) -> None:
    runs: list[int] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return h.sin()

    with Sines() as mode:
        with torch_checkpoint.set_checkpoint_early_stop(early):
            out = ckpt(function, leaf(EARLY_STOP_BYTES // 4))
        out.sum().backward()
    assert (len(runs), mode.count) == (2, 1 if early else 2)


@all_checkpoints
def test_reading_a_saved_tensor_recomputes_each_time(ckpt: Checkpoint) -> None:
    runs: list[int] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        for unused in (h * h, h * h * h):
            assert unused.requires_grad
        return h.exp()

    x = leaf()
    out = ckpt(function, x)
    for index in (2, 3):
        assert torch.equal(out.grad_fn._saved_result, x.exp())
        assert len(runs) == index
    out.sum().backward()
    assert len(runs) == 4
    with pytest.raises(RuntimeError, match="freed"):
        out.grad_fn._saved_result  # noqa: B018
    assert len(runs) == 4


@all_checkpoints
def test_backward_reads_the_saved_tensor_object(ckpt: Checkpoint) -> None:
    read: list[torch.Tensor] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: torch.Tensor, constant: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(constant)
            return h.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            read.extend(ctx.saved_tensors)
            return gradients[0], None

    constant = leaf(seed=1).detach()
    ckpt(Keeps.apply, leaf(), constant).sum().backward()
    assert len(read) == 1
    assert read[0] is constant


@all_checkpoints
def test_function_under_no_grad(ckpt: Checkpoint, recwarn: pytest.WarningsRecorder) -> None:
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)

    def function(h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return second(first(h))  # type: ignore[no-any-return]

    x = leaf(2, 2)
    for index in range(3):
        out = ckpt(function, x)
        assert not out.requires_grad
        (out + x).sum().backward()
        assert torch.equal(x.grad, torch.full((2, 2), index + 1.0))
    assert first.weight.grad is None
    # There is no warning, because the argument requires a gradient.
    assert not [each for each in recwarn if "checkpoint" in str(each.message)]


@all_checkpoints
def test_weight_used_inside_and_outside_gets_one_gradient(ckpt: Checkpoint) -> None:
    weight, x = leaf(3, 3), leaf(3, 3, seed=1)
    calls: list[torch.Tensor] = []
    weight.register_hook(calls.append)
    ckpt(lambda h: weight * h, weight * x).sum().backward()
    assert len(calls) == 1
    torch.testing.assert_close(weight.grad, 2 * weight.detach() * x.detach())


@all_checkpoints
def test_dict_argument_and_result(ckpt: Checkpoint) -> None:
    layer, passed = nn.Linear(5, 5, bias=False), leaf(5, 5).detach()

    def function(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"result": layer(inputs["tensor"])}

    results = ckpt(function, {"tensor": passed})
    assert list(results) == ["result"]
    assert torch.equal(
        torch.autograd.grad(results["result"].sum(), layer.weight)[0],
        torch.autograd.grad(layer(passed).sum(), layer.weight)[0],
    )


@all_checkpoints
@pytest.mark.parametrize("container", [lambda *layers: nn.Sequential(*layers), lambda *layers: nn.ModuleList(layers)])
def test_a_model_in_segments(ckpt: Checkpoint, container: Any) -> None:
    torch.manual_seed(0)
    model = container(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2), nn.ReLU())

    def gradients(ckpt: Checkpoint) -> list[torch.Tensor]:
        x = leaf(1, 10)
        h = ckpt(nn.Sequential(*model[:3]), x)
        h = ckpt(nn.Sequential(*model[3:]), h)
        return [h.detach(), *torch.autograd.grad(h.sum(), [x, *model.parameters()])]

    assert all(torch.equal(*pair) for pair in zip(gradients(none), gradients(ckpt), strict=True))


@all_checkpoints
@pytest.mark.parametrize("inputs_need_gradients", [True, False])
def test_many_checkpoints_in_one_graph(ckpt: Checkpoint, inputs_need_gradients: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
    inputs = [leaf(1, 4, seed=seed).detach().requires_grad_(inputs_need_gradients) for seed in range(300)]
    parameters = list(model.parameters())

    def gradients(ckpt: Checkpoint) -> list[torch.Tensor]:
        mean = torch.stack([ckpt(model, each) for each in inputs]).mean()
        return list(torch.autograd.grad(mean, parameters + inputs * inputs_need_gradients))

    assert all(torch.equal(*pair) for pair in zip(gradients(none), gradients(ckpt), strict=True))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def recorded_by_contexts(ckpt: Checkpoint, x: torch.Tensor) -> tuple[list[str], list[str]]:
    """Return the operators that the contexts of the forward and of the recomputation record."""
    forward, again = Operators(), Operators()
    if ckpt is torch_non_reentrant:
        out = torch_checkpoint.checkpoint(torch.exp, x, use_reentrant=False, context_fn=lambda: (forward, again))
    else:
        checkpointing.configure(context_fn=lambda: (forward, again))
        out = ckpt(torch.exp, x)
    assert again.names == []
    out.sum().backward()
    return forward.names, again.names


@pytest.mark.parametrize("ckpt", OURS, ids=["checkpoint", "non_reentrant"])
def test_context_fn_runs_in_forward_and_recomputation(ckpt: Checkpoint) -> None:
    x = leaf()
    forward, again = recorded_by_contexts(ckpt, x)
    assert forward == ["exp.default"]
    assert again[0] == "exp.default"
    assert (forward, again) == recorded_by_contexts(torch_non_reentrant, x)


@all_checkpoints
@pytest.mark.skipif(not hasattr(torch_checkpoint, "GraphExecGroup"), reason="this torch has no groups of backwards")
def test_graph_exec_group_with_overlapping_backwards(ckpt: Checkpoint) -> None:
    runs: list[int] = []

    def function(h: torch.Tensor) -> Any:
        runs.append(1)
        middle = h.sin().cos()
        return middle, middle.sin().cos()

    for grouped, expected in ((True, 2), (False, 3)):
        runs.clear()
        x = leaf()
        middle, out = ckpt(function, x)

        def backwards(middle: torch.Tensor = middle, out: torch.Tensor = out, x: torch.Tensor = x) -> torch.Tensor:
            (at_middle,) = torch.autograd.grad(out.sum(), middle)
            return torch.autograd.grad(middle, x, at_middle)[0]

        if grouped:
            with torch_checkpoint.GraphExecGroup():
                results = backwards()
        else:
            results = backwards()
        assert len(runs) == expected
        torch.testing.assert_close(results, torch.autograd.grad(x.sin().cos().sin().cos().sum(), x)[0])
    out = ckpt(lambda h: h.sin().cos(), leaf()).sum()
    with torch_checkpoint.GraphExecGroup():
        out.backward(retain_graph=True)
        if ckpt is torch_non_reentrant:
            with pytest.raises(RuntimeError, match="overlap"):
                out.backward()
        else:
            # Ours recomputes a tensor that is unpacked twice.
            out.backward()


@all_checkpoints
def test_output_that_does_not_require_a_gradient(ckpt: Checkpoint) -> None:
    fixed, other = leaf().detach(), leaf(seed=1)
    out = ckpt(lambda a, b: a, fixed, other)
    assert out is fixed
    with pytest.raises(RuntimeError, match="does not require grad"):
        out.sum().backward()


@all_checkpoints
def test_checkpoint_works_after_an_error_in_backward(ckpt: Checkpoint) -> None:
    def fails(h: torch.Tensor) -> torch.Tensor:
        h = h.exp()
        h.register_hook(lambda gradient: exec("raise KeyError"))
        return h.sin()

    x = leaf()
    for _ in itertools.repeat(None, 2):
        with pytest.raises(KeyError):
            ckpt(fails, x).sum().backward()
        x.grad = None
        ckpt(torch.exp, x).sum().backward()
        assert torch.equal(x.grad, x.exp())
        x.grad = None
