"""Descriptions of devices from rare providers: the kernel's files, and libraries that do not know a figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerator._machine import description, nvml

pytestmark = pytest.mark.torch_free

# The kernel's name of a device for each spelling of its PCI bus id.
PCI_NAMES = {
    "00000000:3B:00.0": "0000:3b:00.0",
    "0000:3b:00.0": "0000:3b:00.0",
    "00000001:C0:1F.0": "0001:c0:1f.0",
    "0000FFFF:01:00.0": "ffff:01:00.0",
    "00010000:01:00.0": "10000:01:00.0",
    "10000:E1:00.0": "10000:e1:00.0",
    "ABCDEF01:02:00.0": "abcdef01:02:00.0",
}


@pytest.mark.parametrize("bus", PCI_NAMES)
@pytest.mark.parametrize(("node", "expected"), [("0", 0), ("3", 3), ("-1", None), ("", None), ("x", None)])
def test_numa_node_of_the_kernel(
    bus: str, node: str, expected: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another device's file must not be read: each other name of the table has another node."""
    monkeypatch.setattr(description, "_PCI_DEVICES", str(tmp_path))
    for name in set(PCI_NAMES.values()):
        (tmp_path / name).mkdir()
        (tmp_path / name / "numa_node").write_text(node if name == PCI_NAMES[bus] else "7")
    assert description.numa_node_of_bus(nvml.plain_bus(bus)) == expected


@pytest.mark.parametrize("bus", [None, "0000:99:00.0"])
def test_numa_node_of_an_unknown_device_is_none(bus: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(description, "_PCI_DEVICES", str(tmp_path))
    assert description.numa_node_of_bus(bus) is None
