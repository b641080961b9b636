"""Driver probes: child processes that ask the driver, one at a time, and the cache of their results and failures."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from . import child_process, driver, driver_child, limits, process
from .driver_child import DriverDevice

# Parts of the names that CUDA and HIP give to errors of a working device that this process cannot use now.
_BUSY = ("out_of_memory", "outofmemory", "device_unavailable")

_MAX_RESULTS = 64


class ProbeResult(NamedTuple):
    """The output of a child process.

    Attributes:
        error: why the driver could not be initialized there, or None.
        version: the newest CUDA version that the driver supports; None without a driver, and for ROCm.
        devices: the devices that it enumerates, in its order.
        unusable: for each device the error of creating a context on it, or None; empty if ``use`` was false.
    """

    error: str | None
    version: tuple[int, int] | None = None
    devices: tuple[DriverDevice, ...] = ()
    unusable: tuple[str | None, ...] = ()


# Re-entrant, because a signal handler may interrupt a query that holds it.
_lock = threading.RLock()

# Results by arguments, with the time of expiry. Forked children inherit them.
_results: dict[tuple[Any, ...], tuple[float, ProbeResult]] = {}


def run(
    environment: Mapping[str, str | None], *, use: bool = False, hip: str | None = None, refresh: bool = False
) -> ProbeResult:
    """Ask the driver in a child process.

    Args:
        environment: variables to set in the child, or to remove if None, in addition to those of this process.
        use: also create a context on each device.
        hip: the ROCm runtime's library, to ask it instead of CUDA's driver.
        refresh: ignore cached results.

    Returns:
        The child's output; for a child that crashes or misses the deadline a result with an error.
    """
    results, key = _results, (use, hip, *environment.items())
    entry = results.get(key)
    if refresh or entry is None or time.monotonic() > entry[0]:
        with _lock:
            # Another thread may have run this probe meanwhile.
            entry = None if refresh else results.get(key)
            if entry is None or time.monotonic() > entry[0]:
                result = _run_child(environment, use=use, hip=hip)
                entry = _expiry(result), result
                results.pop(key, None)
                while len(results) >= _MAX_RESULTS:
                    del results[next(iter(results))]
                results[key] = entry
    return entry[1]


def _expiry(result: ProbeResult) -> float:
    """Return when a result expires: never for a full success, at once for a busy device, after a second for other failures."""
    if result.error is None and result.devices and not any(result.unusable):
        return float("inf")
    return 0.0 if any(map(is_busy, result.unusable)) else time.monotonic() + limits.RETRY_AFTER_S


def is_busy(error: str | None) -> bool:
    """Whether a device is full or in another process's exclusive use, which may change at any time."""
    return error is not None and any(word in error.lower() for word in _BUSY)


def clear() -> None:
    """Drop all results, also that of a probe that is running."""
    global _results
    _results = {}


def _run_child(environment: Mapping[str, str | None], *, use: bool, hip: str | None) -> ProbeResult:
    library = "the ROCm runtime" if hip else "the CUDA driver"
    arguments = ("use" if use else "list", hip or driver.NAME, "hip" if hip else "cu")
    try:
        output = child_process.run(_source(), arguments, environment, subject=library, deadline_s=limits.DRIVER_DEADLINE_S)
    except child_process.ChildError as error:
        return ProbeResult(str(error))
    problem, version, devices, unusable = output
    return ProbeResult(problem, _pair(version), tuple(_device(*device) for device in devices), tuple(unusable))


def _source() -> str | None:
    return child_process.source(driver_child)


def _device(
    uuid: str | None, name: str, bus: str | None, capability: list[int] | None, memory: int | None, integrated: bool | None
) -> DriverDevice:
    return DriverDevice(uuid, name, bus, _pair(capability), memory, integrated)


def _pair(integers: list[int] | None) -> tuple[int, int] | None:
    return (integers[0], integers[1]) if integers else None


@process.reset_after_fork
def _reset_after_fork() -> None:
    global _lock
    _lock = threading.RLock()
