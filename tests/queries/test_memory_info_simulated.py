"""Free and total memory, limits, and running out of memory, on two simulated GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import accelerator as acc
from accelerator._machine import host_memory


@pytest.fixture(autouse=True)
def _reset_limits() -> Iterator[None]:
    acc.init()
    yield
    for index in range(2):
        torch.cuda.set_per_process_memory_fraction(1.0, index)


def test_free_and_total_equal_torchs() -> None:
    before = acc.available_memory(1)
    held = torch.empty(64 << 20, dtype=torch.uint8, device="cuda:1")
    for device in (None, 0, 1, "cuda:1", torch.device("cuda", 0)):
        free, total = torch.cuda.mem_get_info(device)
        assert acc.get_memory_info(device) == acc.mem_get_info(device) == (free, total)
        assert acc.available_memory(device) == free
        assert acc.total_memory(device) == total
    assert before - acc.available_memory(1) >= held.nbytes
    torch.cuda.set_device(1)
    assert acc.mem_get_info(device=-1) == acc.mem_get_info() == torch.cuda.mem_get_info(1)


def test_integrated_device_reports_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(is_integrated=1))
    monkeypatch.setattr(host_memory, "available", lambda: 4321)
    assert acc.available_memory() == 4321
    assert acc.total_memory(1) == host_memory.total()
    assert acc.mem_get_info() == acc.get_memory_info(1) == (4321, host_memory.total())


def test_memory_fraction_limits_allocations() -> None:
    total = acc.total_memory(1)
    acc.set_per_process_memory_fraction(0.25, "cuda:1")
    assert acc.get_per_process_memory_fraction(1) == 0.25
    assert torch.cuda.current_device() == 0
    assert torch.cuda.get_per_process_memory_fraction(1) == 0.25
    torch.cuda.set_device(0)  # torch 2.6's getter changes the device
    assert acc.get_per_process_memory_fraction() == acc.get_per_process_memory_fraction(0) == 1.0
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total // 2, dtype=torch.uint8, device="cuda:1")
    assert torch.empty(total // 8, dtype=torch.uint8, device="cuda:1").numel() == total // 8
    torch.cuda.set_device(1)
    acc.set_per_process_memory_fraction(1.0)
    assert acc.get_per_process_memory_fraction() == 1.0
    assert torch.empty(total // 2, dtype=torch.uint8, device="cuda:1").numel() == total // 2


@pytest.mark.parametrize(
    ("fraction", "error"),
    [(-0.1, ValueError), (1.1, ValueError), (2.0, ValueError), (math.nan, ValueError), (math.inf, ValueError),
     (1, TypeError), (True, TypeError), (None, TypeError), ("0.5", TypeError), (1j, TypeError)],
)  # fmt: skip
def test_wrong_memory_fraction_raises(fraction: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="memory fraction"):
        acc.set_per_process_memory_fraction(fraction)
    assert acc.get_per_process_memory_fraction() == 1.0


def test_counters_and_memory_after_out_of_memory() -> None:
    """A failed allocation changes no allocated memory, and freed memory can be allocated again."""
    free, total = acc.get_memory_info(1)
    others = acc.memory_allocated(1), acc.memory_reserved(1)
    held = [torch.empty(total // 4, dtype=torch.uint8, device="cuda:1") for _ in range(3)]
    before = acc.memory_allocated(1), acc.memory_reserved(1)
    ooms = acc.memory_stats(1)["num_ooms"]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(total // 2, dtype=torch.uint8, device="cuda:1")
    assert acc.is_out_of_memory_error(caught.value)
    assert before == (acc.memory_allocated(1), acc.memory_reserved(1))
    assert before == tuple(each + sum(t.nbytes for t in held) for each in others)
    assert acc.memory_stats(1)["num_ooms"] == ooms + 1
    held.clear()
    again = torch.empty(total // 2, dtype=torch.uint8, device="cuda:1")
    assert acc.memory_allocated(1) == others[0] + again.nbytes
    del again
    acc.empty_cache()
    assert acc.memory_reserved(1) == others[1]
    assert acc.get_memory_info(1)[0] == free
