"""Reads what the processes of a rehearsal recorded, and formats the table."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["format_size", "format_table", "read"]

_COLUMNS = ("rank", "device", "peak allocated", "peak reserved", "of", "retries", "fits")


def read(reports: Path, exit_status: int | None) -> list[dict[str, Any]]:
    """Return an entry for each rank and device.

    Args:
        reports: The folder with a file for each process, and one with its exit status if no signal ended it.
        exit_status: The status of the command, which is its rank's if there is one; None while it runs.
    """
    entries: list[dict[str, Any]] = []
    files = [file for file in reports.glob("*.json") if not file.name.endswith(".plot.json")]
    reports_read: list[dict[str, Any]] = [
        {**json.loads(file.read_text(encoding="utf-8")), "exit_status": _status(file)} for file in files
    ]
    # A process that compiles for a rank initializes CUDA too, and uses no memory.
    users = {report["rank"] for report in reports_read if _uses_memory(report)}
    for report in reports_read:
        if report["rank"] in users and not _uses_memory(report):
            continue
        status = exit_status if exit_status is not None and len(files) == 1 else report["exit_status"]
        entries += [_entry(report["rank"], device, status) for device in report["devices"]]
    return sorted(entries, key=lambda entry: (entry["rank"], entry["device"]))


def _uses_memory(report: dict[str, Any]) -> bool:
    return any(device["reserved"] or device["ooms"] for device in report["devices"])


def _status(report: Path) -> int | None:
    """Return the exit status of a process; None if it runs or a signal ended it."""
    file = report.with_suffix(".status")
    status = file.read_text(encoding="ascii") if file.exists() else ""
    return int(status) if status else None  # the process may be writing it


def _entry(rank: int, device: dict[str, Any], exit_status: int | None) -> dict[str, Any]:
    return {
        "rank": rank,
        "device": device["device"],
        "peak_allocated": device["allocated"],
        "peak_reserved": device["reserved"],
        "total": device["total"],
        "retries": device["retries"],
        "fits": device["ooms"] == 0,
        "out_of_memory": device["out_of_memory"],
        "exit_status": exit_status,
    }


def format_size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def format_table(entries: list[dict[str, Any]]) -> str:
    """Return the table, and a line for each rank that does not fit or that failed for another reason."""
    if not entries:
        return "rehearsal: no process initialized CUDA or a process group\n"
    rows = [
        (
            str(entry["rank"]),
            f"cuda:{entry['device']}",
            *(format_size(entry[name]) for name in ("peak_allocated", "peak_reserved", "total")),
            str(entry["retries"]),
            "yes" if entry["fits"] else "no",
        )
        for entry in entries
    ]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (_COLUMNS, *rows)]
    for entry in entries:
        failure = entry["out_of_memory"]
        if failure is not None:
            where = f" at {failure['where']}" if failure["where"] else ""
            lines.append(
                f"rank {entry['rank']}, cuda:{entry['device']} is out of memory: {failure['op']}{where}\n"
                f"  asked for {format_size(failure['requested'])}, and {format_size(failure['free'])} were free"
            )
    too_large = {entry["rank"] for entry in entries if not entry["fits"]}
    failed = {entry["rank"]: entry["exit_status"] for entry in entries if entry["exit_status"] != 0}
    for rank, status in failed.items():
        if rank not in too_large:
            end = "was ended by a signal" if status is None else f"ended with status {status}"
            lines.append(f"rank {rank} {end}: its figures are those until then")
    return "\n".join(lines) + "\n"
