"""Every test on simulated GPUs begins and ends on device 0, with the default streams current and without tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    if not torch.cuda.is_initialized():
        return
    for index in reversed(range(torch.cuda.device_count())):
        torch.cuda.set_stream(torch.cuda.default_stream(index))
    torch.cuda.set_device(0)
    torch.cuda.empty_cache()
