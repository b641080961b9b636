"""The figures of a rehearsed process: resets of torch's statistics lose nothing, on whichever device."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

recorder: Any = importlib.import_module("_accelerator_simulation._rehearsal.recorder")
MIB = 2**20


def statistics() -> list[Any]:
    return [recorder._statistics(device) for device in range(2)]


@pytest.mark.parametrize("device", [0, 1])
def test_resets_of_a_device_lose_no_figure(device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_kept", {})
    torch.cuda.init()
    for each in range(2):
        torch.cuda.reset_peak_memory_stats(each)
        torch.cuda.reset_accumulated_memory_stats(each)
        torch.empty((8 + each) * 10 * MIB, dtype=torch.uint8, device=f"cuda:{each}")
        with torch.cuda.device(each):
            torch.cuda.empty_cache()
        for _ in range(1 + each):
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(2**40, dtype=torch.uint8, device=f"cuda:{each}")
    before = statistics()
    assert [figures.ooms for figures in before] == [1, 2]
    assert before[0].allocated >= 80 * MIB
    assert before[1].reserved >= before[1].allocated >= 90 * MIB

    recorder._keep_peaks(device)
    torch.cuda.reset_peak_memory_stats(device)
    assert torch.cuda.max_memory_reserved(device) < before[device].reserved
    assert statistics() == before

    recorder._keep_counts(device)
    torch.cuda.reset_accumulated_memory_stats(device)
    assert torch.cuda.memory_stats(device)["num_ooms"] == 0
    assert statistics() == before
    torch.empty(100 * MIB, dtype=torch.uint8, device=f"cuda:{device}")
    assert recorder._statistics(device).allocated >= 100 * MIB, "a later peak is higher"
