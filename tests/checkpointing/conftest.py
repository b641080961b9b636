"""Resets the settings and the named random states before and after each test of checkpointing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accelerator import checkpointing


@pytest.fixture(autouse=True)
def _reset_checkpointing() -> Iterator[None]:
    checkpointing.configure()
    checkpointing.get_cuda_rng_tracker().reset()
    yield
    checkpointing.configure()
    checkpointing.get_cuda_rng_tracker().reset()
