"""The areas that ``check`` exercises. Each function exercises one area through the package's public names.

It returns its measurement in a few words. It raises ``Wrong`` if a result is wrong.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence

from . import acc


class Wrong(Exception):
    """A result of the package is wrong; the message says which."""


def expect(condition: object, problem: str) -> None:
    """Raise unless the condition holds. Unlike ``assert``, this also works under ``python -O``."""
    if not condition:
        raise Wrong(problem)


def discovery() -> str:
    visible = acc.visible_devices()
    expect(acc.is_available() == (acc.unavailable_reason() is None), "is_available() and unavailable_reason() disagree")
    expect(len(visible) == acc.device_count(), f"{len(visible)} visible devices, but device_count() is {acc.device_count()}")
    expect([device.index for device in visible] == list(range(len(visible))), "visible devices are not numbered in order")
    return f"{len(visible)} visible, driver {acc.driver_version() or 'none'}"


def launching() -> str:
    for name in acc.visible_devices_envs()[:1]:  # an accelerator that is not in the vendor table has none
        environment = acc.set_visible_devices_envs({name: "3,5"}, [1])
        expect(environment[name] == "5", f"device 1 of '3,5' became {environment[name]!r}")
    backend = acc.communication_backend_name()
    version = acc.communication_backend_version()
    return backend if version is None else f"{backend} {'.'.join(map(str, version))}"


def fork() -> str:
    if not hasattr(os, "fork"):
        return "not on this platform"
    expect(acc.is_fork_safe(), "fork is not safe after the queries of this check")
    child = os.fork()
    if child == 0:
        is_bad = True
        try:
            is_bad = acc.is_in_bad_fork()
        finally:  # the child must not run the rest of the check
            os._exit(is_bad)
    expect(os.waitpid(child, 0)[1] == 0, "a child cannot use the accelerator if it is forked after the queries of this check")
    return "safe after the queries of this check"


def monitoring(index: int) -> str:
    telemetry = acc.telemetry(index)
    known = [field for field, value in zip(acc.Telemetry._fields, telemetry, strict=True) if value is not None]
    used = telemetry.device_memory_used
    expect(used is None or used >= 0, f"telemetry() has device_memory_used {used}")
    return f"{len(known)} of {len(acc.Telemetry._fields)} fields"


def devices_in_turn(indices: Sequence[int]) -> str:
    first = acc.current_device_index()
    for index in indices:
        with acc.device_index(index):
            expect(acc.current_device_index() == index, f"device_index({index}) did not make it the current device")
            with acc.device_index(indices[0]):
                expect(acc.current_device_index() == indices[0], "nested device_index() did not change the device")
            expect(acc.current_device_index() == index, "nested device_index() did not restore the device")
    expect(acc.current_device_index() == first, "device_index() did not restore the current device")
    return f"{len(indices)} made current in turn"


def streams(index: int) -> str:
    """Check streams, and the time between two events."""
    before = acc.current_stream()
    expect(isinstance(before, acc.Stream), "the current stream is not an acc.Stream")
    stream = acc.Stream()
    acc.set_stream(stream)
    expect(acc.current_stream() == stream, "set_stream() did not make the stream the current one")
    start, end = acc.Event(enable_timing=True), acc.Event(enable_timing=True)
    start.record(stream)
    end.record(stream)
    acc.synchronize()
    elapsed = start.elapsed_time(end)
    acc.set_stream(before)
    expect(elapsed >= 0 and end.query(), "after synchronize(), the events are not reached or out of order")
    return f"two events {elapsed:.3f} ms apart"


def memory(index: int) -> str:
    import torch

    device = acc.device(index)
    before = acc.memory_allocated()
    tensor = torch.empty(2**20, dtype=torch.uint8, device=device)
    growth = acc.memory_allocated() - before
    free, total = acc.get_memory_info()
    expect(
        growth == (0 if device.type == "cpu" else tensor.numel()), f"a tensor of 1 MiB changed memory_allocated() by {growth}"
    )
    expect(0 <= free <= total, f"get_memory_info() returned {free} free of {total} bytes")
    del tensor
    acc.empty_cache()
    expect(acc.memory_allocated() == before, "memory_allocated() did not return to its value before the tensor")
    return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


def arithmetic(index: int) -> str:
    import torch

    ones, matrix = torch.ones(8, 8), torch.arange(64.0).reshape(8, 8)
    if not _computes(index):
        return "not computed on these simulated GPUs"
    device = acc.device(index)
    product = (ones.to(device) @ matrix.to(device)).relu().cpu()
    expect(product.equal((ones @ matrix).relu()), "a matrix product differs from the CPU's")
    return "a matrix product equals the CPU's"


def _computes(index: int) -> bool:
    """Whether kernels compute. Those of simulated GPUs compute small tensors only after ``--no-compute``."""
    import torch

    return not acc.simulation.is_simulated() or bool(((torch.ones(1024, device=acc.device(index)) + 6) == 7).all())


def random(index: int) -> str:
    before = acc.get_rng_state(index)
    acc.manual_seed_all(7)
    expect(acc.initial_seed() == 7, f"after manual_seed_all(7) initial_seed() is {acc.initial_seed()}")
    seeded = acc.get_rng_state()
    with acc.fork_rng():
        acc.manual_seed(8)
        expect(not seeded.equal(acc.get_rng_state()), "manual_seed(8) left the state of seed 7")
    expect(seeded.equal(acc.get_rng_state()), "fork_rng() did not restore the state")
    acc.set_rng_state(before, index)
    expect(before.equal(acc.get_rng_state()), "set_rng_state() did not restore the state")
    return "seeded and restored"


def dtypes(index: int) -> str:
    expect(acc.get_device_capability(index)["supported_dtypes"], "get_device_capability() has no supported dtype")
    supported = acc.supported_dtypes()
    expect(supported, "supported_dtypes() is empty")
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in supported)


def tensors(index: int) -> str:
    import torch

    tensor = acc.FloatTensor([1.0, 2.0])
    expect(acc.on_accelerator(tensor), "FloatTensor() is not on the device")
    values = tensor.cpu().tolist()
    expect(values == [1.0, 2.0], f"FloatTensor([1.0, 2.0]) has the values {values}")
    is_pinned = acc.is_pinned(acc.pin_memory(torch.ones(16)))
    expect(is_pinned == acc.is_available(), f"is_pinned() is {is_pinned} for a tensor of pin_memory()")
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
    expect(target.cpu().tolist() == [7] * 8, "replay() did not repeat the captured copy")
    return "a captured copy replayed"


def profiling() -> str:
    with acc.annotate("accelerator check"):
        acc.range_push("inner")
        acc.range_pop()
    return "ranges pushed and popped"


def extensions() -> str:
    # A package of op builders may print when it is imported.
    with contextlib.redirect_stdout(io.StringIO()):
        builder = acc.get_op_builder("NoSuchBuilder")
    expect(builder is None, "get_op_builder() returned a builder for an unknown name")
    package = acc.op_builder_dir()
    # get_op_builder() has imported the package if it exists.
    return f"op builders in {package}" if package in sys.modules else "registered op builders only"


def checkpointing(index: int) -> str:
    import torch

    def layer(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2).exp()

    inputs = [acc.FloatTensor([0.1, 0.2]).requires_grad_() for _ in range(2)]
    torch.autograd.backward(layer(inputs[0]).sum())
    torch.autograd.backward(acc.checkpointing.checkpoint(layer, inputs[1]).sum())
    plain, recomputed = inputs[0].grad, inputs[1].grad
    expect(plain is not None and recomputed is not None, "backward() computed no gradient")
    if not _computes(index):
        return "a gradient"
    expect(torch.equal(plain, recomputed), f"gradients differ: {recomputed}, without checkpointing {plain}")  # type: ignore[arg-type]
    return "a gradient equal to the one without checkpointing"
