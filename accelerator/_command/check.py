"""Exercise every area through the public names, on the accelerator that is there, on the CPU if there is none."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import accelerator as acc


def main() -> int:
    """Check each area and print a line for it.

    Returns:
        0 if every area passed, 1 if one failed.
    """
    reason = acc.unavailable_reason()
    where = f"{acc.device_count()} x {acc.get_device_name()}" if reason is None else f"the CPU, as {reason}"
    print(f"on {where}" + (" (simulated)" if acc.simulation.is_simulated() else ""))
    failed = [area.__name__ for area in _areas() if not _passes(area)]
    print(f"{len(failed)} of {len(list(_areas()))} areas failed: {', '.join(failed)}" if failed else "all areas passed")
    return 1 if failed else 0


def _passes(area: Callable[[], str]) -> bool:
    name = area.__name__.strip("_").replace("_", " ")
    try:
        saw = area()
    except Exception as error:  # whatever goes wrong in an area is what this is to report
        frame = traceback.extract_tb(error.__traceback__)[-1]
        print(f"✗ {name}: {type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})")
        return False
    print(f"✓ {name}: {saw}")
    return True


def _areas() -> Iterator[Callable[[], str]]:
    yield discovery
    yield launching
    yield fork  # before anything has initialized the accelerator
    yield monitoring
    yield devices
    yield streams
    yield memory
    yield random
    yield dtypes
    yield tensors
    yield graphs
    yield profiling
    yield extensions
    yield checkpointing


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
        os._exit(int(acc.is_in_bad_fork()))
    expect(os.waitpid(child, 0)[1] == 0, "a child forked after all these questions could not use the accelerator")
    return "safe after all these questions"


def monitoring() -> str:
    if not acc.is_available():
        return "nothing to monitor"
    now = [acc.telemetry(device.index) for device in acc.visible_devices()]
    known = {field for values in now for field, value in zip(acc.Telemetry._fields, values, strict=True) if value is not None}
    expect(all(values.device_memory_used is None or values.device_memory_used >= 0 for values in now), "negative memory used")
    return f"{len(known)} of {len(acc.Telemetry._fields)} fields"


def devices() -> str:
    last = max(acc.device_count() - 1, 0)
    first = acc.current_device_index()
    with acc.device_index(last):
        expect(acc.current_device_index() == last, f"device_index({last}) did not make it the current device")
        with acc.device_index(first):
            expect(acc.current_device_index() == first, "nested device_index() did not change the device")
    expect(acc.current_device_index() == first, "device_index() did not restore the current device")
    dtypes = acc.get_device_capability()["supported_dtypes"]
    expect(len(dtypes) > 0, "no supported dtype")
    return f"current device {first} of {max(acc.device_count(), 1)}, {len(dtypes)} dtypes"


def streams() -> str:
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


def memory() -> str:
    import torch

    device = acc.current_accelerator(check_available=True) or torch.device("cpu")
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


def random() -> str:
    states = acc.get_rng_state_all() if acc.is_available() else [acc.get_rng_state()]
    acc.manual_seed_all(7)
    expect(acc.initial_seed() == 7, f"after manual_seed_all(7) initial_seed() is {acc.initial_seed()}")
    seeded = acc.get_rng_state()
    with acc.fork_rng():
        acc.manual_seed(8)
        expect(not seeded.equal(acc.get_rng_state()), "another seed gave the same state")
    expect(seeded.equal(acc.get_rng_state()), "fork_rng() did not restore the state")
    for index, state in enumerate(states):
        acc.set_rng_state(state, index)
    expect(states[acc.current_device_index()].equal(acc.get_rng_state()), "set_rng_state() did not restore the state")
    return f"{len(states)} {'state' if len(states) == 1 else 'states'} seeded and restored"


def dtypes() -> str:
    found = acc.supported_dtypes()
    expect(found, "no dtype to train in")
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in found)


def tensors() -> str:
    import torch

    tensor = acc.FloatTensor([1.0, 2.0])
    expect(acc.on_accelerator(tensor), "FloatTensor() is not on the device")
    expect(tensor.cpu().tolist() == [1.0, 2.0], "FloatTensor() does not hold what it was given")
    pinned = acc.pin_memory(torch.ones(16))
    expect(acc.is_pinned(pinned) == acc.is_available(), "pin_memory() did not pin")
    return "typed and pinned"


def graphs() -> str:
    import torch

    if not acc.is_available():
        return "not on the CPU"
    device = acc.current_accelerator()
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
    expect(acc.get_op_builder("NoSuchBuilder") is None, "an op builder that nobody wrote was found")
    return f"op builders in {acc.op_builder_dir()}"


def checkpointing() -> str:
    import torch

    def layer(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2).exp()

    inputs = [acc.FloatTensor([0.1, 0.2]).requires_grad_() for _ in range(2)]
    torch.autograd.backward(layer(inputs[0]).sum())
    torch.autograd.backward(acc.checkpointing.checkpoint(layer, inputs[1]).sum())
    plain, recomputed = inputs[0].grad, inputs[1].grad
    expect(plain is not None and recomputed is not None, "no gradient came back")
    if acc.simulation.is_simulated() and os.environ.get("ACCELERATOR_SIM_COMPUTE") != "1":
        return "a gradient came back"  # of no meaning: nothing computes on this machine
    expect(torch.equal(plain, recomputed), f"gradients differ: {recomputed}, without checkpointing {plain}")  # type: ignore[arg-type]
    return "a gradient equal to the one without"
