"""Tests on two simulated GPUs: random generators, default devices, threads, asynchronous copies and forked children."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import accelerator as acc
from accelerator import checkpointing
from accelerator.checkpointing import transfers
from tests import support
from tests.support.checkpointing_memory import MODES

MEBIBYTE = 2**20


@pytest.fixture(autouse=True)
def _initialized_without_default_device() -> Iterator[None]:
    # torch.cuda.default_generators is empty until CUDA is initialized.
    torch.cuda.init()
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("backend", [None, "cpu"])
def test_recomputation_restores_state_of_the_argument_device(backend: str | None) -> None:
    # The state of a tensor's GPU is restored even if ACCELERATOR_BACKEND=cpu.
    code = """
        import os, torch
        from accelerator import checkpointing
        torch.cuda.init()
        default = torch.cuda.default_generators[1]

        def function(h):
            seen.append((default.get_offset(), torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")))
            return torch.nn.functional.dropout(h, 0.5).exp().sin()

        for backend in (os.environ.get("ACCELERATOR_BACKEND"), None):
            if backend is None:
                os.environ.pop("ACCELERATOR_BACKEND", None)
            seen = []
            default.manual_seed(1)
            x = torch.zeros(64, device="cuda:1", requires_grad=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out = checkpointing.checkpoint(function, x)
            before = default.get_offset()
            out.float().sum().backward()
            assert default.get_offset() == before > 0
            assert seen == [(0, True, torch.bfloat16)] * 2, seen
    """
    variables = {} if backend is None else {"ACCELERATOR_BACKEND": backend}
    support.run(code, support.simulated_environment(variables, gpus=2))


@pytest.mark.parametrize("drawn", ["argument", "current", "both"])
@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("argument", ["cpu", "cuda:0", "cuda:1"])
def test_recomputation_draws_the_same_numbers_on_each_device(argument: str, current: int, drawn: str) -> None:
    devices = {"argument": [argument], "current": [f"cuda:{current}"], "both": [argument, f"cuda:{current}"]}[drawn]
    runs: list[list[torch.Tensor]] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        runs.append([torch.rand(4, device=device).cpu() for device in devices])
        return h.sin().exp()

    h = torch.ones(4, device=argument, requires_grad=True)
    with torch.cuda.device(current):
        out = checkpointing.checkpoint(function, h)
        others = [torch.rand(4, device=device).cpu() for device in devices]
        out.sum().backward()
        after = [torch.rand(4, device=device).cpu() for device in devices]
    forward, recomputed = runs
    for one, other, between, later in zip(forward, recomputed, others, after, strict=True):
        assert torch.equal(one, other)
        # The caller's own numbers continue.
        assert not torch.equal(between, later)
        assert not torch.equal(one, later)


def test_recomputation_restores_rng_of_a_nested_tensor_device() -> None:
    default = torch.cuda.default_generators[1]
    recorded: list[int] = []

    def function(pack: Any) -> torch.Tensor:
        recorded.append(default.get_offset())
        return torch.nn.functional.dropout(pack["h"][0], 0.5).exp()

    default.manual_seed(1)
    out = checkpointing.checkpoint(function, {"h": [torch.zeros(64, device="cuda:1", requires_grad=True)]})
    before = default.get_offset()
    out.sum().backward()
    assert recorded == [0, 0]
    assert default.get_offset() == before > 0


def test_recomputation_uses_the_seed_of_forward() -> None:
    default = torch.cuda.default_generators[0]
    recorded: list[tuple[int, int]] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        recorded.append((default.initial_seed(), default.get_offset()))
        return torch.nn.functional.dropout(h, 0.5).exp()

    torch.cuda.manual_seed(7)
    torch.rand(5, device="cuda")
    out = checkpointing.checkpoint(function, torch.zeros(64, device="cuda", requires_grad=True))
    torch.cuda.manual_seed(8)
    torch.rand(9, device="cuda")
    now = default.initial_seed(), default.get_offset()
    out.sum().backward()
    assert recorded[0] == recorded[1]
    assert recorded[0][0] == 7
    assert (default.initial_seed(), default.get_offset()) == now


def test_offload_under_a_default_device() -> None:
    checkpointing.configure(checkpoint_in_cpu=True)
    torch.set_default_device("cuda")
    x = torch.zeros(64, requires_grad=True)
    for _ in range(2):
        checkpointing.checkpoint(lambda h: h.sin().exp(), x * 1).sum().backward()
    checkpointing.configure(
        partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2, checkpoint_in_cpu=True
    )
    checkpointing.checkpoint(lambda h: h.sin().exp(), x * 1).sum().backward()
    parts = checkpointing.partition_activations([x], True)
    assert parts[0].is_pinned()
    pairs = checkpointing.get_partitioned_activations_for_backward([x], parts)
    assert pairs[1].device.type == "cpu"


@pytest.mark.parametrize("how", ["default", "context"])
def test_default_device_without_index_follows_current_device(how: str) -> None:
    recorded: list[torch.device] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        with torch.cuda.device(1):
            recorded.append(torch.empty(1).device)
            return (h * torch.ones(4)).sin().exp()

    x = torch.zeros(4, device="cuda:1", requires_grad=True)
    if how == "default":
        torch.set_default_device("cuda")
        out = checkpointing.checkpoint(function, x)
        torch.set_default_device("cpu")
    else:
        with torch.device("cuda"):
            out = checkpointing.checkpoint(function, x)
    out.sum().backward()
    assert recorded == [torch.device("cuda:1")] * 2
    assert torch.empty(0).device == torch.device("cpu")


def test_autograd_thread_recomputes_under_the_default_device() -> None:
    recorded: list[torch.device] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        recorded.append(torch.empty(0).device)
        return h.sin().exp()

    with torch.device("cuda:1"):
        out = checkpointing.checkpoint(function, torch.zeros(4, device="cuda:0", requires_grad=True))
    out.sum().backward()
    assert recorded == [torch.device("cuda:1")] * 2


@pytest.mark.slow
def test_recomputation_needs_a_gradient_of_another_device() -> None:
    # Autograd has a thread for each device. The thread of device 0 recomputes and needs a gradient of device 1. Meanwhile the
    # thread of device 1 reaches the same checkpoint.
    code = """
        import os, threading, time, torch
        from accelerator import checkpointing
        torch.cuda.init()
        a = torch.zeros(8, device="cuda:0", requires_grad=True)
        b = torch.zeros(8, device="cuda:1", requires_grad=True)
        runs = []

        def function(a, b):
            runs.append(threading.get_ident())
            one, two = a.sin().exp(), b.sin().exp()
            if len(runs) > 1:
                time.sleep(0.5)  # until the other thread waits for this one, which nothing shows
            (inside,) = torch.autograd.grad(two.sum(), b, retain_graph=True)
            return one.cos(), two.cos() * inside

        for number in range(3):
            runs.clear()
            outputs = checkpointing.checkpoint(function, a, b)
            torch.autograd.backward([out.sum() for out in outputs])
            assert a.grad is not None and b.grad is not None
            assert len(set(runs)) >= 2
        print("done", flush=True)
        # Skips the end of autograd's threads, which is not tested here.
        os._exit(0)
    """
    assert "done" in support.run(code, support.simulated_environment(gpus=2), timeout=60)


def test_threads_of_two_devices_share_one_recomputation() -> None:
    code = """
        import os, threading, time, torch
        from accelerator import checkpointing
        torch.cuda.init()
        a = torch.zeros(8, device="cuda:0", requires_grad=True)
        b = torch.zeros(8, device="cuda:1", requires_grad=True)
        alive, most, runs = [], [], []

        def function(a, b):
            runs.append(threading.get_ident())
            alive.append(1)
            most.append(len(alive))
            one, two = a.sin().exp(), b.sin().exp()
            time.sleep(0.1)  # in which the other thread would begin, if it did
            alive.pop()
            return one.cos(), two.cos()

        for number in range(3):
            runs.clear()
            outputs = checkpointing.checkpoint(function, a, b)
            torch.autograd.backward([out.sum() for out in outputs])
            assert len(runs) == 2, runs
        assert max(most) == 1
        print("done", flush=True)
        os._exit(0)
    """
    assert "done" in support.run(code, support.simulated_environment(gpus=2), timeout=60)


class Recorder:
    """Records the tensors and the streams of all calls of ``Tensor.record_stream``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams: list[tuple[int, torch.Stream]] = []
        original = torch.Tensor.record_stream

        def record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
            self.streams.append((tensor.data_ptr(), stream))
            original(tensor, stream)

        monkeypatch.setattr(torch.Tensor, "record_stream", record_stream)


@pytest.mark.parametrize("when", ["copied", "prefetched"])
def test_record_stream_protects_memory_during_a_copy(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    source = torch.zeros(MEBIBYTE, device="cuda")
    moved = transfers.Offloaded(source, transfers.allocate(MEBIBYTE, torch.float32, source.device, True))
    if when == "prefetched":
        moved.fetch()
        moved.prefetch()
    assert not recorder.streams
    here = moved._on_device
    assert here is not None
    pointer = here.data_ptr()
    side = transfers._copy_stream(source.device)
    assert side is not None
    del here, moved, source
    gc.collect()
    assert recorder.streams == [(pointer, side.stream)]


def test_unused_prefetched_input_is_freed() -> None:
    checkpointing.configure(checkpoint_in_cpu=True)
    x = torch.zeros(MEBIBYTE, device="cuda", requires_grad=True)
    acc.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    h = x * 1
    inputs = []
    for _ in range(6):
        inputs.append(h)
        h = checkpointing.checkpoint(lambda h: h.sin().exp(), h)
    weight = torch.ones(1, device="cuda", requires_grad=True)
    last = checkpointing.checkpoint(lambda h, w: h.sin() * w, h, weight)
    inputs.clear()
    # The input of the sixth checkpoint is prefetched, but this backward does not reach that checkpoint.
    torch.autograd.grad(last.sum(), weight)
    del h, last, weight
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() - before < MEBIBYTE


def test_fetch_on_another_stream_records_that_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.zeros(MEBIBYTE, device="cuda")
    moved = transfers.Offloaded(source, transfers.allocate(MEBIBYTE, torch.float32, source.device, True))
    moved.fetch()
    moved.prefetch()
    recorder, other = Recorder(monkeypatch), torch.cuda.Stream()
    with torch.cuda.stream(other):
        back = moved.fetch()
    assert recorder.streams == [(back.data_ptr(), other)]


@pytest.mark.parametrize("is_freed", [False, True])
def test_another_threads_forward_frees_memory_during_a_fetch(is_freed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def prefetch(self: transfers.Offloaded) -> None:
        original(self)
        self.free_device_memory()  # as add() does in the other thread, which nothing keeps from running here

    original = transfers.Offloaded.prefetch
    monkeypatch.setattr(transfers.Offloaded, "prefetch", prefetch)
    source = torch.full((MEBIBYTE,), 3.0, device="cuda")
    moved = transfers.Offloaded(source, transfers.allocate(MEBIBYTE, torch.float32, source.device, True))
    if is_freed:
        moved.free_device_memory()
    assert torch.equal(moved.fetch(), source)
    assert not moved.was_edited


def test_computation_and_copies_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda:0")
    side = transfers._copy_stream(device)
    assert side is not None
    waited: list[str] = []
    original = torch.cuda.Stream.wait_event

    def wait_event(stream: torch.cuda.Stream, event: Any) -> None:
        waited.append("copies" if stream == side.stream else "computation")
        original(stream, event)

    source = torch.zeros(MEBIBYTE, device=device)
    host = [transfers.allocate(MEBIBYTE, torch.float32, device, True) for _ in range(2)]
    monkeypatch.setattr(torch.cuda.Stream, "wait_event", wait_event)
    first = transfers.Offloaded(source, host[0])
    # The copy waits for the computation that wrote the source.
    assert waited == ["copies"]
    first.forward_ended()
    assert waited == ["copies"]
    waited.clear()
    second = transfers.Offloaded(source, host[1])
    # The computation waits for the first copy before it reuses the memory.
    assert waited == ["computation", "copies"]
    waited.clear()
    first.fetch()
    assert waited == ["copies", "computation"]
    waited.clear()
    second.fetch()
    assert waited == ["computation"]


@pytest.mark.parametrize("mode", [mode for mode in MODES if "cpu" in mode])
@pytest.mark.parametrize("when", ["newest", "before the next", "after the next", "after the backward"])
@pytest.mark.allow_races("an edit while the activation is on the device races with the copy, so backward refuses it")
def test_edit_in_place_of_an_offloaded_activation(when: str, mode: str) -> None:
    # While the activation is on the device, an edit may reach the copy. After that, the host has the old values.
    checkpointing.configure(**MODES[mode])
    x = torch.linspace(0, 1, 8, device="cuda").requires_grad_()

    def gradient(edits: bool) -> torch.Tensor:
        h = x * 1
        out = checkpointing.checkpoint(lambda h: h.sin().exp(), h)
        if edits and when in ("newest", "before the next"):
            h.detach().add_(1)
        if when in ("before the next", "after the next"):
            checkpointing.checkpoint(lambda h: h.sin().exp(), x * 1)
        if edits and when == "after the next":
            h.detach().add_(1)
        (result,) = torch.autograd.grad(out.sum(), x)
        if edits and when == "after the backward":
            h.detach().add_(1)
        return result

    expected = gradient(False)
    if when in ("newest", "before the next"):
        with pytest.raises(RuntimeError, match="inplace operation: argument 0"):
            gradient(True)
    else:
        assert torch.equal(gradient(True), expected)


@pytest.mark.parametrize("mode", [mode for mode in MODES if "contiguous" in mode])
def test_devices_do_not_share_buffers(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    allocated: list[tuple[int, torch.device]] = []
    recorded: list[torch.device] = []
    allocate = transfers.allocate

    def recording(numel: int, dtype: torch.dtype, device: torch.device, on_host: bool) -> torch.Tensor:
        allocated.append((numel, device))
        return allocate(numel, dtype, device, on_host)

    def function(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        recorded.extend((one.device, other.device))
        return (one.cpu() * other.cpu()).exp()

    monkeypatch.setattr(transfers, "allocate", recording)
    checkpointing.configure(**MODES[mode])
    devices = [torch.device("cuda", index) for index in (0, 1)]
    inputs = [torch.linspace(index, index + 1, 8, device=device).requires_grad_() for index, device in enumerate(devices)]
    # Each device is at both positions, once.
    outputs = [checkpointing.checkpoint(function, one * 1, other * 1) for one, other in (inputs, reversed(inputs))]
    gradients = torch.autograd.grad(torch.stack(outputs).sum(), inputs)
    expected = torch.autograd.grad(torch.stack([function(*inputs), function(*reversed(inputs))]).sum(), inputs)
    assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))
    forward, recomputed = recorded[:4], recorded[4:8]
    assert sorted(map(str, recomputed)) == sorted(map(str, forward))
    assert allocated == [(2 * 8, device) for device in (*devices, *reversed(devices))]


def test_buffers_follow_checkpoint_in_cpu() -> None:
    x = torch.zeros(8, device="cuda", requires_grad=True)
    kept: list[Any] = []
    for on_host in (False, True, True, False):
        checkpointing.configure(
            partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2, checkpoint_in_cpu=on_host
        )
        checkpointing.checkpoint(lambda h: h.sin().exp(), x).sum().backward()
        buffers = checkpointing.configuration.current.buffers
        assert buffers is not None
        kept.append(buffers)
        (buffer,) = buffers._buffers.values()
        assert buffer.memory.is_cuda is not on_host
        assert buffer.memory.is_pinned() is on_host
    assert kept[1] is kept[2]


def test_gather_moves_an_activation_of_one_dimension() -> None:
    x = torch.arange(4.0, device="cuda", requires_grad=True)
    parts = checkpointing.partition_activations([x], True)
    pairs = checkpointing.get_partitioned_activations_for_backward([x], parts)
    (whole,) = checkpointing.gather_partitioned_activations(pairs, "cuda")
    assert whole.device == x.device
    assert torch.equal(whole, x)
    assert whole.is_leaf
    assert whole.requires_grad


def test_function_gets_a_copy_of_the_device_slot() -> None:
    checkpointing.configure(partition_activations=True, contiguous_checkpointing=True, num_checkpoints=1)
    recorded: list[torch.Tensor] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        recorded.append(h)
        return h.sin().exp()

    checkpointing.checkpoint(function, torch.zeros(8, device="cuda", requires_grad=True)).sum().backward()
    buffers = checkpointing.configuration.current.buffers
    assert buffers is not None
    (buffer,) = buffers._buffers.values()
    assert recorded[1].untyped_storage().data_ptr() != buffer.memory.untyped_storage().data_ptr()


@pytest.mark.parametrize("preserve", [True, False])
def test_accelerator_initialized_inside_a_checkpoint(preserve: bool) -> None:
    program = """
import sys, torch
from accelerator import checkpointing
checkpointing.configure(preserve_rng_state=sys.argv[1] == "True")
x = torch.ones(3, requires_grad=True)
on_the_device = lambda h: (2 * h.exp().cuda()).cpu()
try:
    checkpointing.checkpoint(on_the_device, x)
    print("quiet")
except RuntimeError as error:
    print(error)
out = checkpointing.checkpoint(on_the_device, x)
assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.autograd.grad(on_the_device(x).sum(), x)[0])
"""
    output = support.run(program, support.simulated_environment(gpus=1), str(preserve))
    assert output.startswith("the accelerator was initialized inside of a checkpoint" if preserve else "quiet")


def test_checkpoints_in_a_forked_child() -> None:
    # The child cannot use the accelerator of its parent, so its checkpoints run on the CPU. The parent runs no backward: after
    # a backward on a GPU, autograd does not work in forked children.
    program = """
import os, traceback, torch
from accelerator import checkpointing

def checkpoint(device):
    x = torch.linspace(0, 1, 4, device=device).requires_grad_()
    return checkpointing.checkpoint(lambda h: torch.nn.functional.dropout(h, 0.5).sin().exp(), x).sum()

checkpoint("cuda")
if (pid := os.fork()) == 0:
    try:
        checkpoint("cpu").backward()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
"""
    support.run(program, support.simulated_environment(gpus=1))


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("forward", [0, 1])
@pytest.mark.parametrize("backward", [0, 1])
@pytest.mark.parametrize("argument", ["cpu", "cuda:0", "cuda:1"])
def test_recomputation_has_the_current_device_of_its_forward(
    argument: str, backward: int, forward: int, nested: bool, settings: dict[str, Any]
) -> None:
    """Autograd's thread has the device of its node."""
    checkpointing.configure(**settings)
    current: list[int] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        current.append(torch.cuda.current_device())
        return (h * torch.rand(h.shape, device="cuda").to(h.device)).exp()

    h = torch.ones(3, device=argument, requires_grad=True)
    with torch.cuda.device(forward):
        out = checkpointing.checkpoint(lambda h: checkpointing.checkpoint(function, h) if nested else function(h), h)
    factor = out.detach().log()
    with torch.cuda.device(backward):
        out.sum().backward()
        assert torch.cuda.current_device() == backward
    assert set(current) == {forward}
    assert h.grad is not None
    assert torch.allclose(h.grad, factor * out.detach(), atol=1e-5)


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
def test_recomputation_draws_from_a_generator_of_the_gpu_again(settings: dict[str, Any]) -> None:
    checkpointing.configure(**settings)
    generator = torch.Generator("cuda:1").manual_seed(3)
    h = torch.ones(3, device="cuda:1", requires_grad=True)
    out = checkpointing.checkpoint(lambda h, g: (h * torch.rand(3, generator=g, device="cuda:1")).exp(), h, generator)
    out.sum().backward()
    assert h.grad is not None
    assert torch.allclose(h.grad, out.detach().log() * out.detach(), atol=1e-5)


@pytest.mark.parametrize("settings", MODES.values(), ids=MODES)
def test_running_statistics_of_a_gpu_change_once(settings: dict[str, Any]) -> None:
    checkpointing.configure(**settings)
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        layers = [torch.nn.BatchNorm1d(4), torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4))]
        model = torch.nn.Sequential(*layers).cuda(1)
        h = torch.randn(5, 4).cuda(1).requires_grad_()
        for _ in range(2):
            outs = [checkpointing.checkpoint(model, h * i) if checkpointed else model(h * i) for i in (1, 2)]
            (outs[0].sum() + outs[1].square().sum()).backward()
        results.append([h.grad, *model.state_dict().values(), *[each.grad for each in model.parameters()]])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.skipif(torch.__version__ < (2, 8), reason="torch 2.6 reads no generator during a capture")
def test_statistics_of_a_captured_checkpoint_change_once_a_replay() -> None:
    results = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = torch.nn.BatchNorm1d(4).cuda()
        h = torch.randn(5, 4).cuda().requires_grad_()

        def step(model: Any = model, h: torch.Tensor = h, checkpointed: bool = checkpointed) -> None:
            out = checkpointing.checkpoint(model, h) if checkpointed else model(h)
            (h.grad,) = torch.autograd.grad(out.square().sum(), h)

        with torch.cuda.stream(torch.cuda.Stream()):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(3):
            graph.replay()
        results.append([h.grad, *model.state_dict().values()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_recomputation_has_the_switches_of_the_gpu() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from accelerator.checkpointing import bindings

    seen: list[Any] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        seen.append(bindings.read_switches(True))
        return h.sin().exp()

    h = torch.ones(3, device="cuda", requires_grad=True)
    with torch.backends.cudnn.flags(enabled=False, deterministic=True), sdpa_kernel([SDPBackend.MATH]):
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            out = checkpointing.checkpoint(function, h)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False
    before = bindings.read_switches(True)
    out.sum().backward()
    assert bindings.read_switches(True) == before
    assert seen[0] == seen[1] != before
