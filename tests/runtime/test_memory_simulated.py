"""Statistics of the allocators on two simulated GPUs, compared with torch.cuda."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import accelerator as acc
from accelerator._torch import state
from accelerator._torch.state import RuntimeState

COUNTERS = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


@pytest.fixture(autouse=True)
def _different_devices() -> Iterator[None]:
    """Allocate 1 KiB on device 0 (peak: 3 KiB) and 3 MiB on device 1 (peak: 33 MiB), so that their counters differ."""
    held = [torch.empty(1024, dtype=torch.uint8, device="cuda:0"), torch.empty(3 << 20, dtype=torch.uint8, device="cuda:1")]
    acc.reset_peak_memory_stats(0)
    acc.reset_peak_memory_stats(1)
    torch.empty(2048, dtype=torch.uint8, device="cuda:0")
    torch.empty(30 << 20, dtype=torch.uint8, device="cuda:1")
    torch.cuda.set_device(1)
    yield
    held.clear()


@pytest.mark.parametrize("name", COUNTERS)
def test_counters_equal_torchs(name: str) -> None:
    ours, theirs = getattr(acc, name), getattr(torch.cuda, name)
    for device in (None, 0, 1, "cuda:0", "cuda:1", torch.device("cuda", 0), torch.device("cuda")):
        assert ours(device) == theirs(device)
    assert ours() == theirs(1) > theirs(0) > 0


def test_counters_after_allocating_and_freeing() -> None:
    allocated, most, reserved, _ = (getattr(acc, name)(1) for name in COUNTERS)
    assert allocated == 3 << 20
    assert most == 33 << 20
    assert allocated < reserved


@pytest.mark.parametrize("name", ["memory_stats", "memory_stats_as_nested_dict"])
def test_statistics_equal_torchs(name: str) -> None:
    # torch.cuda returns more statistics than torch.accelerator, which has no such function in torch 2.6.
    module = torch.accelerator if hasattr(torch.accelerator, name) else torch.cuda
    for device in (None, 0, 1, "cuda:0"):
        ours, theirs = getattr(acc, name)(device), getattr(module, name)(device)
        assert ours == theirs
        assert list(ours) == list(theirs)
        assert type(ours) is type(theirs)


def test_host_memory_stats_equal_torchs() -> None:
    if not hasattr(torch.cuda, "host_memory_stats"):
        assert acc.host_memory_stats() == OrderedDict()
        return
    pinned = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    stats = acc.host_memory_stats()
    assert stats == torch.cuda.host_memory_stats()
    assert list(stats) == sorted(stats)
    assert stats["allocated_bytes.current"] >= pinned.nbytes


def test_host_memory_stats_nested_and_reset() -> None:
    if not hasattr(torch.cuda, "host_memory_stats"):
        assert acc.host_memory_stats_as_nested_dict() == {}
        acc.reset_peak_host_memory_stats()
        acc.reset_accumulated_host_memory_stats()
        return

    def allocated() -> dict[str, int]:
        # torch before 2.13 counts freed blocks as active.
        return acc.host_memory_stats_as_nested_dict()["allocated_bytes"]

    kept, more = acc.pin_empty(1 << 20, dtype=torch.uint8), acc.pin_empty(8 << 20, dtype=torch.uint8)
    del more
    torch.cuda.synchronize()
    acc.empty_host_cache()
    assert acc.host_memory_stats_as_nested_dict() == torch.cuda.host_memory_stats_as_nested_dict()
    assert allocated()["peak"] > allocated()["current"] >= kept.nbytes
    acc.reset_peak_host_memory_stats()
    assert allocated()["peak"] == allocated()["current"]
    assert allocated()["allocated"] > 0
    acc.reset_accumulated_host_memory_stats()
    assert allocated()["allocated"] == allocated()["freed"] == 0


@pytest.mark.parametrize("fraction", [1, 0, True, "1.0", None])
def test_memory_fraction_that_is_no_float_raises(fraction: Any) -> None:
    for function in (acc.set_per_process_memory_fraction, torch.cuda.set_per_process_memory_fraction):
        with pytest.raises(TypeError):
            function(fraction)


@pytest.mark.parametrize("reset", [acc.reset_peak_memory_stats, acc.reset_accumulated_memory_stats])
def test_reset_affects_one_device(reset: Callable[..., None]) -> None:
    def mutable(index: int) -> tuple[Any, ...]:
        everything = acc.memory_stats_as_nested_dict(index)["allocated_bytes"]["all"]
        return everything["peak"], everything["allocated"], everything["freed"]

    other = mutable(0)
    reset()
    assert mutable(0) == other
    if reset is acc.reset_peak_memory_stats:
        assert mutable(1)[0] == acc.memory_allocated(1)
        assert mutable(1)[1] > 0
    else:
        assert mutable(1)[1:] == (0, 0)
        assert mutable(1)[0] > acc.memory_allocated(1)
    reset("cuda:0")
    assert mutable(0) != other


def test_empty_cache_releases_unused_memory() -> None:
    before = acc.memory_reserved(1)
    acc.empty_cache()
    assert acc.memory_allocated(1) == 3 << 20
    assert acc.memory_reserved(1) < before
    assert acc.empty_host_cache() is None


def test_statistics_of_the_cpu_have_torchs_names(monkeypatch: pytest.MonkeyPatch) -> None:
    held = torch.ones(2, device="cuda")
    names = set(torch.accelerator.memory_stats() if hasattr(torch.accelerator, "memory_stats") else torch.cuda.memory_stats())
    monkeypatch.setattr(state, "current", lambda device=None: RuntimeState("cpu", 0, False))
    assert set(acc.memory_stats()) == names
    del held


def test_pools() -> None:
    pool = acc.create_mem_pool()
    assert type(pool) is torch.cuda.MemPool
    before = torch.cuda.memory_reserved(1)
    with acc.use_mem_pool(None):
        ordinary = torch.ones(8, device="cuda:1")
    with acc.use_mem_pool(pool, 1):
        pooled = torch.ones(8, device="cuda:1")
    pools = {segment["segment_pool_id"] for segment in torch.cuda.memory_snapshot() if segment["device"] == 1}
    assert pool.id in pools
    assert (ordinary + pooled).tolist() == [2] * 8
    assert torch.cuda.memory_reserved(1) >= before
    assert acc.get_allocator_backend() == torch.cuda.get_allocator_backend() == "native"
    assert acc.OutOfMemoryError is torch.cuda.OutOfMemoryError
