"""Summaries, snapshots and the history of memory on two simulated GPUs, compared with torch.cuda."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

import accelerator as acc
from accelerator._torch import bindings


@pytest.fixture(autouse=True)
def _no_history() -> Iterator[None]:
    acc.init()
    yield
    torch.cuda.memory._record_memory_history(None)


@pytest.mark.parametrize("abbreviated", [False, True])
def test_summary_equals_torchs(abbreviated: bool) -> None:
    sizes = (512, 3 << 20, 900 << 20, 3 << 30)
    held = [torch.empty(size, dtype=torch.uint8, device="cuda:1") for size in sizes]
    del held[1]
    for device in (0, 1, "cuda:1", None):
        assert acc.memory_summary(device, abbreviated) == torch.cuda.memory_summary(device, abbreviated)
    assert acc.memory_summary(1) != acc.memory_summary(0)
    torch.cuda.set_device(1)
    assert acc.memory_summary() == torch.cuda.memory_summary(1)


@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("power", range(1, 6))
def test_units_of_the_summary_equal_torchs(power: int, offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Totals at the limits between two units. torch's function reads the statistics by its module's functions.
    sizes, counts = 768 * 1024**power + offset, 750 * 1000**power + offset

    def statistics(figures: dict[str, Any], name: str = "") -> dict[str, Any]:
        return {
            key: statistics(figure, name or key) if isinstance(figure, dict) else sizes if name.endswith("_bytes") else counts
            for key, figure in figures.items()
        }

    figures = statistics(torch.cuda.memory_stats_as_nested_dict(1))
    monkeypatch.setattr(bindings, "memory_statistics", lambda index: figures)
    monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", lambda device=None: figures)
    assert acc.memory_stats(1)["allocated_bytes.all.current"] == sizes
    assert acc.memory_stats(1)["allocation.all.current"] == counts
    assert acc.memory_summary(1) == torch.cuda.memory_summary(1)


def test_segments_contain_the_allocation() -> None:
    held = torch.empty(3 << 20, dtype=torch.uint8, device="cuda:1")
    (segment,) = (segment for segment in acc.memory_snapshot() if segment["device"] == 1)
    assert segment["allocated_size"] == held.nbytes
    assert segment["address"] <= held.data_ptr() < segment["address"] + segment["total_size"]
    (block,) = (block for block in segment["blocks"] if block["state"] == "active_allocated")
    assert block["address"] == held.data_ptr()
    assert block["requested_size"] == held.nbytes
    del held
    (segment,) = (segment for segment in acc.memory_snapshot() if segment["device"] == 1)
    assert segment["allocated_size"] == 0
    acc.empty_cache()
    assert not [segment for segment in acc.memory_snapshot() if segment["device"] == 1]


def test_snapshot_without_traces() -> None:
    held = torch.empty(3 << 20, dtype=torch.uint8, device="cuda:1")
    if "include_traces" not in inspect.signature(torch.cuda.memory_snapshot).parameters:
        with pytest.raises(RuntimeError, match="does not take include_traces"):
            acc.memory_snapshot(include_traces=False)
        return
    acc.record_memory_history()
    allocate_in_named_function()
    assert acc.memory_snapshot(include_traces=False) == acc.memory_snapshot() == acc.memory_snapshot(None, True)
    assert acc.memory_snapshot((0, 0), include_traces=False) == acc.memory_snapshot((0, 0))
    del held


def test_segments_of_a_pool() -> None:
    if "mempool_id" not in inspect.signature(torch.cuda.memory_snapshot).parameters:
        with pytest.raises(TypeError):
            acc.memory_snapshot((0, 1))
        return
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        inside = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    outside = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
    (segment,) = acc.memory_snapshot(pool.id)
    assert segment["address"] <= inside.data_ptr() < segment["address"] + segment["total_size"]
    assert len(acc.memory_snapshot()) > 1
    del inside, outside


def allocate_in_named_function() -> None:
    torch.empty(11 << 20, dtype=torch.uint8, device="cuda:1")


def test_dumped_history_opens_in_the_viewer(tmp_path: Path) -> None:
    acc.record_memory_history(stacks="python", max_entries=1000)
    held = torch.empty(13 << 20, dtype=torch.uint8, device="cuda:1")
    allocate_in_named_function()
    acc.dump_memory_snapshot(tmp_path / "ours.pickle")
    torch.cuda.memory._dump_snapshot(str(tmp_path / "theirs.pickle"))
    acc.record_memory_history(None)
    ours, theirs = (pickle.loads((tmp_path / f"{whose}.pickle").read_bytes()) for whose in ("ours", "theirs"))
    assert ours["segments"] == theirs["segments"]
    assert set(ours) == set(theirs)
    events = [event for event in ours["device_traces"][1] if event["action"] == "alloc"]
    assert {13 << 20, 11 << 20} <= {event["size"] for event in events}
    names = {frame["name"] for event in events for frame in event["frames"]}
    assert "allocate_in_named_function" in names
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "<script" in plot(ours).lower()
    del held


def test_stopped_history_records_no_events() -> None:
    acc.record_memory_history()
    acc.record_memory_history(None)
    before = len(torch.cuda.memory._snapshot()["device_traces"][1])
    allocate_in_named_function()
    assert len(torch.cuda.memory._snapshot()["device_traces"][1]) == before


def test_max_entries_limits_recorded_events() -> None:
    acc.record_memory_history(context=None, max_entries=3)
    for _ in range(5):
        allocate_in_named_function()
    assert len(torch.cuda.memory._snapshot()["device_traces"][1]) == 3


@pytest.mark.parametrize(
    ("arguments", "error"),
    [({"enabled": "everything"}, ValueError), ({"enabled": True}, ValueError), ({"enabled": False}, ValueError),
     ({"context": "some"}, ValueError), ({"stacks": None}, ValueError), ({"max_entries": 0}, ValueError),
     ({"max_entries": -1}, ValueError), ({"max_entries": 2**70}, ValueError), ({"max_entries": 1.5}, TypeError),
     ({"max_entries": True}, TypeError), ({"max_entries": None}, TypeError), ({"louder": True}, TypeError)],
    ids=repr,
)  # fmt: skip
def test_wrong_memory_history_arguments_raise(arguments: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        acc.record_memory_history(**arguments)
    allocate_in_named_function()
    assert not any(torch.cuda.memory._snapshot()["device_traces"])


def test_dump_to_an_unwritable_file_raises(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file or directory"):
        acc.dump_memory_snapshot(tmp_path / "none" / "file.pickle")
    with pytest.raises(TypeError):
        acc.dump_memory_snapshot(None)  # type: ignore[arg-type]
