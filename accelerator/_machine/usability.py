"""The usability probe: a child process creates a context on each visible device."""

from __future__ import annotations

from . import driver_probe
from .discovery_result import DiscoveryResult


def problem(result: DiscoveryResult) -> str | None:
    """Why the visible devices cannot all be used, or None."""
    general, of_devices = _probe(result, refresh=False)
    return general or next((error for error in of_devices if error), None)


def usable(result: DiscoveryResult) -> list[bool]:
    """For each visible device, whether a child process could create a context on it now."""
    return [error is None for error in errors(result)]


def errors(result: DiscoveryResult) -> list[str | None]:
    """For each visible device, why a child process could not create a context on it now, or None."""
    general, of_devices = _probe(result, refresh=True)
    return [general or error for error in of_devices]


def _probe(result: DiscoveryResult, *, refresh: bool) -> tuple[str | None, list[str | None]]:
    """The error that concerns all devices, and that of each device."""
    devices, backend = result.devices, result.backend
    if backend is None:
        return None, [None] * len(devices)
    probed = backend.probe_usability(result, refresh=refresh)
    if probed.error:
        return probed.error, [None] * len(devices)
    if not probed.devices:
        return "the driver enumerates no device in a child process", [None] * len(devices)
    by_uuid = {device.uuid: position for position, device in enumerate(probed.devices)}
    found: list[str | None] = []
    for index, device in enumerate(devices):
        position = by_uuid.get(device.uuid.partition("-")[2]) if device.uuid else index if index < len(probed.devices) else None
        if position is None:
            found.append(f"{device.name} ({device.uuid}) cannot be used: it is listed, but the driver does not know it")
        else:
            name, error = probed.devices[position].name, probed.unusable[position]
            found.append(_describe_error(index, name, error, is_own=bool(backend.has_context(index))))
    return None, found


def _describe_error(index: int, name: str, error: str | None, *, is_own: bool) -> str | None:
    is_busy = driver_probe.is_busy(error)
    # In exclusive mode, a device that this process uses refuses the child, but this process can use it.
    if error is None or (is_busy and is_own):
        return None
    state = "is busy: full, or another process uses it exclusively" if is_busy else "is broken"
    return f"cuda:{index} ({name}) {state}: {error}"
