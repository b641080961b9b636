"""What ``python -m accelerator`` prints: what this machine has, as a dictionary and as text."""

from __future__ import annotations

import os
import platform
from typing import Any

import accelerator

from .. import discovery, monitoring, simulation
from .._machine import answer, driver, grammar, process, torch_build


def collect() -> dict[str, Any]:
    """All that the report says, in types that JSON has; what is not known is None."""
    build = torch_build.read()
    devices = discovery.visible_devices()
    cuda = discovery.driver_cuda_version()
    return {
        "version": accelerator.__version__,
        "python": platform.python_version(),
        "torch": build and {"version": build.version, "cuda": build.cuda, "hip": build.hip},
        "accelerator": torch_build.accelerator_type(),
        "available": discovery.is_available(),
        "unavailable_reason": discovery.unavailable_reason(),
        "initialized": discovery.is_initialized(),
        "fork_safe": discovery.is_fork_safe(),
        "simulated": simulation.is_simulated(),
        "driver": {"version": discovery.driver_version(), "cuda": cuda and ".".join(map(str, cuda))},
        "environment": _environment(),
        "devices": [_device(device) for device in devices],
    }


def _device(device: discovery.VisibleDevice) -> dict[str, Any]:
    now = monitoring.telemetry(device.index)
    return {
        "index": device.index,
        "name": device.name,
        "uuid": device.uuid,
        "pci_bus_id": device.pci_bus_id,
        "compute_capability": device.compute_capability and list(device.compute_capability),
        "total_memory": device.total_memory,
        "memory_used": now.device_memory_used,
        "utilization": now.utilization,
        "temperature": now.temperature,
        "power_draw": now.power_draw,
        "clock_rate": now.clock_rate,
        "mig": device.mig and list(device.mig),
    }


def _environment() -> dict[str, dict[str, str]]:
    """Each variable that was read and is set, with how it was read."""
    readings = {name: _reading(name) for name in process.ENVIRONMENT if name in os.environ}
    return {name: {"value": os.environ[name], "reading": reading} for name, reading in readings.items()}


def _reading(name: str) -> str:
    value = os.environ[name]
    if name == "ACCELERATOR_BACKEND":
        return "the accelerator is left out of use" if value == "cpu" else "ignored: only 'cpu' means something"
    rocm = torch_build.is_rocm()
    unread = ("CUDA_DEVICE_ORDER",) if rocm else ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    if torch_build.accelerator_type() != "cuda" or name in unread:
        return "not read, as this torch has no use for it"
    if driver.device_count() is not None:
        return "not followed any more: the driver of this process read it when it was initialized"
    if name == "CUDA_DEVICE_ORDER":
        return "devices in the order of their PCI bus" if value == "PCI_BUS_ID" else "the fastest device first"
    selection = answer.now().selection
    if selection is None or rocm:
        return f"read by {answer.now().source}"
    return _explained(selection)


def _explained(selection: grammar.Selection) -> str:
    """The list entry by entry, as in "'0' is cuda:0, '2' is cuda:1, '-1' is negative, which ends the list"."""
    if not selection.entries:
        return "no device"
    said: list[str] = []
    for entry in selection.entries:
        if entry.problem:
            said.append(f"{entry.text!r} {entry.problem}")
        elif entry.target is None:
            said.append(f"{entry.text!r} is not looked at")
        elif entry.target in selection.targets:
            said.append(f"{entry.text!r} is cuda:{selection.targets.index(entry.target)}")
        else:
            said.append(f"{entry.text!r} is left out, as a process sees a single MIG instance")
    return ", ".join(said)


def processes() -> list[tuple[monitoring.Process, ...]]:
    """The processes on each visible device; none where the device does not report them."""
    return [monitoring.telemetry(index).processes or () for index in range(discovery.device_count())]


def render(facts: dict[str, Any], processes: list[tuple[monitoring.Process, ...]]) -> str:
    """The report as text, of what the two functions above collected."""
    lines = [_versions(facts), _driver_line(facts), _state(facts)]
    lines += [f"{name}={entry['value']!r}: {entry['reading']}" for name, entry in facts["environment"].items()]
    if facts["devices"]:
        lines += ["", *_table(facts["devices"], processes)]
    return "\n".join(line for line in lines if line is not None) + "\n"


def _versions(facts: dict[str, Any]) -> str:
    torch = facts["torch"]
    if torch is None:
        built = "no torch"
    else:
        platform_of = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else None
        built = f"torch {torch['version']} built for {platform_of or facts['accelerator'] or 'the CPU'}"
    return f"accelerator {facts['version']}, Python {facts['python']}, {built}"


def _driver_line(facts: dict[str, Any]) -> str | None:
    version, cuda = facts["driver"]["version"], facts["driver"]["cuda"]
    if version is None and cuda is None:
        return None
    simulated = " (simulated)" if facts["simulated"] else ""
    return f"NVIDIA driver {version or 'unknown'}, up to CUDA {cuda or 'unknown'}{simulated}"


def _state(facts: dict[str, Any]) -> str:
    if facts["available"]:
        count = len(facts["devices"])
        state = f"available: {count} {facts['accelerator']} {'device' if count == 1 else 'devices'}"
    else:
        state = f"not available: {facts['unavailable_reason']}"
    initialized = "initialized" if facts["initialized"] else "not initialized"
    return f"{state}\n{initialized} in this process; fork is {'safe' if facts['fork_safe'] else 'not safe'}"


_COLUMNS = ("index", "name", "memory", "busy", "temp", "power", "clock", "PCI bus", "MIG", "processes")


def _table(devices: list[dict[str, Any]], processes: list[tuple[monitoring.Process, ...]]) -> list[str]:
    rows = [_COLUMNS, *(_row(*row) for row in zip(devices, processes, strict=True))]
    used = [i for i in range(len(_COLUMNS)) if any(row[i] for row in rows[1:])]
    widths = {i: max(len(row[i]) for row in rows) for i in used}
    return ["  ".join(row[i].ljust(widths[i]) for i in used).rstrip() for row in rows]


def _row(device: dict[str, Any], processes: tuple[monitoring.Process, ...]) -> tuple[str, ...]:
    used, total = device["memory_used"], device["total_memory"]
    memory = "" if total is None else f"{_gib(used)} of {_gib(total)} GiB"
    mig = "/".join(map(str, device["mig"])) if device["mig"] else ""
    return (
        str(device["index"]),
        device["name"],
        memory,
        _with_unit(device["utilization"], "%"),
        _with_unit(device["temperature"], "°C"),
        _with_unit(device["power_draw"] and device["power_draw"] // 1000, "W"),
        _with_unit(device["clock_rate"], "MHz"),
        device["pci_bus_id"] or "",
        mig,
        ", ".join(_process_text(process) for process in processes),
    )


def _process_text(process: monitoring.Process) -> str:
    name = f" {os.path.basename(process.name)}" if process.name else ""
    used = "" if process.memory_used is None else f" ({_gib(process.memory_used)} GiB)"
    return f"{process.pid}{name}{used}"


def _gib(size: int | None) -> str:
    return "?" if size is None else f"{size / 2**30:.1f}"


def _with_unit(value: int | None, unit: str) -> str:
    return "" if value is None else f"{value} {unit}"
