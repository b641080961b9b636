"""What a rehearsed process records and ``python -m accelerator rehearse`` reads: the types, and their files in one folder.

A process writes its record regularly and at its end. The file of its exit status is written at the end, and so are a curve for
each device and a snapshot if they are asked for.
"""

from __future__ import annotations

import json
import os
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

CATEGORIES = ("parameters", "gradients", "optimizer state", "activations", "other")
"""What holds allocated memory."""

_RECORD, _STATUS, _CURVE, _SNAPSHOT = ".json", ".status", ".curve", ".pickle"


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


class Peak(NamedTuple):
    """What held a device's memory when the process took the most: the line that did, and bytes by category and by line."""

    where: str | None
    allocated: int
    held: list[int]
    lines: list[list[Any]]


class DeviceRecord(NamedTuple):
    """What a process used of a device, and the size of its memory, beyond which a rehearsal goes on."""

    device: int
    statistics: Statistics
    total: int
    out_of_memory: OutOfMemory | None
    peak: Peak | None = None


class MissingValue(NamedTuple):
    """A place where a value that the rehearsal does not have decided a shape or was read: the op, the program's line."""

    op: str
    where: str | None
    times: int


class ProcessRecord(NamedTuple):
    """The record of a process.

    Attributes:
        rank: That of its process group, else that of its environment; None if nothing gives it one.
        started: When it became a rank, in seconds.
        peak_host: The peak of its resident host memory in bytes.
        devices: What it used of each device.
        values: The places where missing values mattered.
    """

    rank: int | None
    started: float
    peak_host: int
    devices: list[DeviceRecord]
    values: list[MissingValue]

    @property
    def uses_memory(self) -> bool:
        return any(device.statistics.has_use for device in self.devices)


class Curve(NamedTuple):
    """The memory of a process on a device over its run: points that list the bytes of each category, and the reserved bytes."""

    device: int
    points: list[list[int]]


class Rank(NamedTuple):
    """A process that is a rank.

    Attributes:
        rank: Its number.
        record: What it recorded.
        status: Its exit status: None if it runs or a signal ended it.
        curves: Its memory over the run, if a plot was asked for.
        snapshot: The file of torch's snapshot, if there is one.
    """

    rank: int
    record: ProcessRecord
    status: int | None
    curves: list[Curve]
    snapshot: Path | None


def write_record(folder: str, record: ProcessRecord) -> None:
    """Write the record of this process, in place of an earlier one."""
    _write(_path(folder, _RECORD), record)


def write_curve(folder: str, curve: Curve) -> None:
    """Write a curve of this process."""
    _write(_path(folder, f"-{curve.device}{_CURVE}"), curve)


def status_file(folder: str) -> str:
    """Return the path of the file of this process's exit status."""
    return _path(folder, _STATUS)


def snapshot_file(folder: str) -> str:
    """Return the path of the file of this process's snapshot, which the command moves and names by the rank."""
    return _path(folder, _SNAPSHOT)


def read_ranks(folder: Path) -> list[Rank]:
    """Return the processes that are ranks, by number.

    A process that uses no memory is none if another one does and it has no rank of its own: it starts others, or compiles for
    them. Processes to which nothing gives a rank get the next free numbers in the order in which they began.
    """
    ranks = sorted((_read_rank(file) for file in folder.glob(f"*{_RECORD}")), key=lambda rank: rank.record.started)
    users = [rank.record for rank in ranks if rank.record.uses_memory]
    known = {record.rank for record in users}
    ranks = [rank for rank in ranks if rank.record.uses_memory or not users or _is_rank_without_memory(rank.record, known)]
    given = {rank.record.rank for rank in ranks}
    free = (number for number in count() if number not in given)
    numbered = [rank._replace(rank=next(free)) if rank.record.rank is None else rank for rank in ranks]
    return sorted(numbered, key=lambda rank: rank.rank)


def _is_rank_without_memory(record: ProcessRecord, users: set[int | None]) -> bool:
    return record.rank is not None and record.rank not in users


def _path(folder: str, suffix: str) -> str:
    return os.path.join(folder, f"{os.getpid()}{suffix}")


def _write(path: str, value: Any) -> None:
    """Write a file in one step: the process may end while it writes, or the disk be full."""
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        json.dump(_plain(value), file)
    os.replace(f"{path}.new", path)


def _plain(value: Any) -> Any:
    """Return a record as dictionaries and lists."""
    if hasattr(value, "_asdict"):
        return {name: _plain(each) for name, each in value._asdict().items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _read_rank(file: Path) -> Rank:
    fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    devices = [_read_device(**device) for device in fields.pop("devices")]
    values = [MissingValue(**value) for value in fields.pop("values")]
    record = ProcessRecord(**fields, devices=devices, values=values)
    curves = [Curve(**json.loads(each.read_text(encoding="utf-8"))) for each in file.parent.glob(f"{file.stem}-*{_CURVE}")]
    snapshot = file.with_suffix(_SNAPSHOT)
    status = _read_status(file.with_suffix(_STATUS))
    return Rank(record.rank or 0, record, status, sorted(curves), snapshot if snapshot.exists() else None)


def _read_device(
    device: int, statistics: dict[str, int], total: int, out_of_memory: dict[str, Any] | None, peak: dict[str, Any] | None
) -> DeviceRecord:
    failure = None if out_of_memory is None else OutOfMemory(**out_of_memory)
    return DeviceRecord(device, Statistics(**statistics), total, failure, None if peak is None else Peak(**peak))


def _read_status(file: Path) -> int | None:
    status = file.read_text(encoding="ascii") if file.exists() else ""
    return int(status) if status else None  # the process may be writing it
