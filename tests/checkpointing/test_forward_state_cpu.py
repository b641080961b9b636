"""Tests that recomputation runs under the settings of forward: autocast, default device, default dtype and determinism.

Afterwards the settings of the caller of backward are restored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from accelerator import checkpointing


@pytest.fixture(autouse=True)
def _restore_torch_defaults() -> Iterator[None]:
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


def observe() -> tuple[Any, ...]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        torch.is_autocast_cache_enabled(),
        torch.empty(0).device,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


class Deterministic:
    def __init__(self, warn_only: bool) -> None:
        self.warn_only = warn_only

    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True, warn_only=self.warn_only)

    def __exit__(self, *exc: object) -> None:
        torch.use_deterministic_algorithms(False)


class DefaultDtype:
    def __enter__(self) -> None:
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *exc: object) -> None:
        torch.set_default_dtype(torch.float32)


class DefaultDevice:
    def __enter__(self) -> None:
        torch.set_default_device("meta")

    def __exit__(self, *exc: object) -> None:
        torch.set_default_device(None)


CONTEXTS: dict[str, Any] = {
    "nothing": nullcontext,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast to float16": lambda: torch.autocast("cpu", dtype=torch.float16),
    "autocast without a cache": lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
    "a device": lambda: torch.device("meta"),
    "the default device": DefaultDevice,
    "the default dtype": DefaultDtype,
    "deterministic algorithms": lambda: Deterministic(False),
    "deterministic, warn only": lambda: Deterministic(True),
}


@pytest.mark.parametrize("random", [True, False])
@pytest.mark.parametrize("backward", CONTEXTS)
@pytest.mark.parametrize("forward", CONTEXTS)
def test_recomputation_restores_settings(forward: str, backward: str, random: bool) -> None:
    checkpointing.configure(preserve_rng_state=random)
    observed: list[tuple[Any, ...]] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        observed.append(observe())
        return h.sin().exp()

    x = torch.ones(3, requires_grad=True)
    context: AbstractContextManager[Any] = CONTEXTS[forward]()
    with context:
        out = checkpointing.checkpoint(function, x).sum()
    with CONTEXTS[backward]():
        before = observe()
        out.backward()
        assert observe() == before
    assert observed[0] == observed[1]


def test_exception_restores_settings() -> None:
    runs: list[int] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        if len(runs) == 2:
            raise KeyError("mine")
        return h.sin().exp()

    x = torch.ones(3, requires_grad=True)
    with CONTEXTS["autocast"](), CONTEXTS["the default dtype"](), CONTEXTS["a device"](), Deterministic(False):
        out = checkpointing.checkpoint(function, x).sum()
    before = observe()
    with pytest.raises(KeyError, match="mine"):
        out.backward()
    assert observe() == before


def test_recomputation_restores_the_autocast_cache_setting() -> None:
    weight, casts = torch.ones(2, 2, requires_grad=True), []

    def function(h: torch.Tensor) -> torch.Tensor:
        casts.append(torch.is_autocast_cache_enabled())
        return (h @ weight @ weight).exp()

    x = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        out = checkpointing.checkpoint(function, x)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True):
        out.sum().backward()
        assert torch.is_autocast_cache_enabled()
    assert casts == [False, False]
