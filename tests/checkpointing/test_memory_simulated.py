"""Tests on simulated GPUs, where torch counts every byte, that checkpoints free their memory."""

from __future__ import annotations

import pytest
import torch

from accelerator import checkpointing
from tests.support.checkpointing_cases import torch_non_reentrant
from tests.support.checkpointing_memory import (
    KEEPERS,
    MANY,
    MODES,
    SOME_MODES,
    allocated_after_backward,
    compare,
    many,
    survivors,
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("keeper", KEEPERS)
def test_intermediates_kept_by_the_function_are_freed(keeper: str, mode: str) -> None:
    checkpointing.configure(**MODES[mode])
    x = torch.zeros(2**18, device="cuda", requires_grad=True)
    assert survivors(keeper, x, torch_non_reentrant) == 0
    checkpointing.reset()
    before = allocated_after_backward()
    assert survivors(keeper, x) == 0
    checkpointing.reset()
    assert allocated_after_backward() == before


@pytest.mark.parametrize("mode", SOME_MODES)
def test_many_checkpoints_leak_no_memory(mode: str) -> None:
    checkpointing.configure(**MODES[mode])
    results = many(torch.zeros(256, device="cuda", requires_grad=True), MANY, allocated_after_backward)
    assert len(set(results)) == 1, results


@pytest.mark.parametrize("mode", SOME_MODES)
def test_many_checkpoints_equal_no_checkpointing(mode: str) -> None:
    checkpointing.configure(**MODES[mode])
    compare("cuda", MANY)
