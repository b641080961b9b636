"""The fields that are decoded from bits and words."""

from __future__ import annotations

from typing import Any

import pytest

from accelerator._machine import nvml, nvml_telemetry

THROTTLING = {
    "power cap": 0x4,
    "hardware slowdown": 0x8,
    "software thermal": 0x20,
    "hardware thermal": 0x40,
    "power brake": 0x80,
}
HARMLESS = {"idle": 0x1, "application clocks": 0x2, "sync boost": 0x10, "display clocks": 0x100}


def returning(value: Any, monkeypatch: pytest.MonkeyPatch) -> nvml.Handle:
    monkeypatch.setattr(nvml_telemetry, "call", lambda function, *arguments, **options: value)
    return nvml.Handle(0)


@pytest.mark.parametrize("bit", THROTTLING.values(), ids=THROTTLING)
def test_each_reason_throttles(bit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvml_telemetry.read(returning(bit, monkeypatch), "throttled") is True


@pytest.mark.parametrize("bit", [0, *HARMLESS.values()], ids=["none", *HARMLESS])
def test_other_reasons_do_not(bit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvml_telemetry.read(returning(bit, monkeypatch), "throttled") is False


@pytest.mark.parametrize("node", [0, 1, 31, 32, 63, 64, 100, 127, 1023])
def test_the_numa_node_of_an_affinity_set(node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [0] * 16
    words[node // 64] = 1 << node % 64
    assert nvml_telemetry.read(returning(words, monkeypatch), "numa_node") == node


@pytest.mark.parametrize("words", [[0] * 16, [3] + [0] * 15, [1, 1] + [0] * 14])
def test_no_or_several_nodes(words: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvml_telemetry.read(returning(words, monkeypatch), "numa_node") is None
