"""``check``: exercise every area on every visible device, or on the CPU if there is none, and report the result."""

from __future__ import annotations

import datetime
import json
import socket
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .._machine import discovery_cache, usability
from . import acc, all_reduce, check_areas
from .not_offered import is_not_offered, says_not_offered
from .terminal import has_color, styled, write


class Result(NamedTuple):
    """The result of an area on a device.

    Attributes:
        area: the area's name.
        device: such as "cuda:1"; None if the area concerns no single device.
        saw: what the area measured, if it passed.
        problem: what went wrong, in one line, if it failed.
    """

    area: str
    device: str | None
    saw: str | None
    problem: str | None


class Checked(NamedTuple):
    """The results of all areas.

    Attributes:
        where: what was checked, in words.
        devices: the devices that were checked.
        results: in the order of the areas.
        dead: why a child process could not use some of the devices, or None.
    """

    where: str
    devices: tuple[acc.VisibleDevice, ...]
    results: tuple[Result, ...]
    dead: str | None

    @property
    def passed(self) -> bool:
        """Whether every device is usable and no area failed."""
        return self.dead is None and not any(result.problem for result in self.results)


def main(*, as_json: bool = False) -> int:
    """Check each area and print a line for each, or one JSON document.

    Returns:
        0 if every area passed on every device, 1 if one failed.
    """
    color = has_color()

    def show(result: Result) -> None:
        devices = f" ({result.device})" if result.device else ""
        write(f"{styled('✓', 'green', color)} {result.area}: {result.saw}{devices}\n")

    def say(text: str, *, failed: bool = False) -> None:
        write(f"{styled('✗', 'red', color)} {text}\n" if failed else f"{text}\n")

    if as_json:
        checked = run()
        write(json.dumps(as_document(checked), indent=2) + "\n")
    else:
        checked = run(show=show, say=say)
        problems = causes(checked)
        for problem in problems[checked.dead is not None :]:  # a dead device was reported at the start
            say(problem, failed=True)
        count = f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'}"
        say("all areas passed" if checked.passed else count)
    return int(not checked.passed)


def as_document(checked: Checked) -> dict[str, Any]:
    """The results in JSON's types."""
    return {
        "schema": 1,
        "version": acc.__version__,
        "host": socket.gethostname(),
        "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "passed": checked.passed,
        "where": checked.where,
        "simulated": acc.simulation.is_simulated(),
        "devices": [{"index": device.index, "name": device.name, "uuid": device.uuid} for device in checked.devices],
        "areas": [result._asdict() for result in checked.results],
        "problems": causes(checked),
    }


def causes(checked: Checked) -> list[str]:
    """The problems, each once, with the device and the areas that it concerns."""
    areas_of: dict[tuple[str | None, str], list[str]] = {}
    for result in checked.results:
        if result.problem:
            areas_of.setdefault((result.device, result.problem), []).append(result.area)
    lines = [checked.dead] if checked.dead else []
    return lines + [
        f"{f'{device}: ' if device else ''}{', '.join(areas)}: {problem}" for (device, problem), areas in areas_of.items()
    ]


def silence_numpy_warning() -> None:
    """Silence the warning that NumPy is missing, which torch issues once while it is imported."""
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")


def run(
    only: int | None = None, *, show: Callable[[Result], object] | None = None, say: Callable[..., object] | None = None
) -> Checked:
    """Check every area.

    Args:
        only: the index of the one device to check, without the all-reduce across devices; None for all devices.
        show: called when an area has passed, once for all devices on which it did.
        say: called with what is going to be checked, and with the devices that a child process could not use.
    """
    silence_numpy_warning()
    visible = acc.visible_devices()
    devices = visible if only is None else visible[only : only + 1]
    reason = acc.unavailable_reason()
    names = ", ".join(dict.fromkeys(device.name for device in devices))
    where = f"{len(devices)} x {names}" if reason is None else f"the CPU, as {reason}"
    where += " (simulated)" if acc.simulation.is_simulated() else ""
    if say:
        say(f"on {where}")
    dead, usable = _probe(devices) if reason is None else (None, devices)
    if say and dead:
        say(dead, failed=True)
    results: list[Result] = []
    device_type = acc.device_name()

    def add(*of_area: Result) -> None:
        results.extend(of_area)
        passed = [result for result in of_area if result.problem is None]
        if passed and show:
            names = ", ".join(result.device for result in passed if result.device) or None
            names = "all devices" if names and len(passed) == len(devices) > 2 else names
            show(Result(passed[0].area, names, "; ".join(dict.fromkeys(str(result.saw) for result in passed)), None))

    def on_each(name: str, area: Callable[[int], str], indices: Sequence[int]) -> None:
        add(*(_run(name, f"{device_type}:{index}" if reason is None else None, area, index) for index in indices))

    # These come first: nothing has initialized the accelerator yet.
    for area in (check_areas.discovery, check_areas.launching, check_areas.fork):
        add(_run(area.__name__, None, area))
    indices = [device.index for device in usable] if reason is None else [0]
    if only is None and indices:
        add(*_all_reduce(indices if reason is None else [0, 0], device_type))
    if reason is None:
        on_each("monitoring", check_areas.monitoring, [device.index for device in devices])
    if not indices:
        return Checked(where, devices, tuple(results), dead)
    add(_run("devices", None, check_areas.devices_in_turn, indices))
    for on_device in (
        check_areas.streams,
        check_areas.memory,
        check_areas.arithmetic,
        check_areas.random,
        check_areas.dtypes,
        check_areas.tensors,
        check_areas.graphs,
        check_areas.checkpointing,
    ):
        on_each(on_device.__name__, _on_current_device(on_device), indices)
    for area in (check_areas.profiling, check_areas.extensions):
        add(_run(area.__name__, None, area))
    return Checked(where, devices, tuple(results), dead)


def _probe(devices: tuple[acc.VisibleDevice, ...]) -> tuple[str | None, tuple[acc.VisibleDevice, ...]]:
    """Return why a child process could not use some of the devices, and the devices that it could use."""
    errors = usability.errors(discovery_cache.current())
    usable = tuple(device for device in devices if errors[device.index] is None)
    return next((errors[device.index] for device in devices if device not in usable), None), usable


def _run(name: str, device: str | None, area: Callable[..., str], *arguments: Any) -> Result:
    try:
        return Result(name, device, area(*arguments), None)
    except all_reduce.Failed:
        raise
    except Exception as error:  # every error of an area is a result of the check
        if is_not_offered(error):
            return Result(name, device, f"not offered by this accelerator: {all_reduce.in_one_line(error)}", None)
        is_wrong = isinstance(error, check_areas.Wrong)
        return Result(name, device, None, str(error) if is_wrong else all_reduce.in_one_line(error))


def _all_reduce(indices: Sequence[int], device_type: str) -> list[Result]:
    try:
        return [_run("all-reduce", None, all_reduce.across, indices)]
    except all_reduce.Failed as error:
        if all(says_not_offered(problem) for _, problem in error.problems):
            return [Result("all-reduce", None, f"not offered by this accelerator: {error.problems[0][1]}", None)]
        return [Result("all-reduce", f"{device_type}:{index}", None, problem) for index, problem in error.problems]


def _on_current_device(area: Callable[[int], str]) -> Callable[[int], str]:
    def on_current(index: int) -> str:
        with acc.device_index(index):
            return area(index)

    return on_current
