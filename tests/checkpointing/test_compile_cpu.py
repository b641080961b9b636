"""Checkpoints under ``torch.compile``: in one graph where torch's checkpoint does all that the settings need."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from accelerator import checkpointing
from tests.support.checkpointing_cases import OURS, Checkpoint, none, x

# Run in one worker of xdist, because importing Dynamo takes seconds in each process.
pytestmark = pytest.mark.xdist_group("compiled checkpoints")


@pytest.fixture(autouse=True)
def compiles_again() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("ckpt", OURS, ids=["checkpoint", "non_reentrant"])
@pytest.mark.parametrize("determinism_check", ["default", "none"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_into_one_graph(backend: str, determinism_check: str, ckpt: Checkpoint) -> None:
    checkpointing.configure(determinism_check=determinism_check)
    layer = nn.Linear(4, 4)

    def model(a: torch.Tensor, ckpt: Checkpoint) -> torch.Tensor:
        return ckpt(lambda b: layer(b).sin().exp(), a * 2) * 3  # type: ignore[no-any-return]

    a = x(2, 4)
    expected, result = model(a, none), torch.compile(model, backend=backend, fullgraph=True)(a, ckpt)
    torch.testing.assert_close(result, expected)
    parameters = [a, layer.weight]
    gradients = torch.autograd.grad(result.sum(), parameters), torch.autograd.grad(expected.sum(), parameters)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("variant", ["keywords", "watched", "tracker", "nested"])
def test_under_compile(variant: str) -> None:
    layer = nn.Linear(4, 4)
    if variant == "watched":
        checkpointing.configure(profile=True)
    tracker = checkpointing.get_cuda_rng_tracker()
    if variant == "tracker":
        tracker.add("stream", 7)

    def function(a: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if variant == "tracker":
            with tracker.fork("stream"):
                return torch.nn.functional.dropout(layer(a).sin(), 0.5).exp()
        return layer(a).sin().exp() * scale

    def outer(a: torch.Tensor) -> torch.Tensor:
        return checkpointing.checkpoint(function, a).cos()

    def model(a: torch.Tensor, ckpt: Checkpoint) -> torch.Tensor:
        a = a * 2
        if variant == "nested":
            return ckpt(outer, a) * 3
        return ckpt(function, a, **({"scale": 2.0} if variant == "keywords" else {})) * 3

    def gradients(run: Callable[..., torch.Tensor], ckpt: Checkpoint) -> list[torch.Tensor]:
        if variant == "tracker":
            tracker.reset()
            tracker.add("stream", 7)
        a = x(2, 4)
        out = run(a, ckpt)
        return [out, *torch.autograd.grad(out.sum(), [a, layer.weight])]

    try:
        expected = gradients(model, none)
        compiled = torch.compile(model, backend="eager")
        for results in (gradients(compiled, checkpointing.checkpoint), gradients(compiled, checkpointing.checkpoint)):
            for one, other in zip(expected, results, strict=True):
                torch.testing.assert_close(one, other)
    finally:
        tracker.reset()


def test_compiled_function_inside_a_checkpoint() -> None:
    layer = nn.Linear(4, 4)
    compiled = torch.compile(lambda a: layer(a).sin().exp(), backend="aot_eager")
    a, b = x(2, 4), x(2, 4)
    checkpointing.checkpoint(compiled, a).sum().backward()
    layer(b).sin().exp().sum().backward()
    torch.testing.assert_close(a.grad, b.grad)


SELECTIVE = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])


@pytest.mark.parametrize("settings", [{"determinism_check": "debug"}, {"context_fn": SELECTIVE}], ids=["debug", "selective"])
def test_settings_under_compile(settings: dict[str, Any]) -> None:
    checkpointing.configure(**settings)

    def model(h: torch.Tensor) -> torch.Tensor:
        return checkpointing.checkpoint(lambda g: g.sin().exp(), h * 2) * 3

    a = x(4)
    (expected,) = torch.autograd.grad(((a * 2).sin().exp() * 3).sum(), a)
    (results,) = torch.autograd.grad(torch.compile(model, backend="aot_eager")(a).sum(), a)
    torch.testing.assert_close(results, expected)
