"""The usability probe: a child process creates a context on each visible device."""

from __future__ import annotations

from . import driver_probe
from .discovery_result import DiscoveryResult


def problem(result: DiscoveryResult) -> str | None:
    """Why the visible devices cannot all be used, or None."""
    general, errors = _probe(result, refresh=False)
    return general or next((error for error in errors if error), None)


def usable(result: DiscoveryResult) -> list[bool]:
    """For each visible device, whether a child process could create a context on it now."""
    general, errors = _probe(result, refresh=True)
    return [general is None and error is None for error in errors]


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
    errors: list[str | None] = []
    for index, device in enumerate(devices):
        position = by_uuid.get(device.uuid.partition("-")[2]) if device.uuid else index if index < len(probed.devices) else None
        if position is None:
            errors.append(f"{device.name} ({device.uuid}) cannot be used: it is listed, but the driver does not know it")
        else:
            name, error = probed.devices[position].name, probed.unusable[position]
            errors.append(_describe_error(index, name, error, is_own=backend.has_context(index)))
    return None, errors


def _describe_error(index: int, name: str, error: str | None, *, is_own: bool) -> str | None:
    is_busy = driver_probe.is_busy(error)
    # In exclusive mode, a device that this process uses refuses the child, but this process can use it.
    if error is None or (is_busy and is_own):
        return None
    state = "is busy: full, or another process uses it exclusively" if is_busy else "is broken"
    return f"cuda:{index} ({name}) {state}: {error}"
