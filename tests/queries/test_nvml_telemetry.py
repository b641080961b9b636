"""How the fields of telemetry convert NVML's results, and with which arguments they call NVML."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from accelerator._machine import nvml, nvml_telemetry
from accelerator._machine.discovery_result import Failed, NotSupported

NODES = (0, 1, 31, 32, 63, 64, 100, 127, 1023)
REASONS = (  # for the clocks, in the order of NVML's bits
    *("idle", "application clocks", "power cap", "hardware slowdown", "sync boost", "software thermal", "hardware thermal"),
    *("power brake", "display clocks"),
)
THROTTLING = ("power cap", "hardware slowdown", "software thermal", "hardware thermal", "power brake")


def return_from_nvml(value: Any, monkeypatch: pytest.MonkeyPatch) -> nvml.Handle:
    monkeypatch.setattr(nvml_telemetry, "call", lambda function, *arguments, **options: value)
    return nvml.Handle(0)


@pytest.mark.parametrize("reason", ["none", *REASONS])
def test_clock_reasons_that_set_throttled(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bit = 1 << REASONS.index(reason) if reason in REASONS else 0
    assert nvml_telemetry.read(return_from_nvml(bit, monkeypatch), "throttled") is (reason in THROTTLING)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        *(([(1 << node) >> 64 * word & (1 << 64) - 1 for word in range(16)], node) for node in NODES),
        *(([*words, *[0] * 14], None) for words in ([0, 0], [3, 0], [1, 1])),
    ],
)
def test_numa_node_of_an_affinity_set(words: list[int], expected: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvml_telemetry.read(return_from_nvml(words, monkeypatch), "numa_node") == expected


HANDLE, PEER = nvml.Handle(0), nvml.Handle(1)


def set_nvml_results(results: dict[tuple[Any, ...], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make NVML return the result for a function and its arguments, or raise it if it is an exception."""

    def call(function: str, *arguments: Any, **options: Any) -> Any:
        assert not options
        key = (function, *(tuple(each) if isinstance(each, list) else each for each in arguments))
        if isinstance(results[key], Exception):
            raise results[key]
        return results[key]

    monkeypatch.setattr(nvml_telemetry, "call", call)


def test_memory_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    field = SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=61))
    set_nvml_results({("nvmlDeviceGetFieldValues", HANDLE, (82,)): [field]}, monkeypatch)
    assert nvml_telemetry.read(HANDLE, "memory_temperature") == 61
    field.nvmlReturn = 3
    with pytest.raises(NotSupported) as error:
        nvml_telemetry.read(HANDLE, "memory_temperature")
    assert str(error.value) == "NVML's field returned 3"


@pytest.mark.parametrize(("status", "expected"), [(0, True), (1, False), (5, False), (6, None)])
def test_links_between_gpus(status: int, expected: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    set_nvml_results({("nvmlDeviceGetP2PStatus", HANDLE, PEER, 2): status}, monkeypatch)
    assert nvml_telemetry.is_nvlink_connected(HANDLE, PEER) is expected


def test_clock_reasons_are_read_for_the_given_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml_telemetry, "_clock_event_reasons", {HANDLE: 0x4, PEER: 0}.__getitem__)
    assert [nvml_telemetry.read(handle, "throttled") for handle in (HANDLE, PEER)] == [True, False]


def test_all_nodes_of_a_device_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    set_nvml_results({("nvmlDeviceGetMemoryAffinity", HANDLE, 16, 0): [0, 0b100]}, monkeypatch)
    assert nvml_telemetry.read(HANDLE, "numa_node") == 66


def test_name_is_a_str_and_capability_a_tuple(monkeypatch: pytest.MonkeyPatch) -> None:
    set_nvml_results(
        {("nvmlDeviceGetName", HANDLE): b"Some GPU", ("nvmlDeviceGetCudaComputeCapability", HANDLE): [9, 0]}, monkeypatch
    )
    assert nvml_telemetry.read(HANDLE, "name") == "Some GPU"
    assert nvml_telemetry.read(HANDLE, "compute_capability") == (9, 0)


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml_telemetry, "_memory_info", {HANDLE: SimpleNamespace(free=1, total=3, used=2)}.get)
    assert nvml_telemetry.read(HANDLE, "memory") == (1, 3, 2)
    monkeypatch.setattr(nvml_telemetry, "_memory_info", {HANDLE: SimpleNamespace(free=1, total=8, used=2, reserved=5)}.get)
    assert nvml_telemetry.read(HANDLE, "memory") == (1, 3, 2)  # CUDA's total, which excludes what the driver reserves
    monkeypatch.setattr(nvml_telemetry, "_memory_info", {HANDLE: SimpleNamespace(free=0, total=0, used=0)}.get)
    with pytest.raises(NotSupported) as error:
        nvml_telemetry.read(HANDLE, "memory")
    assert str(error.value) == "NVML reports no memory for it"


def test_process_name_that_cannot_be_read_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [SimpleNamespace(pid=pid, usedGpuMemory=pid * 100) for pid in (1, 2, 3)]
    monkeypatch.setattr(nvml_telemetry, "_compute_processes", {HANDLE: entries}.get)
    name = "nvmlSystemGetProcessName"
    set_nvml_results({(name, 1): "python", (name, 2): NotSupported("x"), (name, 3): Failed("x")}, monkeypatch)
    assert nvml_telemetry.read(HANDLE, "processes") == [(1, "python", 100), (2, None, 200), (3, None, 300)]
