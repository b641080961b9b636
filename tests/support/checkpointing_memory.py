"""Functions that keep intermediates, and long series of checkpoints, for the tests of memory and values."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from accelerator import checkpointing
from tests.support import sample

Checkpoint = Callable[..., Any]
_T = TypeVar("_T")

# Iterations of two checkpoints each.
MANY = 300


def modes(checkpoints: int) -> dict[str, dict[str, Any]]:
    """Return the settings of each combination of features, with buffers for a number of checkpoints."""
    partition, cpu = {"partition_activations": True}, {"checkpoint_in_cpu": True}
    contiguous = {**partition, "contiguous_checkpointing": True, "num_checkpoints": checkpoints}
    return {
        "plain": {},
        "partition": partition,
        "cpu": cpu,
        "partition+cpu": {**partition, **cpu},
        "contiguous": contiguous,
        "contiguous+cpu": {**contiguous, **cpu},
    }


MODES = modes(2)
# For tests that take seconds: the simplest mode and the one that combines all features. The others are slow tests.
SOME_MODES = sample(MODES, "plain", "contiguous+cpu")


def allocated() -> int:
    """Return the bytes that are allocated on the GPU after a garbage collection, rounded to 64 KiB."""
    gc.collect()
    return round(torch.cuda.memory_allocated() / 65536) * 65536


def allocated_after_backward() -> int:
    """Return the allocated bytes without the tensors of the last backward.

    The device's autograd thread may free its last tensors after backward has returned, but does so before the next backward.
    The rounding hides the scalars of that one.
    """
    torch.ones((), device="cuda", requires_grad=True).mul(1).backward()
    return allocated()


class Keeper(nn.Module):
    """Keeps an intermediate in an attribute, as models do that report attention weights or router logits."""

    def __init__(self, references: list[weakref.ref[torch.Tensor]]) -> None:
        super().__init__()
        self.references = references

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        self.kept = h.sin()
        self.references.append(weakref.ref(self.kept))
        return self.kept.exp().cos()


def closure(h: torch.Tensor, ckpt: Checkpoint, references: list[weakref.ref[torch.Tensor]]) -> torch.Tensor:
    kept: list[torch.Tensor] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        kept.append(h.sin())
        references.append(weakref.ref(kept[-1]))
        return kept[-1].exp().cos()

    return ckpt(function, h)


def module(h: torch.Tensor, ckpt: Checkpoint, references: list[weakref.ref[torch.Tensor]]) -> torch.Tensor:
    return ckpt(Keeper(references), h)


KEEPERS = {"closure": closure, "module": module}


def survivors(keeper: str, x: torch.Tensor, ckpt: Checkpoint = checkpointing.checkpoint) -> int:
    """Return how many of the intermediates that functions kept are alive after the functions and the graphs are deleted."""
    references: list[weakref.ref[torch.Tensor]] = []
    for _ in range(5):
        KEEPERS[keeper](x * 1, ckpt, references).sum().backward()
    x.grad = None
    gc.collect()
    assert len(references) == 10
    return sum(each() is not None for each in references)


def many(x: torch.Tensor, count: int, watch: Callable[[], _T]) -> list[_T]:
    """Run ``count`` pairs of checkpoints after a warm-up, call ``watch`` five times in between, and return its results."""
    results: list[_T] = []
    for step in range(count + 20):
        h = x * 1
        for _ in range(2):
            h = checkpointing.checkpoint(lambda h: h.sin().exp(), h)
        if step % 10:
            h.sum().backward()
        else:
            # A forward without a backward, as for a skipped batch.
            del h
        x.grad = None
        if step >= 20 and (step - 20) % (count // 5) == 0:
            gc.collect()
            results.append(watch())
    return results


def compare(device: str, count: int) -> None:
    """Compare ``count`` pairs of checkpoints, with inputs of seven sizes, with the same functions without checkpoints."""
    function = lambda h: h.sin().exp()  # noqa: E731
    inputs = [torch.linspace(0.1, 0.9, 16 + size, device=device) * (1 + size) for size in range(7)]
    expected: list[tuple[torch.Tensor, torch.Tensor]] = []
    for each in inputs:
        each.requires_grad_()
        out = function(function(each * 1))
        expected.append((out.detach(), *torch.autograd.grad(out.sum(), each)))
    for step in range(count):
        x = inputs[step % 7]
        out = checkpointing.checkpoint(function, checkpointing.checkpoint(function, x * 1))
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(out, expected[step % 7][0])
        assert torch.equal(gradient, expected[step % 7][1])
