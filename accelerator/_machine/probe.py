"""Asking the driver in a child process: one child at a time, and what it found out is remembered by its environment."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from . import driver, grammar, process
from .discovery_result import RETRY_AFTER_S
from .driver_child import Device

if TYPE_CHECKING:
    import subprocess

DEADLINE_S = 60.0

# The names that CUDA and HIP give to the errors of a device that works, but not for us.
_BUSY = ("out_of_memory", "outofmemory", "device_unavailable")

# How many environments to remember the answers of.
_MAX_RESULTS = 64


class ProbeResult(NamedTuple):
    """What a child process found out.

    Attributes:
        error: why the driver could not be started there, or None.
        version: the newest CUDA version that the driver supports, None without a driver, and for ROCm.
        devices: what it enumerates, in its order.
        unusable: for each device the error of creating a context on it, or None; empty unless asked for.
    """

    error: str | None
    version: tuple[int, int] | None = None
    devices: tuple[Device, ...] = ()
    unusable: tuple[str | None, ...] = ()


_lock = threading.Lock()

# What children answered, by what they were asked, and until when that holds. Forked children inherit it.
_results: dict[tuple[Any, ...], tuple[float, ProbeResult]] = {}


def run(
    environment: Mapping[str, str | None], *, use: bool = False, hip: str | None = None, refresh: bool = False
) -> ProbeResult:
    """Ask the driver in a child process.

    Args:
        environment: variables to set in the child, or with None to remove, beside those of this process.
        use: also create a context on each device.
        hip: the ROCm runtime's library, to ask it in place of CUDA's driver.
        anew: whatever was answered before.

    Returns:
        The child's answer; a child that crashes or misses the deadline is an answer with an error.
    """
    answers, question = _results, (use, hip, *environment.items())
    kept = answers.get(question)
    if refresh or kept is None or time.monotonic() > kept[0]:
        with _lock:
            # Whoever waited for the lock may have waited for this very answer.
            kept = None if refresh else answers.get(question)
            if kept is None or time.monotonic() > kept[0]:
                answer = _run_child(environment, use=use, hip=hip)
                kept = _until(answer), answer
                answers.pop(question, None)
                while len(answers) >= _MAX_RESULTS:
                    del answers[next(iter(answers))]
                answers[question] = kept
    return kept[1]


def _until(answer: ProbeResult) -> float:
    """How long an answer holds: a full success for good, what is busy not at all, any other failure for a second."""
    if answer.error is None and answer.devices and not any(answer.unusable):
        return float("inf")
    return 0.0 if any(map(is_busy, answer.unusable)) else time.monotonic() + RETRY_AFTER_S


def is_busy(error: str | None) -> bool:
    """Whether a device could not be used because it is full or another process has it to itself, which may pass any time."""
    return error is not None and any(word in error.lower() for word in _BUSY)


def clear() -> None:
    """Drop what child processes answered, also what one is about to."""
    global _results
    _results = {}


def _run_child(environment: Mapping[str, str | None], *, use: bool, hip: str | None) -> ProbeResult:
    whom = "the ROCm runtime" if hip else "the CUDA driver"
    try:
        process.import_modules("subprocess")
        import subprocess
    except OSError as error:  # too many open files
        return ProbeResult(f"no child process could be started to ask {whom} ({error})")
    python, source = process.python(), _source()
    if python is None or source is None:
        return ProbeResult(f"{whom} can only be asked in a child process, and there is no Python executable to start one")
    mark = os.urandom(16).hex()
    variables = {**os.environ, **environment}
    try:
        child = subprocess.Popen(
            [
                python,
                "-I",
                "-S",
                "-c",
                source,
                "use" if use else "list",
                hip or driver.NAME,
                "hip" if hip else "cu",
                mark,
            ],
            env={name: value for name, value in variables.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except (OSError, ValueError) as error:  # the latter for what no environment can hold
        return ProbeResult(f"no child process could be started to ask {whom} ({error})")
    try:
        output, errors = child.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        _kill(child)
        return ProbeResult(f"{whom} did not answer a child process within {DEADLINE_S:g} s")
    except BaseException:
        _kill(child)
        raise
    try:
        problem, version, devices, unusable = json.loads(output.split(f"\n{mark}\n".encode())[1])
    except (IndexError, ValueError):
        last_line = errors.decode(errors="replace").strip().rpartition("\n")[2]
        return ProbeResult(
            f"the child process that asked {whom} ended with status {child.returncode} ({grammar.quoted(last_line)})"
        )
    return ProbeResult(problem, _pair(version), tuple(_device(*device) for device in devices), tuple(unusable))


def _source() -> str | None:
    """The text of the child's program, from wherever this package was imported."""
    from . import driver_child

    loader = getattr(driver_child, "__loader__", None)
    get_source = getattr(loader, "get_source", None)
    try:
        source: str | None = get_source(driver_child.__name__) if get_source else None
    except (ImportError, OSError):
        return None
    return source


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a child and take its status, so that it does not stay a zombie."""
    child.kill()
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()
    try:
        child.wait(RETRY_AFTER_S)
    except Exception:  # stuck in the kernel, it does not die before the driver lets it
        threading.Thread(target=child.wait, daemon=True).start()


def _device(
    uuid: str | None,
    name: str,
    bus: str | None,
    capability: list[int] | None,
    memory: int | None,
    integrated: bool | None,
) -> Device:
    return Device(uuid, name, bus, _pair(capability), memory, integrated)


def _pair(numbers: list[int] | None) -> tuple[int, int] | None:
    return (numbers[0], numbers[1]) if numbers else None


@process.reset_after_fork
def _reset_after_fork() -> None:
    global _lock
    _lock = threading.Lock()
