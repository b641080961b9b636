"""Deprecated names warn, name their successor, and do the same as it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import accelerator as acc

SUCCESSORS = {
    "current_device_idx": "current_device_index",
    "max_memory_cached": "max_memory_reserved",
    "memory_cached": "memory_reserved",
    "reset_max_memory_allocated": "reset_peak_memory_stats",
    "reset_max_memory_cached": "reset_peak_memory_stats",
    "set_device_idx": "set_device_index",
}


def call(name: str, *arguments: Any) -> Any:
    function: Callable[..., Any] = getattr(acc, name)
    with pytest.warns(FutureWarning, match=f"`{SUCCESSORS[name]}`.* Version 1.0 removes this name") as caught:
        result = function(*arguments)
    assert [warning.filename for warning in caught] == [__file__]
    return result


def test_devices() -> None:
    call("set_device_idx", 1)
    assert call("current_device_idx") == torch.cuda.current_device() == 1


def test_counters() -> None:
    held = torch.empty(3 << 20, dtype=torch.uint8, device="cuda:1")
    for device in (None, 0, 1, "cuda:1"):
        assert call("memory_cached", device) == torch.cuda.memory_reserved(device)
        assert call("max_memory_cached", device) == torch.cuda.max_memory_reserved(device)
    assert call("memory_cached", 1) >= held.nbytes
    # The successors of these two take the device as a positional argument only.
    for name in ("memory_cached", "max_memory_cached"):
        with pytest.warns(FutureWarning, match="positional argument"):
            assert getattr(acc, name)(device=1) == getattr(acc, SUCCESSORS[name])(1)


@pytest.mark.parametrize("name", ["reset_max_memory_allocated", "reset_max_memory_cached"])
def test_deprecated_resets_reset_peak_counters(name: str) -> None:
    torch.empty(30 << 20, dtype=torch.uint8, device="cuda:1")
    torch.cuda.empty_cache()
    assert acc.max_memory_allocated(1) > acc.memory_allocated(1)
    call(name)
    assert acc.max_memory_allocated(1) > acc.memory_allocated(1)
    call(name, 1)
    assert acc.max_memory_allocated(1) == acc.memory_allocated(1)
    assert acc.max_memory_reserved(1) == acc.memory_reserved(1)
