"""What ``python -m accelerator`` tells: what this machine has, as a dictionary."""

from __future__ import annotations

import datetime
import os
import platform
import socket
import sys
from types import ModuleType
from typing import Any

from .. import __version__, discovery, monitoring, simulation
from .._machine import description, discovery_cache, driver, grammar, nvml, process, torch_build
from .._machine.discovery_result import DiscoveredDevice, Failed, NotSupported

SCHEMA = 1

# How a variable was read that decides nothing here.
UNREAD = "not read, as this torch has no use for it"


def collect(*, strict: bool = False) -> dict[str, Any]:
    """All that the report says, in types that JSON has; what is not known is None.

    Args:
        strict: also let a child process try each device.
    """
    build = torch_build.read()
    cuda = discovery.driver_cuda_version()
    devices = discovery.visible_devices()
    available = discovery.is_available(strict=strict)
    usable = _usable(devices) if strict else None
    return {
        "schema": SCHEMA,
        "version": __version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "torch": build and {"version": build.version, "cuda": build.cuda, "hip": build.hip},
        "accelerator": torch_build.accelerator_type(),
        "available": available,
        "unavailable_reason": discovery.unavailable_reason(strict=strict),
        "initialized": discovery.is_initialized(),
        "fork_safe": discovery.is_fork_safe(),
        "simulated": simulation.is_simulated(),
        "driver": {"version": discovery.driver_version(), "cuda": cuda and ".".join(map(str, cuda))},
        "nvml": _nvml(),
        "environment": _environment(),
        "devices": [_device(device, usable) for device in devices],
        "hidden": [_hidden(device) for device in discovery.physical_devices() if device.visible_index is None],
    }


def _usable(devices: tuple[discovery.VisibleDevice, ...]) -> set[int]:
    return {device.index for device in discovery.usable_devices()} if devices else set()


def _nvml() -> dict[str, Any]:
    try:
        nvml.gpus()
    except (Failed, NotSupported) as error:
        return {"available": False, "problem": str(error)}
    return {"available": True, "problem": None}


def _device(device: discovery.VisibleDevice, usable: set[int] | None) -> dict[str, Any]:
    now = monitoring.telemetry(device.index)
    return {
        "index": device.index,
        "physical_index": device.physical_index,
        "name": device.name,
        "uuid": device.uuid,
        "pci_bus_id": device.pci_bus_id,
        "compute_capability": device.compute_capability and list(device.compute_capability),
        "total_memory": device.total_memory,
        "memory_used": now.device_memory_used,
        "utilization": now.utilization,
        "memory_usage": now.memory_usage,
        "temperature": now.temperature,
        "memory_temperature": now.memory_temperature,
        "power_draw": now.power_draw,
        "power_limit": now.power_limit,
        "fan_speed": now.fan_speed,
        "clock_rate": now.clock_rate,
        "throttled": now.throttled,
        "numa_node": discovery.numa_node(device.index),
        "mig": device.mig and list(device.mig),
        "usable": None if usable is None else device.index in usable,
        "processes": None if now.processes is None else [_process(process) for process in now.processes],
        "problem": _problem(device.index, now),
    }


def _process(process: monitoring.Process) -> dict[str, Any]:
    return {"pid": process.pid, "name": process.name, "user": _user(process.pid), "memory_used": process.memory_used}


def _user(pid: int) -> str | None:
    """Who started a process of this host; None where it is not to be seen here."""
    if sys.platform == "win32":
        return None
    import pwd

    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:  # a user of another container
        return str(owner)


# How the fields of telemetry are called where they are read.
_FIELDS = {
    "utilization": "utilization",
    "memory_usage": "memory_usage",
    "temperature": "temperature",
    "memory_temperature": "memory_temperature",
    "power_draw": "power_draw",
    "power_limit": "power_limit",
    "fan_speed": "fan_speed",
    "clock_rate": "clock_rate",
    "throttled": "throttled",
    "processes": "processes",
}


def _problem(index: int, now: monitoring.Telemetry) -> str | None:
    """Why something is not known of a device that it should tell; that a device has no such thing is no problem."""
    found = discovery_cache.current()
    device = found.devices[index]
    if device.gpu is None:
        return None
    try:
        description.memory(device, found.backend)
        for field, called in _FIELDS.items():
            if getattr(now, field) is None:
                _try(device, found.backend, called)
    except Failed as error:
        return str(error)
    return device.gpu.problem


def _try(device: DiscoveredDevice, backend: ModuleType | None, field: str) -> None:
    try:
        description.read(device, backend, field)
    except NotSupported:
        pass


def _hidden(device: discovery.PhysicalDevice) -> dict[str, Any]:
    return {
        "physical_index": device.index,
        "name": device.name,
        "uuid": device.uuid,
        "pci_bus_id": device.pci_bus_id,
        "total_memory": device.total_memory,
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
        return UNREAD
    if driver.device_count() is not None:
        return "not followed any more: the driver of this process read it when it was initialized"
    if name == "CUDA_DEVICE_ORDER":
        return "devices in the order of their PCI bus" if value == "PCI_BUS_ID" else "the fastest device first"
    selection = discovery_cache.current().selection
    if selection is None or rocm:
        return f"read by {discovery_cache.current().source}"
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
