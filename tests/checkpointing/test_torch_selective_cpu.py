"""Cases from PyTorch's tests of selective checkpoints, run with our checkpoints and with torch's."""

from __future__ import annotations

import functools
import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from accelerator import checkpointing
from accelerator.checkpointing.recomputation import EARLY_STOP_BYTES
from tests.support.checkpointing_cases import ALL_CHECKPOINTS, Checkpoint, leaf, selective, torch_non_reentrant

all_checkpoints = pytest.mark.parametrize("ckpt", ALL_CHECKPOINTS, ids=["checkpoint", "non_reentrant", "torch"])
MUST_SAVE = torch_checkpoint.CheckpointPolicy.MUST_SAVE
PREFER_RECOMPUTE = torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
aten = torch.ops.aten


def saves(operation: Any) -> Callable[..., Any]:
    """Return a policy that saves the results of one operation."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return MUST_SAVE if op is operation else PREFER_RECOMPUTE

    return policy


class Matmuls(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is aten.mm.default
        return func(*args, **(kwargs or {}))


# What to save, and whether that includes the product. The first three are equivalent.
WHAT: dict[str, tuple[Any, bool]] = {
    "list": ([aten.mm.default], True),
    "policy": (saves(aten.mm.default), True),
    "bool": (lambda context, op, *args, **kwargs: op is aten.mm.default, True),
    "empty list": ([], False),
    "another": (saves(aten.add.Tensor), False),
}


@all_checkpoints
@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("size", [4, 256])
def test_saved_op_is_not_recomputed(ckpt: Checkpoint, what: str, size: int) -> None:
    a, b = leaf(size, size), leaf(size, size, seed=1)

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.mm(a.cos(), b).sin().sum()

    expected = torch.autograd.grad(function(a, b), (a, b))
    chosen, save = WHAT[what]
    with Matmuls() as mode:  # the recomputation has the modes of its forward
        out = selective(ckpt, chosen, function, a, b)
        mode.count = 0
        results = torch.autograd.grad(out, (a, b))
    assert all(torch.equal(*pair) for pair in zip(expected, results, strict=True))
    # The gradients take two products. The recomputation takes another one if the product was not saved.
    assert mode.count == (2 if save else 3)


@all_checkpoints
def test_selective_gradient_without_future_warning(ckpt: Checkpoint, recwarn: pytest.WarningsRecorder) -> None:
    x = leaf()
    inner = lambda h: selective(ckpt, [aten.sin.default], lambda g: g.sin().exp().cos(), h)  # noqa: E731
    (expected,) = torch.autograd.grad(x.cos().sin().exp().cos().sum(), x)
    checkpointing.configure()
    results = torch.autograd.grad(inner(x.cos()).sum(), x)[0]
    assert torch.allclose(results, expected)
    assert not [each for each in recwarn if issubclass(each.category, FutureWarning)]


@all_checkpoints
def test_second_backward_raises(ckpt: Checkpoint) -> None:
    out = selective(ckpt, [aten.sin.default], lambda h: h.sin().exp().cos(), leaf()).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError):
        out.backward()


@all_checkpoints
@pytest.mark.parametrize("end", ["backward", "retained", "dropped"])
def test_saved_results_are_freed(ckpt: Checkpoint, end: str) -> None:
    recorded: list[weakref.ref[torch.UntypedStorage]] = []

    class Notes(TorchDispatchMode):
        """Records the storages of the results of exp. It is entered first, so it runs below the mode that saves."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is aten.exp.default:
                recorded.append(weakref.ref(result.untyped_storage()))
            return result

    function = lambda h: h.cos().exp().sin()  # noqa: E731
    gc.collect()
    gc.disable()
    try:
        with Notes():
            out = selective(ckpt, saves(aten.exp.default), function, leaf())
        checkpointing.configure()
        assert [each() is not None for each in recorded] == [True]
        if end == "dropped":
            del out
        else:
            out.sum().backward(retain_graph=end == "retained")
        assert [each() is None for each in recorded] == [True]
    finally:
        gc.enable()


@all_checkpoints
def test_saved_integer_view(ckpt: Checkpoint) -> None:
    indices, x = torch.tensor([1, 2, 3]), leaf(3)
    recorded, out = selective(ckpt, [aten.view.default], lambda n, h: (n.view(-1), h.sin().cos()), indices, x)
    out.sum().backward()
    assert recorded.tolist() == [1, 2, 3]
    torch.testing.assert_close(x.grad, torch.autograd.grad(x.sin().cos().sum(), x)[0])


def policy_calls(ckpt: Checkpoint, function: Callable[..., Any], size: int) -> tuple[list[Any], torch.Tensor]:
    """Return the calls of a policy, as pairs of op and whether it is a recomputation, and the gradient."""
    calls: list[Any] = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append((op, context.is_recompute))
        return MUST_SAVE if op is aten.var_mean.correction else PREFER_RECOMPUTE

    x = leaf(size)
    selective(ckpt, policy, function, x).backward()
    assert x.grad is not None
    return calls, x.grad


def variance_by_mean(h: torch.Tensor) -> torch.Tensor:
    # var_mean has two outputs.
    variance, mean = torch.var_mean(h)
    return variance * mean


@pytest.mark.parametrize("ckpt", ALL_CHECKPOINTS[:2], ids=["checkpoint", "non_reentrant"])
@pytest.mark.parametrize(
    "function", [lambda h: h.sin().cos().exp().sum(), variance_by_mean], ids=["three in a row", "two outputs"]
)
def test_policy_calls_equal_those_of_torch(ckpt: Checkpoint, function: Callable[..., Any]) -> None:
    # At this size our recomputation stops early, as torch's does.
    results, gradient = policy_calls(ckpt, function, EARLY_STOP_BYTES // 4)
    assert results == policy_calls(torch_non_reentrant, function, EARLY_STOP_BYTES // 4)[0]
    assert (aten.var_mean.correction if function is variance_by_mean else aten.exp.default, False) in results
    x = leaf(EARLY_STOP_BYTES // 4)
    torch.testing.assert_close(gradient, torch.autograd.grad(function(x), x)[0])


@all_checkpoints
@pytest.mark.parametrize("allowed", [False, True])
def test_in_place_edit_of_a_saved_result(ckpt: Checkpoint, allowed: bool) -> None:
    """If the edit is allowed, the recomputation edits the saved result again, so backward uses a wrong value, as in torch."""
    x = leaf()
    function = lambda h: h.sin().mul_(2).cos().exp()  # noqa: E731
    out = selective(ckpt, saves(aten.sin.default), function, x, allow_cache_entry_mutation=allowed).sum()
    if allowed:
        out.backward()
        assert x.grad is not None
        doubled_twice = 4 * x.detach().sin()
        expected = -2 * x.detach().cos() * doubled_twice.sin() * doubled_twice.cos().exp()
        torch.testing.assert_close(x.grad, expected)
    else:
        with pytest.raises(RuntimeError, match="mutated"):
            out.backward()


@all_checkpoints
def test_saved_op_with_a_non_tensor_output(ckpt: Checkpoint) -> None:
    calls: list[int] = []
    # The name is different in each case: torch forgets an op when an older op of the same name is collected.
    name = f"sine_and_two_{ALL_CHECKPOINTS.index(ckpt)}"
    with torch.library._scoped_library("accelerator_tests", "FRAGMENT"):

        @torch.library.custom_op(f"accelerator_tests::{name}", mutates_args=())
        def sine_and_two(h: torch.Tensor) -> tuple[torch.Tensor, int]:
            calls.append(1)
            return h.sin(), 2

        def keep(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> torch.Tensor:
            return gradient * ctx.saved_tensors[0].cos()

        sine_and_two.register_autograd(backward, setup_context=keep)

        operation = getattr(torch.ops.accelerator_tests, name).default

        def function(h: torch.Tensor) -> torch.Tensor:
            return (operation(h)[0] * h.sin().exp()).sin()

        x = leaf()
        out = selective(ckpt, [operation], function, x)
        (results,) = torch.autograd.grad(out.sum(), x)
        assert len(calls) == 1
        (expected,) = torch.autograd.grad(function(x).sum(), x)
    torch.testing.assert_close(results, expected)


class Sized(torch.Tensor):
    """A tensor that wraps another one. torch dispatches each query of its sizes as an operation."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Sized:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, inner.size(), inner.stride(), None, None, inner.dtype, inner.layout, inner.device, False,
            inner.requires_grad, "sizes",
        )  # fmt: skip

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped = torch.utils._pytree.tree_map_only(cls, lambda each: each.inner, args)
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, func(*unwrapped, **(kwargs or {})))


@all_checkpoints
def test_size_query_of_a_tensor_subclass_is_not_saved(ckpt: Checkpoint) -> None:
    x = leaf(4, 3)

    def function(h: Any) -> Any:
        flat = (h * h.sum()).view(-1).view(4, 3)
        assert list(flat.grad_fn._saved_self_sym_sizes) == [12]
        return flat.exp()

    selective(ckpt, saves(aten.sym_size.default), function, Sized(x)).sum().backward()


@all_checkpoints
@pytest.mark.parametrize("what", [[2], [torch.ops.aten.sin], 2], ids=["number", "packet", "no list"])
def test_non_ops_are_rejected(ckpt: Checkpoint, what: Any) -> None:
    with pytest.raises((ValueError, TypeError)) as refused:
        selective(ckpt, what, torch.sin, leaf())
    with pytest.raises(refused.type, match=re.escape(str(refused.value))):
        torch_checkpoint.create_selective_checkpoint_contexts(what)


def test_debug_determinism_check_is_rejected() -> None:
    contexts = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, [])
    with pytest.raises(ValueError, match="debug"):
        checkpointing.configure(context_fn=contexts, determinism_check="debug")
