"""Whether the visible devices can really be used: tried out in a child process."""

from __future__ import annotations

from . import probe, torch_build
from .discovery_result import DiscoveryResult


def problem(result: DiscoveryResult) -> str | None:
    """What a child process finds wrong when it creates a context on each visible device, or None."""
    general, errors = _probe(result, refresh=False)
    return general or next((error for error in errors if error), None)


def usable(result: DiscoveryResult) -> list[bool]:
    """Of each visible device whether a child process could create a context on it just now."""
    general, errors = _probe(result, refresh=True)
    return [general is None and error is None for error in errors]


def _probe(result: DiscoveryResult, *, refresh: bool) -> tuple[str | None, list[str | None]]:
    """What is wrong with all of them, and with each."""
    devices, backend = result.devices, result.backend
    if backend is None or torch_build.accelerator_type() != "cuda":
        return None, [None] * len(devices)
    answer: probe.ProbeResult = backend.probe_usability(result, refresh=refresh)
    if answer.error:
        return answer.error, [None] * len(devices)
    if not answer.devices:
        return "the driver enumerates no device in a child process", [None] * len(devices)
    by_uuid = {device.uuid: position for position, device in enumerate(answer.devices)}
    errors: list[str | None] = []
    for index, device in enumerate(devices):
        position = by_uuid.get(device.uuid.partition("-")[2]) if device.uuid else index if index < len(answer.devices) else None
        if position is None:
            errors.append(f"{device.name} ({device.uuid}) cannot be used: it is listed, and the driver does not know it")
        else:
            errors.append(
                _describe_error(
                    index, answer.devices[position].name, answer.unusable[position], own=backend.uses_already(index)
                )
            )
    return None, errors


def _describe_error(index: int, name: str, error: str | None, *, own: bool) -> str | None:
    busy = probe.is_busy(error)
    # A device that others may not use while this process does is one that this process can use.
    if error is None or (busy and own):
        return None
    state = "is busy, its memory is full or another process has it to itself" if busy else "is broken"
    return f"cuda:{index} ({name}) {state}: {error}"
