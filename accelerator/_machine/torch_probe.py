"""The torch probe: a child process imports torch and reports its accelerator, or the result of a function."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from . import child_process, limits, process, torch_child
from . import visibility_variables as this_environment
from .driver_child import DriverDevice

# Whether torch loads plug-ins when it is imported.
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


class TorchProbeResult(NamedTuple):
    """The output of a child process.

    Attributes:
        error: why torch could not be imported there, or None.
        device_type: the type of its accelerator; None for a CPU build.
        devices: the devices, of accelerators other than CUDA.
        free_memory: bytes of each device at that time; None if unknown.
    """

    error: str | None
    device_type: str | None = None
    devices: tuple[DriverDevice, ...] = ()
    free_memory: tuple[int | None, ...] = ()


_lock = threading.RLock()  # re-entrant, because a signal handler may interrupt a query that holds it
_result: tuple[float, dict[str, str | None], TorchProbeResult] | None = None


def run(environment: Mapping[str, str | None] = {}, *, refresh: bool = False) -> TorchProbeResult:
    """Import torch in a child process. The latest result is cached for its environment.

    Args:
        environment: variables to set in the child, or to remove if None, in addition to those of this process.
        refresh: ignore a result that is older than a second.

    Returns:
        The child's output; for a child that crashes or misses the deadline a result with an error.

    Raises:
        child_process.NotStarted: if no child can be started.
    """
    global _result
    key: dict[str, str | None] = {**this_environment.variables(), **environment}
    with _lock:
        entry = _result
        if entry is None or entry[1] != key or (refresh and time.monotonic() > entry[0] + limits.RETRY_AFTER_S):
            entry = _result = time.monotonic(), key, _run_child(environment)
    return entry[2]


def clear() -> None:
    """Drop the result."""
    global _result
    _result = None


def call(name: str) -> Any:
    """What a function in torch, such as "cuda.device_count", returns in a child process that loads no plug-ins.

    Raises:
        RuntimeError: if the child has no output, or torch cannot be imported there.
    """
    error, value = _import_torch({AUTOLOAD: "0"}, function=name)
    if error:
        raise RuntimeError(error)
    return value


def _run_child(environment: Mapping[str, str | None]) -> TorchProbeResult:
    # A plug-in that was imported explicitly has to be imported there too.
    package = getattr(process.torch_device_module(), "__name__", "torch").partition(".")[0]
    try:
        error, report = _import_torch(environment, package="" if package == "torch" else package)
    except child_process.NotStarted:
        raise
    except child_process.ChildError as failure:
        return TorchProbeResult(str(failure))
    device_type, devices = report or ("", ())
    described = tuple(DriverDevice(None, name or device_type, None, None, total) for name, _, total in devices)
    return TorchProbeResult(error, device_type or None, described, tuple(free for _, free, _ in devices))


def _import_torch(environment: Mapping[str, str | None], *, package: str = "", function: str = "") -> Any:
    """The error and the report of ``torch_child``."""
    paths = [os.fspath(path) for path in sys.path]
    arguments = (json.dumps(paths), json.dumps(_site_folders()), package, function)
    program = child_process.source(torch_child)
    return child_process.run(program, arguments, environment, subject="torch", deadline_s=limits.TORCH_DEADLINE_S)


def _site_folders() -> list[str]:
    """The folders whose ``.pth`` files Python ran when this process started."""
    site: Any = sys.modules.get("site")  # not imported with -S
    if site is None:
        return []
    # PREFIXES lacks the virtual environment's prefix until all of these files have run.
    folders: list[str] = [*site.getsitepackages([*site.PREFIXES, sys.prefix]), site.getusersitepackages()]
    return [folder for folder in folders if folder in sys.path]


@process.reset_after_fork
def _reset_after_fork() -> None:
    global _lock
    _lock = threading.RLock()
