"""The facts of the report: what this machine has, as a dictionary."""

from __future__ import annotations

import datetime
import os
import platform
import socket
import sys
from typing import Any

from .. import __version__, discovery, identity, monitoring, simulation
from .._machine import description, discovery_cache, driver, nvml, torch_build, vendors, visibility, visibility_variables
from .._machine.discovery_result import DiscoveredDevice, Failed, NotSupported, Reader

SCHEMA = 1

# The reading of a variable that has no effect here.
UNREAD = "not read, as this torch has no use for it"


class UnknownDevice(Exception):
    """An id names no visible device; the message says which."""


def collect(*, strict: bool = False, ids: str | None = None) -> dict[str, Any]:
    """Collect the facts of the report, in JSON's types; an unknown figure is None.

    Args:
        strict: whether to let a child process try each device.
        ids: indices or UUIDs of the devices to report, separated by commas; None for all visible devices.

    Raises:
        UnknownDevice: if an id names no visible device.
    """
    build = torch_build.read()
    cuda = identity.driver_cuda_version()
    devices = _selected(discovery.visible_devices(), ids)
    available = discovery.is_available(strict=strict)
    usable = _usable(devices) if strict else None
    return {
        "schema": SCHEMA,
        "version": __version__,
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "time": datetime.datetime.now().astimezone().isoformat(timespec="milliseconds"),
        "torch": build and {"version": build.version, "cuda": build.cuda, "hip": build.hip},
        "accelerator": discovery_cache.current().accelerator_type,
        "available": available,
        "unavailable_reason": discovery.unavailable_reason(strict=strict),
        "initialized": discovery.is_initialized(),
        "fork_safe": discovery.is_fork_safe(),
        "simulated": simulation.is_simulated(),
        "driver": {"version": identity.driver_version(), "cuda": cuda and ".".join(map(str, cuda))},
        "nvml": _nvml(),
        "environment": _environment(),
        "devices": [_device(device, usable) for device in devices],
        "hidden": [_hidden(device) for device in discovery.physical_devices() if device.visible_index is None],
    }


def _selected(devices: tuple[discovery.VisibleDevice, ...], ids: str | None) -> tuple[discovery.VisibleDevice, ...]:
    if ids is None:
        return devices
    by_id = {str(device.index): device for device in devices} | {device.uuid: device for device in devices if device.uuid}
    selected: dict[int, discovery.VisibleDevice] = {}
    for text in ids.split(","):
        device = by_id.get(text.strip())
        if device is None:
            raise UnknownDevice(f"--id {text.strip()!r} is no visible device; there are {len(devices)}, counted from 0")
        selected[device.index] = device
    return tuple(selected.values())


def _usable(devices: tuple[discovery.VisibleDevice, ...]) -> set[int]:
    return {device.index for device in discovery.usable_devices()} if devices else set()


def _nvml() -> dict[str, Any]:
    try:
        nvml.gpus()
    except (Failed, NotSupported) as error:
        return {"available": False, "problem": str(error)}
    return {"available": True, "problem": None}


def _device(device: discovery.VisibleDevice, usable: set[int] | None) -> dict[str, Any]:
    telemetry = monitoring.telemetry(device.index)
    return {
        "index": device.index,
        "physical_index": device.physical_index,
        "name": device.name,
        "uuid": device.uuid,
        "pci_bus_id": device.pci_bus_id,
        "compute_capability": device.compute_capability and list(device.compute_capability),
        "total_memory": device.total_memory,
        "memory_used": telemetry.device_memory_used,
        **{field: getattr(telemetry, field) for field in _FIELDS if field != "processes"},
        "numa_node": identity.numa_node(device.index),
        "mig": device.mig and list(device.mig),
        "usable": None if usable is None else device.index in usable,
        "processes": None if telemetry.processes is None else [_process(process) for process in telemetry.processes],
        "problem": _problem(device.index, telemetry),
    }


def _process(process: monitoring.Process) -> dict[str, Any]:
    return {"pid": process.pid, "name": process.name, "user": _user(process.pid), "memory_used": process.memory_used}


def _user(pid: int) -> str | None:
    """The user that a process of this host belongs to; None if the process cannot be seen from here."""
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


# The fields of telemetry that a backend reads by their names.
_FIELDS = tuple(field for field in monitoring.Telemetry._fields if field != "device_memory_used")


def _problem(index: int, telemetry: monitoring.Telemetry) -> str | None:
    """Why a figure of a device could not be read; a field that the device does not have is no problem."""
    result = discovery_cache.current()
    device = result.devices[index]
    if device.gpu is None:
        return None
    try:
        description.memory(device, result.backend)
        for field in _FIELDS:
            if getattr(telemetry, field) is None:
                _read(device, result.backend, field)
    except Failed as error:
        return str(error)
    return device.gpu.problem


def _read(device: DiscoveredDevice, backend: Reader | None, field: str) -> None:
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
        "problem": _hidden_problem(device),
    }


def _hidden_problem(device: discovery.PhysicalDevice) -> str | None:
    """Why NVML cannot list a GPU of the machine, such as one that is lost."""
    _, devices = discovery_cache.physical()
    found = (listed.gpu.problem for listed in devices if listed.gpu and listed.gpu.physical_index == device.index)
    return next(found, None)


def _environment() -> dict[str, dict[str, str]]:
    """Each variable of discovery that is set, with its value and how it was read."""
    readings = {name: _reading(name) for name in visibility_variables.VARIABLES if name in os.environ}
    return {name: {"value": os.environ[name], "reading": reading} for name, reading in readings.items()}


def _reading(name: str) -> str:
    value = os.environ[name]
    if name == "ACCELERATOR_BACKEND":
        return "the accelerator is not used" if value == "cpu" else "ignored: only 'cpu' has an effect"
    rocm = torch_build.is_rocm()
    row = vendors.get_row(discovery_cache.current().accelerator_type or "cpu", is_hip=rocm)
    if name not in row.visible_devices + row.device_order:
        return UNREAD
    if driver.device_count() is not None:
        return "no longer followed: the driver of this process read it when it was initialized"
    if name == "CUDA_DEVICE_ORDER":
        return "devices in the order of their PCI bus" if value == "PCI_BUS_ID" else "the fastest device first"
    selection = discovery_cache.current().selection
    if selection is None or rocm:
        return f"read by {discovery_cache.current().source}"
    return _explained(selection)


def _explained(selection: visibility.Selection) -> str:
    """The list entry by entry, as in "'0' is cuda:0, '2' is cuda:1, '-1' is negative, which ends the list"."""
    if not selection.entries:
        return "no device"
    readings: list[str] = []
    for entry in selection.entries:
        if entry.problem:
            readings.append(f"{entry.text!r} {entry.problem}")
        elif entry.target is None:
            readings.append(f"{entry.text!r} is not read")
        elif entry.target in selection.targets:
            readings.append(f"{entry.text!r} is cuda:{selection.targets.index(entry.target)}")
        else:
            readings.append(f"{entry.text!r} is left out, since a process sees a single MIG instance")
    return ", ".join(readings)
