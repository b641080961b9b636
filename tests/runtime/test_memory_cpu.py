"""Memory under the CPU fallback: the allocator's counters are 0, and free and total memory are the host's."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.cuda import _memory_viz

import accelerator as acc
from accelerator import memory
from accelerator._machine import host_memory
from accelerator._torch import bindings, state, versions
from accelerator._torch.state import RuntimeState


@pytest.mark.parametrize("name", ["memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"])
def test_counters_are_zero(name: str) -> None:
    held = torch.ones(1 << 20)
    assert getattr(acc, name)() == getattr(acc, name)(0) == 0
    assert type(getattr(acc, name)()) is int
    del held


def test_statistics_are_zeros() -> None:
    statistics = acc.memory_stats()
    assert list(statistics) == sorted(statistics)
    assert statistics["active_bytes.all.peak"] == statistics["num_ooms"] == 0
    assert {name for name, value in statistics.items() if value} == {"max_split_size"}
    nested = acc.memory_stats_as_nested_dict()
    assert nested["reserved_bytes"]["large_pool"] == {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
    nested["reserved_bytes"]["large_pool"]["current"] = 1
    assert acc.memory_stats()["reserved_bytes.large_pool.current"] == 0
    assert acc.host_memory_stats() == OrderedDict()
    for reset in (acc.reset_peak_memory_stats, acc.reset_accumulated_memory_stats):
        assert reset() is None
    assert acc.empty_cache() is acc.empty_host_cache() is None


def test_pools_change_nothing() -> None:
    pool = acc.create_mem_pool(use_on_oom=True)
    assert pool is None
    with acc.use_mem_pool(pool), acc.use_mem_pool(object(), 0):
        assert torch.ones(2).sum() == 2
    assert acc.get_allocator_backend() == "cpu"
    assert acc.OutOfMemoryError is torch.OutOfMemoryError


def test_memory_info_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available", lambda: 4321)
    total = host_memory.total()
    assert acc.get_memory_info() == acc.mem_get_info() == acc.mem_get_info(-1) == (4321, total)
    assert acc.available_memory() == 4321
    assert acc.total_memory() == total > 4321


def test_memory_fraction_has_no_effect() -> None:
    assert acc.set_per_process_memory_fraction(0.5) is None
    assert acc.get_per_process_memory_fraction() == 1.0
    with pytest.raises(ValueError, match="memory fraction must be"):
        acc.set_per_process_memory_fraction(1.5)
    with pytest.raises(TypeError, match="memory fraction must be"):
        acc.set_per_process_memory_fraction("1")  # type: ignore[arg-type]


@pytest.mark.parametrize("abbreviated", [False, True])
def test_summary(abbreviated: bool) -> None:
    lines = acc.memory_summary(abbreviated=abbreviated).splitlines()
    assert {len(line) for line in lines} == {77}
    cells = [cell.split()[0] for line in lines if "llocat" in line for cell in line.split("|")[2:-1]]
    assert set(cells) - {"Cur", "Peak", "Tot"} == {"0"}
    assert any("large pool" in line for line in lines) != abbreviated


def test_snapshots_are_empty(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    assert acc.record_memory_history() is None
    assert acc.memory_snapshot() == []
    acc.dump_memory_snapshot(path)
    assert acc.record_memory_history(None) is None
    snapshot = pickle.loads(path.read_bytes())
    assert snapshot["segments"] == []
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        assert "<script" in plot(snapshot).lower()


@pytest.mark.parametrize("arguments", [{"enabled": "everything"}, {"context": 1}, {"stacks": 1}, {"max_entries": 0}], ids=repr)
def test_wrong_memory_history_arguments_raise(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be one of|must be from"):
        acc.record_memory_history(**arguments)


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [("memory_cached", (), 0), ("max_memory_cached", (0,), 0), ("reset_max_memory_cached", (), None),
     ("reset_max_memory_allocated", ("cpu",), None), ("current_device_idx", (), 0), ("set_device_idx", (0,), None)],
)  # fmt: skip
def test_deprecated_memory_and_device_names_warn(name: str, arguments: tuple[Any, ...], result: Any) -> None:
    with pytest.warns(FutureWarning, match="Use `"):
        assert getattr(acc, name)(*arguments) == result


def test_mps_fraction_and_memory_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions: list[tuple[float, ...]] = []
    monkeypatch.setattr(memory.state, "current", lambda *_, **__: RuntimeState("mps", None, is_initialized=True))
    monkeypatch.setattr(memory, "get_index", lambda: 0)
    monkeypatch.setattr(memory, "restore_index", lambda index: None)
    monkeypatch.setattr("accelerator._torch.state.get_index", lambda: 0)
    monkeypatch.setattr(memory.lazy_calls, "run", lambda call: call())
    monkeypatch.setattr(memory.bindings, "memory_statistics", lambda index: None)
    monkeypatch.setattr(torch.mps, "set_per_process_memory_fraction", lambda *arguments: fractions.append(arguments))
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 7)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 9)
    monkeypatch.setattr(memory, "_fractions", {})
    acc.set_per_process_memory_fraction(0.5)
    assert fractions == [(0.5,)]
    assert (acc.memory_allocated(), acc.memory_reserved()) == (7, 9)
    with pytest.raises(RuntimeError, match="max_memory_allocated"):
        acc.max_memory_allocated()


@pytest.mark.parametrize(
    ("device_type", "fixed", "is_emptied"),
    [
        *(("cuda", False, True), ("xpu", False, True), ("mps", False, False), ("npu", False, False), ("other", False, False)),
        *((device_type, True, True) for device_type in ("cuda", "xpu", "mps", "npu", "other")),
    ],
)
def test_host_cache_is_emptied_where_torch_has_one(
    device_type: str, fixed: bool, is_emptied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before torch 2.15 its binding ends the process if the accelerator has no allocator of pinned memory."""
    emptied: list[bool] = []
    monkeypatch.setattr(state, "current", lambda: state.RuntimeState(device_type, None, is_initialized=True))
    monkeypatch.setattr(bindings, "empty_host_cache", lambda: emptied.append(True))
    monkeypatch.setattr(versions, "TORCH_2_15", fixed)
    acc.empty_host_cache()
    assert emptied == [True] * is_emptied
