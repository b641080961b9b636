"""Functions that keep what they compute, and many checkpoints one after the other, whose memory and values are watched."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from accelerator import checkpointing

Checkpoint = Callable[..., Any]
_T = TypeVar("_T")

# Iterations of two checkpoints each.
MANY = 300

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "partition": {"partition_activations": True},
    "cpu": {"checkpoint_in_cpu": True},
    "partition+cpu": {"partition_activations": True, "checkpoint_in_cpu": True},
    "contiguous": {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 2},
    "contiguous+cpu": {
        "partition_activations": True,
        "contiguous_checkpointing": True,
        "num_checkpoints": 2,
        "checkpoint_in_cpu": True,
    },
}
# For tests that take seconds: the modes in which most parts work together, and all with the slow tests.
SOME_MODES = [mode if mode in ("plain", "contiguous+cpu") else pytest.param(mode, marks=pytest.mark.slow) for mode in MODES]


class Keeper(nn.Module):
    """Keeps an intermediate on itself, as models do that report their attention or their router's logits."""

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
    """How many of the intermediates that a function kept are alive when all that kept them is gone."""
    references: list[weakref.ref[torch.Tensor]] = []
    for _ in range(5):
        KEEPERS[keeper](x * 1, ckpt, references).sum().backward()
    x.grad = None
    gc.collect()
    assert len(references) == 10
    return sum(each() is not None for each in references)


def many(x: torch.Tensor, count: int, watch: Callable[[], _T]) -> list[_T]:
    """What ``watch`` said at five points of so many checkpoints, after the first few."""
    results: list[_T] = []
    for step in range(count + 20):
        h = x * 1
        for _ in range(2):
            h = checkpointing.checkpoint(lambda h: h.sin().exp(), h)
        if step % 10:
            h.sum().backward()
        else:
            # Forwards without a backward, as in a batch that is skipped.
            del h
        x.grad = None
        if step >= 20 and (step - 20) % (count // 5) == 0:
            gc.collect()
            results.append(watch())
    return results


def compare(device: str, count: int) -> None:
    """Hold so many pairs of checkpoints, of inputs of seven sizes, against the same functions without checkpoints."""
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
