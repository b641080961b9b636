"""The report as text of 60 to 80 columns."""

from __future__ import annotations

import itertools
import os
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from .report import UNREAD
from .terminal import styled, width

_BAR_WIDTH, _SHORTEST_BAR = 12, len("memory")

# Shares of the device memory, and degrees Celsius, from which a figure is marked as high and as critical.
_MEMORY_LEVELS = 0.75, 0.95
_TEMPERATURE_LEVELS = 75, 85


class Cell(NamedTuple):
    """A cell of a table: its text, and its style if the report has colors."""

    text: str
    style: str | None = None


def format_report(facts: dict[str, Any], *, color: bool = False, brief: bool = False, selected: bool = False) -> str:
    """Format a report.

    Args:
        facts: the result of ``report.collect``.
        color: whether to write a terminal's colors.
        brief: whether to leave out what does not change, as for a report that is printed repeatedly.
        selected: whether the facts hold a selection of the visible devices only.
    """
    blocks = [_heading(facts, color, selected)]
    if facts["devices"]:
        blocks.append(_activity(facts["devices"], color))
        if not brief:
            blocks += [_identity(facts["devices"], color), _uuids(facts["devices"], color)]
    blocks.append(_processes(facts["devices"], color))
    blocks.append(_hidden(facts, color))
    return "\n".join("\n".join(block) + "\n" for block in blocks if block)


def _heading(facts: dict[str, Any], color: bool, selected: bool) -> list[str]:
    when = facts["time"][:19].replace("T", " ")
    lines = _styled(f"accelerator {facts['version']} on {facts['host']}, {when}", "bold", color)
    lines += wrapped(_versions(facts))
    lines += wrapped(_driver(facts))
    lines += _availability(facts, color, selected)
    for name, entry in facts["environment"].items():
        lines += wrapped(f"{name}={entry['value']!r}: {entry['reading']}")
    problem = facts["nvml"]["problem"]
    is_reason = not facts["devices"] and problem and problem in (facts["unavailable_reason"] or "")
    concerns_nvml = facts["torch"] and facts["torch"]["cuda"] and facts["accelerator"] in (None, "cuda")
    if problem and not is_reason and concerns_nvml:
        lines += _styled(f"NVML does not answer: {problem}", "red", color)
    for device in facts["devices"]:
        if device["problem"]:
            lines += _styled(f"{facts['accelerator']}:{device['index']}: {device['problem']}", "red", color)
    return lines


def _availability(facts: dict[str, Any], color: bool, selected: bool) -> list[str]:
    if not facts["available"]:
        return _styled(f"not available: {facts['unavailable_reason']}", "red", color)
    devices = facts["devices"]
    text = f"available: {len(devices)} {facts['accelerator']} {'device' if len(devices) == 1 else 'devices'}"
    text += " selected" if selected else ""
    if any(device["usable"] is not None for device in devices):
        return _styled(f"{text}, each tried in a child process", "green", color)
    if facts["initialized"]:
        return _styled(text, "green", color)
    return wrapped(f"{text} (listed, not tried: --strict tries them)")


def _styled(text: str, style: str, color: bool) -> list[str]:
    return [styled(line, style, color) for line in wrapped(text)]


def _versions(facts: dict[str, Any]) -> str:
    torch = facts["torch"]
    if torch is None:
        return f"Python {facts['python']}, no torch"
    platform = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else None
    return f"Python {facts['python']}, torch {torch['version']} built for {platform or facts['accelerator'] or 'the CPU'}"


def _driver(facts: dict[str, Any]) -> str:
    version, cuda = facts["driver"]["version"], facts["driver"]["cuda"]
    if version or cuda:
        text = f"NVIDIA driver {version or 'unknown'}, up to CUDA {cuda or 'unknown'}"
        return f"{text} (simulated)" if facts["simulated"] else text
    return "simulated GPUs, driver version unknown" if facts["simulated"] else ""


def wrapped(text: str) -> list[str]:
    """The text in lines of the report's width, the second and later ones indented."""
    return textwrap.wrap(text, width(), subsequent_indent="    ", break_on_hyphens=False)


def _activity(devices: list[dict[str, Any]], color: bool) -> list[str]:
    rows = [_activity_of(device) for device in devices]
    if not any(cell.text for row in rows for cell in row[1:]):  # for some accelerators no library reports figures
        return []
    heading, alignment = ("GPU", "memory", "busy", "temp", "power", "clock", ""), ">>>>>><"
    lines = table([heading, *rows], alignment, color)
    # A bar fills the room that is left. Lines are measured without colors.
    room = width() - 2 - max(map(len, table([heading, *rows], alignment, color=False)))
    bars = [_bar(device, min(room, _BAR_WIDTH)) for device in devices]
    if "" in lines or room < _SHORTEST_BAR or not any(bar.text for bar in bars):
        return lines
    with_bars = [(row[0], bar, *row[1:]) for row, bar in zip(rows, bars, strict=True)]
    return table([("GPU", "memory", "", *heading[2:]), *with_bars], "><>>>>><", color)


def _activity_of(device: dict[str, Any]) -> tuple[Cell, ...]:
    used, total = device["memory_used"], device["total_memory"]
    state = [text for text, shown in (("slow", device["throttled"]), ("dead", device["usable"] is False)) if shown]
    if device["recovery_action"] not in (None, "none"):
        state.append(f"to {device['recovery_action'].removeprefix('drain and ')}")
    return (
        Cell(str(device["index"])),
        Cell("" if total is None else f"{_gib(used)} of {_gib(total)} GiB", _level(_share(device), *_MEMORY_LEVELS)),
        Cell(_with_unit(device["utilization"], "%")),
        Cell(_with_unit(device["temperature"], "°C"), _level(device["temperature"], *_TEMPERATURE_LEVELS)),
        Cell(_power(device["power_draw"], device["power_limit"])),
        Cell(_with_unit(device["clock_rate"], "MHz")),
        Cell(" ".join(state), "red"),
    )


def _share(device: dict[str, Any]) -> float | None:
    used, total = device["memory_used"], device["total_memory"]
    return used / total if used is not None and total else None


def _level(value: float | None, high: float, critical: float) -> str | None:
    if value is None or value < high:
        return None
    return "red" if value >= critical else "yellow"


def _bar(device: dict[str, Any], length: int) -> Cell:
    share = _share(device)
    if share is None:
        return Cell("")
    filled = min(round(share * length), length)
    # A device in use never looks empty, and one with free memory never looks full.
    filled = max(filled, 1) if share > 0 else filled
    filled = min(filled, length - 1) if share < 1 else filled
    return Cell("█" * filled + "░" * (length - filled), _level(share, *_MEMORY_LEVELS))


def _identity(devices: list[dict[str, Any]], color: bool) -> list[str]:
    heading = ("GPU", "name", "PCI bus", "CC", "NUMA", "MIG")
    rows = [
        (
            str(device["index"]),
            shortened(device["name"], width() - 41),
            device["pci_bus_id"] or "",
            ".".join(map(str, device["compute_capability"] or ())),
            _with_unit(device["numa_node"], ""),
            "/".join(map(str, device["mig"] or ())),
        )
        for device in devices
    ]
    return table([heading, *rows], "><>>>>", color)


def _uuids(devices: list[dict[str, Any]], color: bool) -> list[str]:
    rows = [(str(device["index"]), device["uuid"]) for device in devices if device["uuid"]]
    return table([("GPU", "UUID"), *rows], "><", color) if rows else []


def _processes(devices: list[dict[str, Any]], color: bool) -> list[str]:
    rows = [
        (
            str(device["index"]),
            str(process["pid"]),
            shortened(process["user"] or "", 12),
            "" if process["memory_used"] is None else f"{_gib(process['memory_used'])} GiB",
            shortened(os.path.basename(process["name"] or "").partition(" ")[0], width() - 40),
        )
        for device in devices
        for process in device["processes"] or ()
    ]
    heading = ("GPU", "PID", "user", "memory", "process")
    return table([heading, *rows], ">><><", color) if rows else []


def _hidden(facts: dict[str, Any], color: bool) -> list[str]:
    """The physical devices that this process does not see: one line for each reason."""
    with_instances = {device["physical_index"] for device in [*facts["hidden"], *facts["devices"]] if device["mig"]}
    by_mig = [device for device in facts["hidden"] if device["physical_index"] in with_instances and not device["mig"]]
    failed = [device for device in facts["hidden"] if device["problem"]]
    others = [device for device in facts["hidden"] if device not in (*by_mig, *failed)]
    lines: list[str] = []
    if by_mig:
        lines += wrapped(f"in MIG instances: {_physical_names(by_mig)}")
    if others:
        lines += wrapped(f"hidden {_hiding_reason(facts)}: {_physical_names(others)}")
    problems = [line for device in failed for line in wrapped(f"GPU {device['physical_index']} fails: {device['problem']}")]
    return [*_styled_all(lines, "dim", color), *_styled_all(problems, "red", color)]


def _styled_all(lines: list[str], style: str, color: bool) -> list[str]:
    return [styled(line, style, color) for line in lines]


def _hiding_reason(facts: dict[str, Any]) -> str:
    read = [name for name, entry in facts["environment"].items() if entry["reading"] != UNREAD]
    variable = next((name for name in read if name.endswith("VISIBLE_DEVICES")), None)
    if variable:
        return f"by {variable}"
    return "because a process sees only one MIG instance" if facts["devices"] else "from this torch"


def _physical_names(devices: list[dict[str, Any]]) -> str:
    """Name physical devices. The MIG instances of a GPU that have one name are named together."""
    texts: list[str] = []
    for (index, name), group in itertools.groupby(devices, lambda device: (device["physical_index"], device["name"])):
        instances = [f"{device['mig'][0]}/{device['mig'][1]}" for device in group if device["mig"]]
        texts.append(f"GPU {index}{' MIG ' if instances else ''}{', '.join(instances)} ({name})")
    return ", ".join(texts)


def table(rows: Sequence[Sequence[str | Cell]], alignment: str, color: bool) -> list[str]:
    """Format rows below a heading, in columns as wide as they need; columns without content are left out.

    Columns that do not fit follow in a further table, which begins with the first column again.
    """
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    widths = {i: max(len(row[i].text) for row in cells) for i in range(len(alignment)) if any(row[i].text for row in cells[1:])}
    first, *rest = widths
    parts = [[first]]
    for i in rest:
        if len(parts[-1]) > 1 and sum(widths[column] + 2 for column in parts[-1]) + widths[i] > width():
            parts.append([first])
        parts[-1].append(i)
    tables = [_table_of(columns, cells, widths, alignment, color) for columns in parts]
    return [line for lines in tables for line in (*lines, "")][:-1]


def _table_of(columns: list[int], cells: list[list[Cell]], widths: dict[int, int], alignment: str, color: bool) -> list[str]:
    heading = "  ".join(f"{cells[0][i].text:{alignment[i]}{widths[i]}}" for i in columns).rstrip()
    lines = [styled(heading, "bold", color)]
    for row in cells[1:]:
        # Trailing blanks are stripped before colors are added, whose codes would follow the blanks.
        last = max((i for i in columns if row[i].text), default=columns[0])
        padded = [
            styled(
                row[i].text.rstrip() if i == last and alignment[i] == "<" else f"{row[i].text:{alignment[i]}{widths[i]}}",
                row[i].style,
                color,
            )
            for i in columns
            if i <= last
        ]
        lines.append("  ".join(padded))
    return lines


def shortened(text: str, width: int) -> str:
    """The text within a width: cut in the middle, since names often differ only at the end."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def _gib(size: int | None) -> str:
    return "?" if size is None else f"{size / 2**30:.1f}"


def _power(draw: int | None, limit: int | None) -> str:
    if draw is None:
        return ""
    return f"{draw // 1000} W" if limit is None else f"{draw // 1000}/{limit // 1000} W"


def _with_unit(value: int | None, unit: str) -> str:
    return "" if value is None else f"{value} {unit}".rstrip()
