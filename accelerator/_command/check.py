"""Exercise every area through the public names, on every accelerator that is there, on the CPU if there is none."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import os
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from . import acc, all_reduce
from .terminal import has_color, styled, write


class Result(NamedTuple):
    """What became of an area on a device.

    Attributes:
        area: its name.
        device: such as "cuda:1"; None for what concerns no device.
        saw: what there was to see, if it passed.
        problem: what went wrong, in one line, if it did not.
    """

    area: str
    device: str | None
    saw: str | None
    problem: str | None


class Checked(NamedTuple):
    """What became of all areas.

    Attributes:
        where: what was checked, in words.
        devices: the devices that were checked.
        results: in the order in which they came.
        dead: what a child process found wrong with the devices, before anything was tried here, or None.
    """

    where: str
    devices: tuple[acc.VisibleDevice, ...]
    results: tuple[Result, ...]
    dead: str | None

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return self.dead is None and not any(result.problem for result in self.results)


def main(*, as_json: bool = False) -> int:
    """Check each area and print a line for it, or one document.

    Returns:
        0 if every area passed on every device, 1 if one failed.
    """
    color = has_color()

    def show(result: Result) -> None:
        devices = f" ({result.device})" if result.device else ""
        write(f"{styled('✓', 'green', color)} {result.area}: {result.saw}{devices}\n")

    def say(text: str, *, wrong: bool = False) -> None:
        write(f"{styled('✗', 'red', color)} {text}\n" if wrong else f"{text}\n")

    if as_json:
        checked = run()
        write(json.dumps(as_document(checked), indent=2) + "\n")
    else:
        checked = run(show=show, say=say)
        wrong = causes(checked)
        for cause in wrong[checked.dead is not None :]:  # which was said first
            say(cause, wrong=True)
        say("all areas passed" if checked.passed else f"{len(wrong)} {'thing is' if len(wrong) == 1 else 'things are'} wrong")
    return int(not checked.passed)


def as_document(checked: Checked) -> dict[str, Any]:
    """What was checked in types that JSON has."""
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
    """What is wrong, each cause once, with the areas and devices that it kept from working."""
    found: dict[tuple[str | None, str], list[str]] = {}
    for result in checked.results:
        if result.problem:
            found.setdefault((result.device, result.problem), []).append(result.area)
    lines = [checked.dead] if checked.dead else []
    return lines + [
        f"{f'{device}: ' if device else ''}{', '.join(areas)}: {problem}" for (device, problem), areas in found.items()
    ]


def keep_numpy_quiet() -> None:
    """Before torch is imported, which says once that it lacks NumPy, between whatever is being printed."""
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")


def run(
    only: int | None = None,
    *,
    show: Callable[[Result], object] | None = None,
    say: Callable[..., object] | None = None,
) -> Checked:
    """Check every area.

    Args:
        only: the one device to check, and without a collective across them, as of a rank among others; None for all.
        show: called with what passed, as it does, once for all devices on which it did.
        say: called with what is going to be checked, and with what is wrong with the devices before anything is tried.
    """
    keep_numpy_quiet()
    visible = acc.visible_devices()
    devices = visible if only is None else visible[only : only + 1]
    reason = acc.unavailable_reason()
    names = ", ".join(dict.fromkeys(device.name for device in devices))
    where = f"{len(devices)} x {names}" if reason is None else f"the CPU, as {reason}"
    where += " (simulated)" if acc.simulation.is_simulated() else ""
    if say:
        say(f"on {where}")
    dead, usable = _tried(devices) if reason is None else (None, devices)
    if say and dead:
        say(dead, wrong=True)
    results: list[Result] = []
    kind = acc.device_name()

    def take(*here: Result) -> None:
        results.extend(here)
        good = [result for result in here if result.problem is None]
        if good and show:
            on = ", ".join(result.device for result in good if result.device) or None
            show(Result(good[0].area, on, "; ".join(dict.fromkeys(str(result.saw) for result in good)), None))

    def on_each(name: str, area: Callable[[int], str], indices: Sequence[int]) -> None:
        take(*(_try(name, f"{kind}:{index}" if reason is None else None, area, index) for index in indices))

    for area in (discovery, launching, fork):  # before anything has initialized the accelerator
        take(_try(area.__name__, None, area))
    indices = [device.index for device in usable] if reason is None else [0]
    if only is None and indices:
        take(*_all_reduce(indices if reason is None else [0, 0], kind))
    if reason is None:
        on_each("monitoring", monitoring, [device.index for device in devices])
    if not indices:
        return Checked(where, devices, tuple(results), dead)
    take(_try("devices", None, devices_in_turn, indices))
    for on_device in (streams, memory, arithmetic, random, dtypes, tensors, graphs, checkpointing):
        on_each(on_device.__name__, _made_current(on_device), indices)
    for area in (profiling, extensions):
        take(_try(area.__name__, None, area))
    return Checked(where, devices, tuple(results), dead)


def _tried(devices: tuple[acc.VisibleDevice, ...]) -> tuple[str | None, tuple[acc.VisibleDevice, ...]]:
    """What a child process finds wrong with these devices, and those with which it finds nothing."""
    working = {device.index for device in acc.usable_devices()}
    usable = tuple(device for device in devices if device.index in working)
    if len(usable) == len(devices):
        return None, usable
    return acc.unavailable_reason(strict=True) or f"{len(devices) - len(usable)} devices could not be used a moment ago", usable


def _try(name: str, device: str | None, area: Callable[..., str], *arguments: Any) -> Result:
    try:
        return Result(name, device, area(*arguments), None)
    except all_reduce.Failed:
        raise
    except Exception as error:  # whatever goes wrong in an area is what this is to report
        return Result(name, device, None, str(error) if isinstance(error, Wrong) else all_reduce.in_one_line(error))


def _all_reduce(indices: Sequence[int], kind: str) -> list[Result]:
    try:
        return [_try("all-reduce", None, all_reduce.across, indices)]
    except all_reduce.Failed as error:
        return [Result("all-reduce", f"{kind}:{index}", None, problem) for index, problem in error.problems]


def _made_current(area: Callable[[int], str]) -> Callable[[int], str]:
    def on_current(index: int) -> str:
        with acc.device_index(index):
            return area(index)

    return on_current


class Wrong(Exception):
    """Something answered otherwise than it must."""


def expect(condition: object, what: str) -> None:
    """Raise unless the condition holds; asserts could be switched off."""
    if not condition:
        raise Wrong(what)


def discovery() -> str:
    visible = acc.visible_devices()
    expect(acc.is_available() == (acc.unavailable_reason() is None), "is_available() and unavailable_reason() disagree")
    expect(len(visible) == acc.device_count(), f"{len(visible)} visible devices, but device_count() is {acc.device_count()}")
    expect([device.index for device in visible] == list(range(len(visible))), "visible devices are not numbered in order")
    return f"{len(visible)} visible, driver {acc.driver_version() or 'none'}"


def launching() -> str:
    name = acc.visible_devices_envs()[0]
    environment = acc.set_visible_devices_envs({name: "3,5"}, [1])
    expect(environment[name] == "5", f"device 1 of '3,5' became {environment[name]!r}")
    backend = acc.communication_backend_name()
    version = acc.communication_backend_version()
    return backend if version is None else f"{backend} {'.'.join(map(str, version))}"


def fork() -> str:
    if not hasattr(os, "fork"):
        return "not on this platform"
    expect(acc.is_fork_safe(), "asking so far has made fork unsafe")
    child = os.fork()
    if child == 0:
        is_bad = True
        try:
            is_bad = acc.is_in_bad_fork()
        finally:  # whatever happens: this process is no second check
            os._exit(is_bad)
    expect(os.waitpid(child, 0)[1] == 0, "a child forked after all these questions could not use the accelerator")
    return "safe after all these questions"


def monitoring(index: int) -> str:
    now = acc.telemetry(index)
    known = [field for field, value in zip(acc.Telemetry._fields, now, strict=True) if value is not None]
    expect(now.device_memory_used is None or now.device_memory_used >= 0, "negative memory used")
    return f"{len(known)} of {len(acc.Telemetry._fields)} fields"


def devices_in_turn(indices: Sequence[int]) -> str:
    first = acc.current_device_index()
    for index in indices:
        with acc.device_index(index):
            expect(acc.current_device_index() == index, f"device_index({index}) did not make it the current device")
            with acc.device_index(indices[0]):
                expect(acc.current_device_index() == indices[0], "nested device_index() did not change the device")
            expect(acc.current_device_index() == index, "nested device_index() did not restore the device")
            expect(len(acc.get_device_capability(index)["supported_dtypes"]) > 0, "no supported dtype")
    expect(acc.current_device_index() == first, "device_index() did not restore the current device")
    return f"{len(indices)} in turn"


def streams(index: int) -> str:
    before = acc.current_stream()
    expect(isinstance(before, acc.Stream), "the current stream is no acc.Stream")
    stream = acc.Stream()
    acc.set_stream(stream)
    expect(acc.current_stream() == stream, "set_stream() did not make the stream the current one")
    start, end = acc.Event(enable_timing=True), acc.Event(enable_timing=True)
    start.record(stream)
    end.record(stream)
    acc.synchronize()
    elapsed = start.elapsed_time(end)
    acc.set_stream(before)
    expect(elapsed >= 0 and end.query(), "events did not happen in order")
    return f"two events {elapsed:.3f} ms apart"


def memory(index: int) -> str:
    import torch

    device = acc.device(index)
    before = acc.memory_allocated()
    tensor = torch.empty(2**20, dtype=torch.uint8, device=device)
    grown = acc.memory_allocated() - before
    free, total = acc.get_memory_info()
    expect(grown == (0 if device.type == "cpu" else tensor.numel()), f"a tensor of 1 MiB changed memory_allocated() by {grown}")
    expect(0 <= free <= total, f"{free} bytes free of {total}")
    del tensor
    acc.empty_cache()
    expect(acc.memory_allocated() == before, "memory_allocated() did not go back")
    return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


def arithmetic(index: int) -> str:
    import torch

    ones, numbers = torch.ones(8, 8), torch.arange(64.0).reshape(8, 8)
    if not _computes(index):
        return "not computed on these simulated GPUs"
    device = acc.device(index)
    product = (ones.to(device) @ numbers.to(device)).relu().cpu()
    expect(product.equal((ones @ numbers).relu()), "a matrix product is not what it is on the CPU")
    return "a matrix product as on the CPU"


def _computes(index: int) -> bool:
    """Whether kernels compute: on simulated GPUs they may be told not to."""
    import torch

    return not acc.simulation.is_simulated() or torch.full((3,), 7.0, device=acc.device(index)).tolist() == [7.0] * 3


def random(index: int) -> str:
    before = acc.get_rng_state(index)
    acc.manual_seed_all(7)
    expect(acc.initial_seed() == 7, f"after manual_seed_all(7) initial_seed() is {acc.initial_seed()}")
    seeded = acc.get_rng_state()
    with acc.fork_rng():
        acc.manual_seed(8)
        expect(not seeded.equal(acc.get_rng_state()), "another seed gave the same state")
    expect(seeded.equal(acc.get_rng_state()), "fork_rng() did not restore the state")
    acc.set_rng_state(before, index)
    expect(before.equal(acc.get_rng_state()), "set_rng_state() did not restore the state")
    return "seeded and restored"


def dtypes(index: int) -> str:
    found = acc.supported_dtypes()
    expect(found, "no dtype to train in")
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in found)


def tensors(index: int) -> str:
    import torch

    tensor = acc.FloatTensor([1.0, 2.0])
    expect(acc.on_accelerator(tensor), "FloatTensor() is not on the device")
    expect(tensor.cpu().tolist() == [1.0, 2.0], "FloatTensor() does not hold what it was given")
    pinned = acc.pin_memory(torch.ones(16))
    expect(acc.is_pinned(pinned) == acc.is_available(), "pin_memory() did not pin")
    return "typed and pinned"


def graphs(index: int) -> str:
    import torch

    if not acc.is_available():
        return "not on the CPU"
    device = acc.device(index)
    source, target = torch.zeros(8, dtype=torch.uint8), torch.empty(8, dtype=torch.uint8, device=device)
    source = source.pin_memory()
    graph = acc.Graph()
    before = acc.current_stream()
    acc.set_stream(acc.Stream())
    with graph:
        target.copy_(source, non_blocking=True)
    acc.set_stream(before)
    source.fill_(7)
    graph.replay()
    acc.synchronize()
    expect(target.cpu().tolist() == [7] * 8, "a replayed copy did not copy")
    return "a captured copy replayed"


def profiling() -> str:
    with acc.annotate("accelerator check"):
        acc.range_push("inner")
        acc.range_pop()
    return "ranges pushed and popped"


def extensions() -> str:
    # What a package of builders logs while it is imported is no part of the answer.
    with contextlib.redirect_stdout(io.StringIO()):
        builder = acc.get_op_builder("NoSuchBuilder")
    expect(builder is None, "an op builder that nobody wrote was found")
    package = acc.op_builder_dir()
    # Looked for just now, so it has been imported if there is one.
    return f"op builders in {package}" if package in sys.modules else "only op builders that are registered"


def checkpointing(index: int) -> str:
    import torch

    def layer(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2).exp()

    inputs = [acc.FloatTensor([0.1, 0.2]).requires_grad_() for _ in range(2)]
    torch.autograd.backward(layer(inputs[0]).sum())
    torch.autograd.backward(acc.checkpointing.checkpoint(layer, inputs[1]).sum())
    plain, recomputed = inputs[0].grad, inputs[1].grad
    expect(plain is not None and recomputed is not None, "no gradient came back")
    if not _computes(index):
        return "a gradient came back"
    expect(torch.equal(plain, recomputed), f"gradients differ: {recomputed}, without checkpointing {plain}")  # type: ignore[arg-type]
    return "a gradient equal to the one without"
