"""What every test of checkpointing begins and ends with: no settings, and no random states kept by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accelerator import checkpointing


@pytest.fixture(autouse=True)
def _as_imported() -> Iterator[None]:
    checkpointing.configure()
    checkpointing.get_cuda_rng_tracker().reset()
    yield
    checkpointing.configure()
    checkpointing.get_cuda_rng_tracker().reset()
