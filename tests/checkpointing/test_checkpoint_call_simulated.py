"""Tests on two simulated GPUs: device memory, pinned memory, streams, copies and random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import accelerator as acc
from accelerator import checkpointing
from accelerator.checkpointing import transfers
from tests.support.checkpointing_memory import allocated, allocated_after_backward, modes

MEBIBYTE = 2**20
LAYERS = 8
# Elements of one activation: 1 MiB.
SIZE = MEBIBYTE // 4


def on_host() -> int | None:
    """Return the bytes of pinned memory that torch holds, None if this torch does not count them."""
    statistics: Any = getattr(torch.cuda, "host_memory_stats", dict)()
    # Before torch 2.10, allocated_bytes counts the memory in use: https://github.com/pytorch/pytorch/pull/164412.
    count: int | None = statistics.get("reserved_bytes.current", statistics.get("allocated_bytes.current"))
    return count


def layer(h: torch.Tensor) -> torch.Tensor:
    return h.sin().exp()


def forward(x: torch.Tensor, ckpt: Callable[..., Any] = checkpointing.checkpoint) -> torch.Tensor:
    h = x * 1
    for _ in range(LAYERS):
        h = ckpt(layer, h)
    return h


MODES = {name: modes(LAYERS)[name] for name in ("cpu", "contiguous+cpu")}


@pytest.mark.parametrize("mode", MODES)
def test_offload_moves_device_memory_to_pinned_memory(mode: str) -> None:
    checkpointing.configure()
    x = torch.zeros(SIZE, device="cuda", requires_grad=True)
    before = allocated_after_backward()
    h = forward(x)
    plain = allocated_after_backward() - before
    assert plain == (LAYERS + 1) * MEBIBYTE
    del h
    assert allocated_after_backward() == before
    checkpointing.configure(**MODES[mode])
    acc.synchronize()
    acc.empty_host_cache()
    pinned = on_host()
    h = forward(x)
    # The output and the last input, which backward needs first, stay on the device.
    assert allocated_after_backward() - before == 2 * MEBIBYTE
    if pinned is not None:
        assert on_host() - pinned >= LAYERS * MEBIBYTE  # type: ignore[operator]
    torch.cuda.reset_peak_memory_stats()
    at_forward = allocated()
    h.sum().backward()
    # During backward: one layer's activations, the gradients of the next layer and one prefetched input.
    assert torch.cuda.max_memory_allocated() - at_forward <= 5 * MEBIBYTE
    del h
    assert allocated_after_backward() - before == MEBIBYTE, "more than the gradient of x is left"
    # The next iteration reuses the pinned memory. torch's allocator allocates more if the copies that use it have not ended.
    acc.synchronize()
    pinned, x.grad = on_host(), None
    forward(x).sum().backward()
    assert on_host() == pinned


@pytest.mark.parametrize("inputs", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_offload_limits_the_inputs_on_the_device(inputs: int) -> None:
    checkpointing.configure(checkpoint_in_cpu=True)
    unit = MEBIBYTE
    x = torch.zeros(SIZE, device="cuda", requires_grad=True)
    held: list[int] = []

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        held.append((allocated() - before) // unit)
        return tuple(each.sin().exp() for each in tensors)

    before = allocated_after_backward()
    tensors = tuple(x * 1 for _ in range(inputs))
    for _ in range(LAYERS):
        tensors = checkpointing.checkpoint(function, *tensors)
    # During each forward, only its inputs are on the device.
    assert held == [inputs] * LAYERS
    # The outputs and the newest input are on the device.
    assert allocated_after_backward() - before == (inputs + 1) * unit
    held.clear()
    gradient = torch.autograd.grad(sum(each.sum() for each in tensors), x)
    # The outputs, the gradients, the inputs of the checkpoint, and the prefetched inputs of the next one.
    assert max(held) <= 4 * inputs
    del tensors, gradient
    assert allocated_after_backward() == before


def test_second_fetch_copies_from_pinned_memory() -> None:
    source = torch.zeros(100, device="cuda")
    host = transfers.allocate(100, torch.float32, source.device, True)
    assert host.is_pinned()
    moved = transfers.Offloaded(source, host)
    assert moved.fetch() is source
    back = moved.fetch()
    assert back.device == source.device
    assert back.data_ptr() != source.data_ptr()


def test_copies_use_a_separate_stream() -> None:
    x = torch.zeros(SIZE, device="cuda", requires_grad=True)
    checkpointing.configure(checkpoint_in_cpu=True)
    current = torch.cuda.current_stream()
    forward(x).sum().backward()
    side = transfers._copy_stream(x.device)
    assert side is not None
    assert side.stream != current
    assert torch.cuda.current_stream() == current


@pytest.mark.allow_races("an edit races with the copy, so backward refuses it")
def test_input_edited_during_offload_is_an_error() -> None:
    checkpointing.configure(checkpoint_in_cpu=True)
    x = torch.zeros(100, device="cuda", requires_grad=True)
    h = x * 1
    out = checkpointing.checkpoint(layer, h)
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_backward_and_dropped_graph_free_memory() -> None:
    checkpointing.configure(checkpoint_in_cpu=True)
    x = torch.zeros(SIZE, device="cuda", requires_grad=True)
    before = allocated_after_backward()
    h = forward(x)
    h.sum().backward(retain_graph=True)
    h.sum().backward()
    del h
    x.grad = None
    forward(x)
    assert allocated_after_backward() == before


def offsets() -> list[int]:
    return [generator.get_offset() for generator in torch.cuda.default_generators]


@pytest.mark.parametrize("device", [0, 1])
def test_generator_of_each_device_is_restored(device: int) -> None:
    def function(h: torch.Tensor) -> torch.Tensor:
        recorded.append(torch.cuda.default_generators[device].get_offset())
        return torch.nn.functional.dropout(h, 0.5).exp()

    recorded: list[int] = []
    torch.cuda.manual_seed_all(1)
    x = torch.zeros(1000, device=f"cuda:{device}", requires_grad=True)
    out = checkpointing.checkpoint(function, x)
    torch.rand(10, device=x.device)
    before = offsets()
    assert before[device] > 0
    out.sum().backward()
    assert offsets() == before
    assert recorded == [0, 0]


def test_generators_are_restored_after_an_exception() -> None:
    def function(h: torch.Tensor) -> torch.Tensor:
        recorded.append(1)
        h = torch.nn.functional.dropout(h, 0.5)
        if len(recorded) == 2:
            raise KeyError("mine")
        return h.exp().sin()

    recorded: list[int] = []
    out = checkpointing.checkpoint(function, torch.zeros(1000, device="cuda", requires_grad=True))
    torch.rand(10, device="cuda")  # so that the generator is not where the failed recomputation leaves it
    before = offsets()
    with pytest.raises(KeyError):
        out.sum().backward()
    assert offsets() == before


def test_repeated_forks_continue_one_random_state() -> None:
    checkpointing.model_parallel_cuda_manual_seed(10)
    tracker, default = checkpointing.get_cuda_rng_tracker(), torch.cuda.default_generators[0]
    assert (default.initial_seed(), default.get_offset()) == (10, 0)
    with tracker.fork():
        assert (default.initial_seed(), default.get_offset()) == (10 + 2718, 0)
        torch.rand(4, device="cuda")
        first = default.get_offset()
        with tracker.fork():
            assert default.get_offset() == first
            torch.rand(4, device="cuda")
        assert default.get_offset() == 2 * first
    assert (default.initial_seed(), default.get_offset()) == (10, 0)
    states = tracker.get_states()
    with tracker.fork():
        assert default.get_offset() == 2 * first
        torch.rand(4, device="cuda")
    tracker.set_states(states)
    with tracker.fork():
        assert default.get_offset() == 2 * first


@pytest.mark.parametrize("forked", ["", "forward", "backward", "both"])
def test_recomputation_draws_the_same_random_numbers(forked: str) -> None:
    tracker, default = checkpointing.get_cuda_rng_tracker(), torch.cuda.default_generators[0]

    def function(h: torch.Tensor) -> torch.Tensor:
        recorded.append((default.initial_seed(), default.get_offset()))
        h = torch.nn.functional.dropout(h, 0.5)
        with tracker.fork():
            recorded.append((default.initial_seed(), default.get_offset()))
            h = torch.nn.functional.dropout(h, 0.5)
        recorded.append((default.initial_seed(), default.get_offset()))
        return torch.nn.functional.dropout(h, 0.5).exp()

    recorded: list[tuple[int, int]] = []
    checkpointing.model_parallel_cuda_manual_seed(10)
    x = torch.zeros(1000, device="cuda", requires_grad=True)
    if "forward" in forked or forked == "both":
        with tracker.fork():
            torch.rand(4, device="cuda")
            out = checkpointing.checkpoint(function, x)
    else:
        out = checkpointing.checkpoint(function, x)
    torch.rand(4, device="cuda")

    def backward() -> None:
        before = (default.initial_seed(), default.get_offset())
        out.sum().backward()
        assert (default.initial_seed(), default.get_offset()) == before

    states = tracker.get_states()
    if forked in ("backward", "both"):
        with tracker.fork():
            backward()
    else:
        backward()
    assert recorded[:3] == recorded[3:]
    assert len(recorded) == 6
    assert all(torch.equal(state, tracker.get_states()[name]) for name, state in states.items())


def test_fork_uses_the_current_device() -> None:
    tracker = checkpointing.get_cuda_rng_tracker()
    tracker.add("a", 5)
    torch.cuda.set_device(1)
    with tracker.fork("a"):
        assert torch.cuda.default_generators[1].initial_seed() == 5
        assert torch.cuda.default_generators[0].initial_seed() != 5


@pytest.mark.parametrize("make", [torch.cuda.CUDAGraph, acc.create_graph])
def test_fork_during_graph_capture(make: Callable[[], Any]) -> None:
    tracker = checkpointing.get_cuda_rng_tracker()
    tracker.add("a", 5)
    graph = make()
    tracker.register_graph(graph)
    x = torch.zeros(100, device="cuda")
    with torch.cuda.graph(graph):
        with tracker.fork("a"):
            torch.nn.functional.dropout(x, 0.5)
        torch.nn.functional.dropout(x, 0.5)
    before = tracker.get_states()["a"]
    graph.replay()
    assert not torch.equal(tracker.get_states()["a"], before)


def test_device_buffers_are_kept_until_reset() -> None:
    checkpointing.configure(partition_activations=True, contiguous_checkpointing=True, num_checkpoints=LAYERS)
    x = torch.zeros(SIZE, device="cuda", requires_grad=True)
    forward(x).sum().backward()
    before = allocated_after_backward()
    for _ in range(3):
        forward(x).sum().backward()
        assert allocated_after_backward() == before
    checkpointing.reset()
    assert before - allocated_after_backward() == LAYERS * MEBIBYTE


def test_synchronize_and_profile() -> None:
    checkpointing.configure(synchronize=True, profile=True)
    x = torch.zeros(100, device="cuda", requires_grad=True)
    checkpointing.checkpoint(layer, x).sum().backward()
    assert checkpointing.region_times(clear=True)["layer"].recomputations == 1


def test_recomputation_restores_device_autocast() -> None:
    recorded: list[tuple[bool, torch.dtype]] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        recorded.append((torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")))
        return h.exp().sin()

    x = torch.zeros(8, device="cuda", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = checkpointing.checkpoint(function, x)
    out.sum().backward()
    out = checkpointing.checkpoint(function, x)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out.sum().backward()
    assert recorded[0] == recorded[1] == (True, torch.bfloat16)
    assert not recorded[2][0]
    assert not recorded[3][0]
