"""The report as a person reads it: text of 80 columns."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from typing import Any

from .report import UNREAD
from .terminal import WIDTH, styled

_NAME_WIDTH = 24


def draw(facts: dict[str, Any], *, color: bool = False, brief: bool = False) -> str:
    """The report as text.

    Args:
        facts: what ``report.collect`` gave.
        color: with a terminal's colors.
        brief: without what does not change, as for a report that is printed again and again.
    """
    blocks = [_heading(facts, color)]
    if facts["devices"]:
        blocks.append(_activity(facts["devices"], color))
        if not brief:
            blocks.append(_identity(facts["devices"], color))
    blocks.append(_processes(facts["devices"], color))
    blocks.append(_hidden(facts, color))
    return "\n".join("\n".join(block) + "\n" for block in blocks if block)


def _heading(facts: dict[str, Any], color: bool) -> list[str]:
    count = len(facts["devices"])
    when = facts["time"][:19].replace("T", " ")
    lines = [styled(line, "bold", color) for line in wrapped(f"accelerator {facts['version']} on {facts['host']}, {when}")]
    lines += wrapped(_versions(facts))
    lines += wrapped(_driver(facts))
    if facts["available"]:
        text = f"available: {count} {facts['accelerator']} {'device' if count == 1 else 'devices'}"
        lines += [styled(line, "green", color) for line in wrapped(text)]
    else:
        lines += [styled(line, "red", color) for line in wrapped(f"not available: {facts['unavailable_reason']}")]
    for name, entry in facts["environment"].items():
        lines += wrapped(f"{name}={entry['value']!r}: {entry['reading']}")
    problem = facts["nvml"]["problem"]
    if problem and (count or problem not in (facts["unavailable_reason"] or "")) and _concerns_nvidia(facts):
        lines += [styled(line, "red", color) for line in wrapped(f"NVML does not answer: {problem}")]
    for device in facts["devices"]:
        if device["problem"]:
            lines += [styled(line, "red", color) for line in wrapped(f"cuda:{device['index']}: {device['problem']}")]
    return lines


def _concerns_nvidia(facts: dict[str, Any]) -> bool:
    return bool(facts["torch"] and facts["torch"]["cuda"])


def _versions(facts: dict[str, Any]) -> str:
    torch = facts["torch"]
    if torch is None:
        return f"Python {facts['python']}, no torch"
    platform_of = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else None
    built = f"torch {torch['version']} built for {platform_of or facts['accelerator'] or 'the CPU'}"
    return f"Python {facts['python']}, {built}"


def _driver(facts: dict[str, Any]) -> str:
    version, cuda = facts["driver"]["version"], facts["driver"]["cuda"]
    known = f"NVIDIA driver {version or 'unknown'}, up to CUDA {cuda or 'unknown'}" if version or cuda else ""
    return f"{known or 'GPUs'} (simulated)" if facts["simulated"] else known


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent="    ", break_on_hyphens=False)


def _activity(devices: list[dict[str, Any]], color: bool) -> list[str]:
    heading = ("GPU", "name", "memory", "busy", "temp", "power", "clock", "")
    return table([heading, *(_now(device) for device in devices)], "><>>>>><", color)


def _now(device: dict[str, Any]) -> tuple[str, ...]:
    total, state = device["total_memory"], []
    if device["throttled"]:
        state.append("slow")
    if device["usable"] is False:
        state.append("dead")
    return (
        str(device["index"]),
        shortened(device["name"], _NAME_WIDTH),
        "" if total is None else f"{_gib(device['memory_used'])} of {_gib(total)} GiB",
        _with_unit(device["utilization"], "%"),
        _with_unit(device["temperature"], "°C"),
        _power(device["power_draw"], device["power_limit"]),
        _with_unit(device["clock_rate"], "MHz"),
        " ".join(state),
    )


def _identity(devices: list[dict[str, Any]], color: bool) -> list[str]:
    heading = ("GPU", "PCI bus", "CC", "NUMA", "MIG", "UUID")
    rows = [
        (
            str(device["index"]),
            device["pci_bus_id"] or "",
            ".".join(map(str, device["compute_capability"] or ())),
            _with_unit(device["numa_node"], ""),
            "/".join(map(str, device["mig"] or ())),
            device["uuid"] or "",
        )
        for device in devices
    ]
    return table([heading, *rows], "><>>><", color)


def _processes(devices: list[dict[str, Any]], color: bool) -> list[str]:
    rows = [
        (
            str(device["index"]),
            str(process["pid"]),
            shortened(process["user"] or "", 12),
            "" if process["memory_used"] is None else f"{_gib(process['memory_used'])} GiB",
            os.path.basename(process["name"] or "").partition(" ")[0],
        )
        for device in devices
        for process in device["processes"] or ()
    ]
    heading = ("GPU", "PID", "user", "memory", "process")
    return table([heading, *rows], ">><><", color) if rows else []


def _hidden(facts: dict[str, Any], color: bool) -> list[str]:
    """What this process does not see, and why: one line for each reason."""
    with_instances = {device["physical_index"] for device in [*facts["hidden"], *facts["devices"]] if device["mig"]}
    by_mig = [device for device in facts["hidden"] if device["physical_index"] in with_instances and not device["mig"]]
    others = [device for device in facts["hidden"] if device not in by_mig]
    lines: list[str] = []
    if by_mig:
        lines += wrapped(f"in MIG instances: {', '.join(map(_called, by_mig))}")
    if others:
        read = [name for name, entry in facts["environment"].items() if entry["reading"] != UNREAD]
        why = next((name for name in read if name.endswith("VISIBLE_DEVICES")), None)
        because = f"by {why}" if why else "from this torch" if not facts["devices"] else "as a process sees one MIG instance"
        lines += wrapped(f"hidden {because}: {', '.join(map(_called, others))}")
    return [styled(line, "dim", color) for line in lines]


def _called(device: dict[str, Any]) -> str:
    instance = f" MIG {device['mig'][0]}/{device['mig'][1]}" if device["mig"] else ""
    return f"GPU {device['physical_index']}{instance} ({device['name']})"


def table(rows: Sequence[tuple[str, ...]], alignment: str, color: bool) -> list[str]:
    """Rows below their headings in columns as wide as they need, without the columns in which there is nothing."""
    used = [i for i in range(len(alignment)) if any(row[i] for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in used}
    lines = ["  ".join(f"{row[i]:{alignment[i]}{widths[i]}}" for i in used).rstrip() for row in rows]
    return [styled(lines[0], "bold", color), *lines[1:]]


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _gib(size: int | None) -> str:
    return "?" if size is None else f"{size / 2**30:.1f}"


def _power(draw: int | None, limit: int | None) -> str:
    if draw is None:
        return ""
    return f"{draw // 1000} W" if limit is None else f"{draw // 1000}/{limit // 1000} W"


def _with_unit(value: int | None, unit: str) -> str:
    return "" if value is None else f"{value} {unit}".rstrip()
