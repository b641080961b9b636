"""Makes entries of the records of a rehearsal's processes, and formats them as a table and as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from ..simulation._rehearsal_record import read_records

if TYPE_CHECKING:
    from pathlib import Path

    from ..simulation._rehearsal_record import DeviceRecord, OutOfMemory, ProcessRecord

__all__ = ["Entry", "format_json", "format_size", "format_table", "read"]

_COLUMNS = ("rank", "device", "peak allocated", "peak reserved", "of", "retries", "fits")


class Entry(NamedTuple):
    """A rank and device: an entry of the JSON. A failure's fields are those of `OutOfMemory`."""

    rank: int
    device: int
    peak_allocated: int
    peak_reserved: int
    total: int
    retries: int
    fits: bool
    out_of_memory: OutOfMemory | None
    exit_status: int | None


def read(reports: Path, exit_status: int | None) -> list[Entry]:
    """Return an entry for each rank and device.

    Args:
        reports: The folder of the processes' records.
        exit_status: The status of the command, which is its rank's if there is one; None while it runs.
    """
    records = read_records(reports)
    # A process that compiles for a rank initializes CUDA too, and uses no memory.
    users = {record.rank for record, _ in records if _uses_memory(record)}
    entries: list[Entry] = []
    for record, own_status in records:
        if record.rank not in users or _uses_memory(record):
            status = exit_status if exit_status is not None and len(records) == 1 else own_status
            entries += [_entry(record.rank, device, status) for device in record.devices]
    return sorted(entries, key=lambda entry: (entry.rank, entry.device))


def _uses_memory(record: ProcessRecord) -> bool:
    return any(device.statistics.has_use for device in record.devices)


def _entry(rank: int, device: DeviceRecord, exit_status: int | None) -> Entry:
    figures = device.statistics
    return Entry(
        rank=rank,
        device=device.device,
        peak_allocated=figures.allocated,
        peak_reserved=figures.reserved,
        total=device.total,
        retries=figures.retries,
        fits=figures.ooms == 0,
        out_of_memory=device.out_of_memory,
        exit_status=exit_status,
    )


def format_json(entries: list[Entry]) -> str:
    """Return the document of ``--json``."""
    ranks = [{**entry._asdict(), "out_of_memory": entry.out_of_memory and entry.out_of_memory._asdict()} for entry in entries]
    return json.dumps({"schema": 1, "ranks": ranks}, indent=2) + "\n"


def format_size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def format_table(entries: list[Entry]) -> str:
    """Return the table, and a line for each rank that does not fit or that failed for another reason."""
    if not entries:
        return "rehearsal: no process initialized CUDA or a process group\n"
    rows = [
        (
            str(entry.rank),
            f"cuda:{entry.device}",
            *map(format_size, (entry.peak_allocated, entry.peak_reserved, entry.total)),
            str(entry.retries),
            "yes" if entry.fits else "no",
        )
        for entry in entries
    ]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (_COLUMNS, *rows)]
    for entry in entries:
        failure = entry.out_of_memory
        if failure is not None:
            where = f" at {failure.where}" if failure.where else ""
            lines.append(
                f"rank {entry.rank}, cuda:{entry.device} is out of memory: {failure.op}{where}\n"
                f"  asked for {format_size(failure.requested)}, and {format_size(failure.free)} were free"
            )
    too_large = {entry.rank for entry in entries if not entry.fits}
    failed = {entry.rank: entry.exit_status for entry in entries if entry.exit_status != 0}
    for rank, status in failed.items():
        if rank not in too_large:
            end = "was ended by a signal" if status is None else f"ended with status {status}"
            lines.append(f"rank {rank} {end}: its figures are those until then")
    return "\n".join(lines) + "\n"
