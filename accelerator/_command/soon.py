"""Stand-ins for questions that are being built elsewhere; to be deleted with that."""

from __future__ import annotations

from typing import Any

from .. import discovery, monitoring
from .._machine import probe


def unavailable_reason(*, strict: bool = False) -> str | None:
    if strict:
        discovery.is_available(strict=True)
    return discovery.unavailable_reason()


def physical_devices() -> tuple[Any, ...]:
    return ()


def usable_devices() -> tuple[discovery.VisibleDevice, ...]:
    unusable = probe.ask({}, use=True).unusable
    return tuple(device for device in discovery.visible_devices() if unusable and unusable[device.index] is None)


def numa_node(device: int) -> int | None:
    return None


class Now:
    def __init__(self, now: monitoring.Telemetry) -> None:
        self._now = now

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now, name, None)


def telemetry(index: int) -> Any:
    return Now(monitoring.telemetry(index))
