"""Time and concurrency: results that change during a query, locks that a fork finds held, and children that are interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from types import ModuleType
from typing import Any

import pytest

from accelerator._machine import amdsmi, child_process, discovery_cache, driver_probe, imports, nvml, torch_probe
from accelerator._machine.discovery_result import DiscoveredDevice, DiscoveryResult, PhysicalGpu
from tests.programs import in_child
from tests.support.discovery import evaluate_simulated, on_simulated_gpus


def result(count: int, *, cacheable: bool = True) -> DiscoveryResult:
    return DiscoveryResult(count, None, "a test", (), environment={}, accelerator_type="cuda", is_cacheable=cacheable)


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("cacheable", [False, True])
@pytest.mark.parametrize("change", ["refresh", "failed initialization"])
def test_result_of_a_discovery_that_a_refresh_overtakes_is_not_cached(
    filled: bool, cacheable: bool, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([1, 2, 3])

    def discover(driver_count: int | None, env: Any) -> DiscoveryResult:
        count = next(counts)
        if count == 2 - (not filled):
            discovery_cache.clear() if change == "refresh" else discovery_cache._drop_entry()
        return result(count, cacheable=cacheable)

    monkeypatch.setattr(discovery_cache, "_entry", discovery_cache._NO_ENTRY)
    monkeypatch.setattr(discovery_cache, "_discover_now", discover)
    if filled:
        assert discovery_cache.current().count == 1
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "overtaken")
    overtaken = discovery_cache.current().count
    assert overtaken == 2 - (not filled)
    assert [discovery_cache.current().count, discovery_cache.current().count] == [overtaken + 1] * 2


def test_refresh_while_a_result_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, entry = iter([1, 2]), discovery_cache._Entry

    def refresh_then_make(*fields: Any) -> Any:
        monkeypatch.setattr(discovery_cache, "_Entry", entry)
        discovery_cache.clear()  # as another thread may, whenever a function is called
        return entry(*fields)

    monkeypatch.setattr(discovery_cache, "_entry", discovery_cache._NO_ENTRY)
    monkeypatch.setattr(discovery_cache, "_discover_now", lambda driver_count, env: result(next(counts)))
    monkeypatch.setattr(discovery_cache, "_Entry", refresh_then_make)
    assert [discovery_cache.current().count for _ in range(3)] == [1, 2, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_while_a_result_is_stored() -> None:
    # The thread that holds the lock does not exist in the child.
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with discovery_cache._lock:
            is_held.set()
            may_end.wait(60)

    def refresh() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        discovery_cache.clear()

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert is_held.wait(60)
        in_child(refresh)
    finally:
        may_end.set()
        thread.join()


def test_handles_follow_the_order_of_devices_until_it_is_certain() -> None:
    one, two, three = (DiscoveredDevice(PhysicalGpu(i, f"handle {i}", None, None)) for i in range(3))
    orders = iter([((one, two, three), False), ((three, one, two), False), ((two, three, one), True)])
    found = DiscoveryResult(3, None, "a test", lambda: next(orders), environment={})
    assert found.handle(0) == "handle 0"
    assert found.handle(1) == "handle 0"
    assert [found.handle(i) for i in range(3)] == ["handle 1", "handle 2", "handle 0"]
    assert found.devices == (two, three, one)


LOCKS = [
    (nvml, "_lock"),
    (driver_probe, "_lock"),
    (torch_probe, "_lock"),
    (amdsmi, "_lock"),
    (imports, "_gate"),
    (imports, "_importing"),
]


@pytest.mark.parametrize(("module", "name"), LOCKS)
def test_lock_that_a_thread_holds_at_a_fork_is_free_in_the_child(module: ModuleType, name: str) -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with getattr(module, name):
            held.set()
            done.wait(60)

    def acquire() -> None:
        assert getattr(module, name).acquire(timeout=5)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    try:
        in_child(acquire)
    finally:
        done.set()
        thread.join()


INTERRUPTIONS = (KeyboardInterrupt(), SystemExit(3), RuntimeError("of a signal handler"), subprocess.TimeoutExpired("x", 1))


@pytest.mark.parametrize("interruption", INTERRUPTIONS, ids=lambda error: type(error).__name__)
def test_child_ends_if_its_parent_stops_waiting(interruption: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def communicate(self, *arguments: Any, **options: Any) -> Any:
            children.append(self)
            raise interruption

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    expected = child_process.ChildError if isinstance(interruption, subprocess.TimeoutExpired) else type(interruption)
    with pytest.raises(expected):
        child_process.run("import time; time.sleep(600)", (), {}, subject="torch", deadline_s=60)
    (child,) = children
    assert child.returncode == -9


GENERATIONS = """
    import accelerator as acc
    library = ctypes.CDLL("libcuda.so.1")
    def descend(initializes, depth):
        # The states of this process and of its descendants.
        if initializes == depth:
            assert library.cuInit(0) == 0
        state = [acc.is_in_bad_fork(), acc.is_available(), acc.is_fork_safe()]
        return [state] if depth == 3 else [state, *in_child(descend, initializes, depth + 1)]
    print(json.dumps([in_child(descend, initializes, 0) for initializes in range(4)]))
"""


@on_simulated_gpus
def test_every_descendant_of_a_process_that_initialized_the_driver_is_in_a_bad_fork() -> None:
    clean, own, forked = [False, True, True], [False, True, False], [True, False, False]
    expected = [[*[clean] * i, own, *[forked] * (3 - i)] for i in range(4)]
    assert evaluate_simulated(GENERATIONS, gpus=2) == expected
