"""Makes entries of the records of a rehearsal's processes, and formats them as a table and as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from ..simulation._settings.known_gpus import smallest
from ..simulation._settings.rehearsal_record import CATEGORIES, MissingValue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..simulation._settings.rehearsal_record import DeviceRecord, OutOfMemory, Peak, Rank

_COLUMNS = ("rank", "device", "peak allocated", "peak reserved", "of", "peak host", "retries", "fits")
_NAMED_PLACES = 3
_AT_THE_PEAK = 0.999
"""Part of the peak that a breakdown must have to be that of the peak: the rest are a few small tensors."""
_OUTSIDE = 2**30
"""Bytes that the CUDA context, nccl and cuDNN take of a GPU at least, outside of torch's allocator."""


class Entry(NamedTuple):
    """A rank and device: an entry of the JSON. A failure's fields are those of `OutOfMemory`, a peak's are words of `Peak`."""

    rank: int
    device: int
    peak_allocated: int
    peak_reserved: int
    total: int
    peak_host: int
    retries: int
    fits: bool
    out_of_memory: OutOfMemory | None
    exit_status: int | None
    ran_out: bool = False  # of the memory beyond the GPU's, too
    peak: Peak | None = None

    @property
    def goes_on(self) -> bool:
        """Whether the program ran on beyond the memory of the GPU, so that the peaks are what it needs."""
        return self.out_of_memory is not None and self.peak_reserved > self.total

    @property
    def is_tight(self) -> bool:
        """Whether what torch does not report may not fit beside the peak. Small GPUs are tests' own."""
        return self.fits and self.total - self.peak_reserved < min(_OUTSIDE, self.total // 16)

    @property
    def smallest_gpu(self) -> str | None:
        """The smallest known GPU that has what the program reserved at its peak; None if none has, or if it needs more."""
        return None if self.ran_out else smallest(self.peak_reserved)


def entries_of(ranks: Sequence[Rank], exit_status: int) -> list[Entry]:
    """Return an entry for each rank and device.

    Args:
        ranks: The ranks of one run of the command, by number.
        exit_status: The status of the command, which is its rank's if there is one.
    """
    entries: list[Entry] = []
    for rank in ranks:
        status = exit_status if len(ranks) == 1 else rank.status
        entries += [_entry(rank, device, status) for device in rank.record.devices]
    return sorted(entries, key=lambda entry: (entry.rank, entry.device))


def _entry(rank: Rank, device: DeviceRecord, status: int | None) -> Entry:
    figures = device.statistics
    return Entry(
        rank=rank.rank,
        device=device.device,
        peak_allocated=figures.allocated,
        peak_reserved=figures.reserved,
        total=device.total,
        peak_host=rank.record.peak_host,
        retries=figures.retries,
        fits=figures.ooms == 0 and device.out_of_memory is None,
        out_of_memory=device.out_of_memory,
        exit_status=status,
        ran_out=figures.ooms > 0,
        peak=device.peak,
    )


def values_of(ranks: Sequence[Rank]) -> list[MissingValue]:
    """Return the places of all ranks where values mattered that a rehearsal does not have."""
    counts: dict[tuple[str, str | None], int] = {}
    for rank in ranks:
        for op, where, times in rank.record.values:
            counts[op, where] = counts.get((op, where), 0) + times
    return [MissingValue(op, where, times) for (op, where), times in counts.items()]


def format_json(entries: list[Entry], values: list[MissingValue]) -> str:
    """Return the document of ``--json``."""
    ranks = [_plain(entry) for entry in entries]
    places = [{"op": value.op, "where": value.where, "count": value.times} for value in values]
    return json.dumps({"schema": 1, "ranks": ranks, "values": places}, indent=2) + "\n"


def _plain(entry: Entry) -> dict[str, Any]:
    fields = entry._asdict()
    peak = fields.pop("peak")
    del fields["ran_out"]
    return {
        **fields,
        "out_of_memory": entry.out_of_memory and entry.out_of_memory._asdict(),
        "smallest_gpu": entry.smallest_gpu,
        "peak": peak
        and {
            "where": peak.where,
            "allocated": peak.allocated,
            "held": dict(zip(CATEGORIES, peak.held, strict=True)),
            "lines": [{"where": where, "bytes": size} for where, size in peak.lines],
        },
    }


def format_size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def format_table(entries: list[Entry], values: list[MissingValue]) -> str:
    """Return the table, and a line for each rank that does not fit or failed for another reason, and one for missing values."""
    if not entries:
        return "rehearsal: no process initialized CUDA or a process group\n"
    rows = [
        (
            str(entry.rank),
            f"cuda:{entry.device}",
            *map(format_size, (entry.peak_allocated, entry.peak_reserved, entry.total, entry.peak_host)),
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
            lines += _format_need(entry)
    lines += [
        f"rank {entry.rank}, cuda:{entry.device} leaves {format_size(entry.total - entry.peak_reserved)}: "
        "the CUDA context, nccl and cuDNN take 1 to 2 GiB on a GPU"
        for entry in entries
        if entry.is_tight
    ]
    too_large = {entry.rank for entry in entries if not entry.fits}
    failed = {entry.rank: entry.exit_status for entry in entries if entry.exit_status != 0}
    for rank, status in failed.items():
        if rank not in too_large:
            by_signal = "was ended by a signal: its figures may lack the last second"
            by_itself = f"ended with status {status}: its figures are those until then"
            lines.append(f"rank {rank} {by_signal if status is None else by_itself}")
    if values:
        lines.append(_format_values(values))
    return "\n".join(lines) + "\n"


def _format_need(entry: Entry) -> list[str]:
    """Return the lines that say what a program needs that does not fit."""
    lines: list[str] = []
    if entry.goes_on:
        name = entry.smallest_gpu
        has_it = f"the smallest known GPU with that is {name}" if name else "no known GPU has that"
        least, size = format_size(entry.peak_allocated), format_size(entry.peak_reserved)
        needed = size if least == size else f"{least.removesuffix(' GiB')} to {size}"
        lines.append(f"  it went on and needs {f'more than {size}' if entry.ran_out else f'{needed}: {has_it}'}")
    if entry.peak is not None:
        is_peak = entry.peak.allocated >= entry.peak_allocated * _AT_THE_PEAK
        moment = "at the peak" if is_peak else f"near the peak, with {format_size(entry.peak.allocated)}"
        lines.append(f"  {moment}{f', at {entry.peak.where}' if entry.peak.where else ''}, it held")
        held = [*zip(CATEGORIES, entry.peak.held, strict=True)]
        lines += [f"    {format_size(size).rjust(10)}  {name}" for name, size in held if size]
        lines.append("  of which most comes from")
        lines += [f"    {format_size(size).rjust(10)}  {where}" for where, size in entry.peak.lines]
    return lines


def _format_values(values: list[MissingValue]) -> str:
    """Return the line that says where values mattered that a rehearsal does not have."""
    places = f"{len(values)} places" if len(values) > 1 else "1 place"
    named = ", ".join(f"{value.op} at {value.where or 'an unknown line'}" for value in values[:_NAMED_PLACES])
    more = f" and {len(values) - _NAMED_PLACES} more" if len(values) > _NAMED_PLACES else ""
    return f"values that were not computed decided at {places} what follows, or may have: {named}{more}"
