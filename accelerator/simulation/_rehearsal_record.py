"""What a rehearsed process records and ``python -m accelerator rehearse`` reads: the types, and their files in one folder.

A process writes its record regularly and at its end. The file of its exit status is written at the end, and a curve for each
device if a plot is asked for.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

__all__ = [
    "CATEGORIES",
    "Curve",
    "DeviceRecord",
    "OutOfMemory",
    "ProcessRecord",
    "Statistics",
    "read_curves",
    "read_records",
    "status_file",
    "write_curve",
    "write_record",
]

CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "other")
"""What holds allocated memory."""

_RECORD, _STATUS, _CURVE = ".json", ".status", ".curve"


class Statistics(NamedTuple):
    """Figures of torch's allocator on a device, over the whole run: peaks in bytes, and counts."""

    allocated: int = 0
    reserved: int = 0
    retries: int = 0
    ooms: int = 0

    @property
    def has_use(self) -> bool:
        """Whether the process allocated memory, or tried to."""
        return bool(self.reserved or self.ooms)


class OutOfMemory(NamedTuple):
    """The first allocation of a run that failed on a device: its bytes, those that were free, the op, the program's line."""

    requested: int
    free: int
    op: str
    where: str | None


class DeviceRecord(NamedTuple):
    """What a process used of a device, and the size of its memory."""

    device: int
    statistics: Statistics
    total: int
    out_of_memory: OutOfMemory | None


class ProcessRecord(NamedTuple):
    """The record of a process: its rank and its devices."""

    rank: int
    devices: list[DeviceRecord]


class Curve(NamedTuple):
    """The memory of a process on a device over its run: points that list the bytes of each category, and the reserved bytes."""

    rank: int
    device: int
    points: list[list[int]]


def write_record(folder: str, record: ProcessRecord) -> None:
    """Write the record of this process, in place of an earlier one."""
    path = _path(folder, _RECORD)
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(_plain(record), file)
    os.replace(f"{path}.new", path)


def write_curve(folder: str, curve: Curve) -> None:
    """Write a curve of this process."""
    with open(_path(folder, f"-{curve.device}{_CURVE}"), "w", encoding="utf-8") as file:
        json.dump(_plain(curve), file)


def status_file(folder: str) -> str:
    """Return the path of the file of this process's exit status."""
    return _path(folder, _STATUS)


def read_records(folder: Path) -> list[tuple[ProcessRecord, int | None]]:
    """Return the record of each process, with its exit status: None if the process runs or a signal ended it."""
    return [(_read_record(file), _read_status(file.with_suffix(_STATUS))) for file in folder.glob(f"*{_RECORD}")]


def read_curves(folder: Path) -> list[Curve]:
    """Return the curves of all processes, by rank and device."""
    return sorted(Curve(**json.loads(file.read_text(encoding="utf-8"))) for file in folder.glob(f"*{_CURVE}"))


def _path(folder: str, suffix: str) -> str:
    return os.path.join(folder, f"{os.getpid()}{suffix}")


def _plain(value: Any) -> Any:
    """Return a record as dictionaries and lists."""
    if hasattr(value, "_asdict"):
        return {name: _plain(each) for name, each in value._asdict().items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _read_record(file: Path) -> ProcessRecord:
    fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return ProcessRecord(fields["rank"], [_read_device(**device) for device in fields["devices"]])


def _read_device(device: int, statistics: dict[str, int], total: int, out_of_memory: dict[str, Any] | None) -> DeviceRecord:
    failure = None if out_of_memory is None else OutOfMemory(**out_of_memory)
    return DeviceRecord(device, Statistics(**statistics), total, failure)


def _read_status(file: Path) -> int | None:
    status = file.read_text(encoding="ascii") if file.exists() else ""
    return int(status) if status else None  # the process may be writing it
