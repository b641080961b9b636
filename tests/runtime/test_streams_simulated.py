"""Streams on two simulated GPUs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import accelerator as acc
from accelerator import streams


def state() -> tuple[int, int, int]:
    """Return the current device and the addresses of the current streams of both devices."""
    return torch.cuda.current_device(), *(torch.cuda.current_stream(index).cuda_stream for index in range(2))


def address(stream: torch.Stream) -> int:
    return torch.cuda.Stream(
        stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
    ).cuda_stream


CREATE: list[Callable[[int], torch.Stream]] = [
    lambda index: torch.Stream(torch.device("cuda", index)),
    lambda index: torch.cuda.Stream(index),
    lambda index: acc.Stream(acc.device(index)),
    lambda index: acc.external_stream(torch.cuda.Stream(index).cuda_stream, index),
]


@pytest.mark.parametrize("create", CREATE)
@pytest.mark.parametrize("index", range(2))
def test_context_restores_streams_and_device(create: Callable[[int], torch.Stream], index: int) -> None:
    torch.cuda.set_stream(torch.cuda.Stream(1))
    torch.cuda.set_stream(torch.cuda.Stream(0))
    before = state()
    stream = create(index)
    with acc.stream(stream) as nothing:
        assert nothing is None
        assert acc.current_device_index() == index
        assert state()[1 + index] == address(stream) != before[1 + index]
        assert state()[2 - index] == before[2 - index]
    assert state() == before
    for exception in (ValueError, KeyboardInterrupt):
        with pytest.raises(exception), acc.stream(stream):
            raise exception
        assert state() == before


def test_context_switches_like_torch_cuda_stream() -> None:
    """Nested contexts lead to the same states as those of torch.cuda.stream, also if the program changes streams inside."""
    first, second, third = torch.cuda.Stream(0), torch.cuda.Stream(1), torch.cuda.Stream(1)

    def observed(stream: Any) -> list[tuple[int, int, int]]:
        states = [state()]
        with stream(second):
            states.append(state())
            with stream(first):
                states.append(state())
                torch.cuda.set_stream(third)
                states.append(state())
                with stream(None):
                    states.append(state())
            states.append(state())
            torch.cuda.set_device(0)
            torch.cuda.set_stream(first)
        return [*states, state()]

    assert observed(acc.stream) == observed(torch.cuda.stream)


def test_context_restores_streams_set_inside() -> None:
    torch.cuda.set_stream(torch.cuda.Stream(1))
    torch.cuda.set_stream(torch.cuda.Stream(0))
    before = state()
    with acc.stream(torch.cuda.Stream(1)):
        torch.cuda.set_stream(torch.cuda.Stream(0))
        torch.cuda.set_stream(torch.cuda.Stream(1))
    assert state() == before


def test_stream_context_with_none_has_no_effect() -> None:
    torch.cuda.set_device(1)
    before = state()
    with acc.stream(None):
        assert state() == before
    assert state() == before


def test_reentrant_context() -> None:
    other = acc.stream(torch.cuda.Stream(0))
    context = acc.stream(torch.cuda.Stream(1))
    before = state()
    with context:
        inside = state()
        with other, context:
            assert state()[0] == 1
            with context:
                pass
        assert state() == inside
    assert state() == before


def test_context_shared_between_threads() -> None:
    contexts = [acc.stream(torch.cuda.Stream(1)), acc.stream(torch.cuda.Stream(0))]
    barrier = threading.Barrier(4)

    def work(position: int) -> bool:
        torch.cuda.set_device(position % 2)
        torch.cuda.set_stream(torch.cuda.Stream(position % 2))
        before, right = state(), True
        for turn in range(50):
            with contexts[turn % 2]:
                barrier.wait(30)
                inside = state()
                with contexts[1 - turn % 2]:
                    barrier.wait(30)
                right &= state() == inside and inside[0] == 1 - turn % 2
                barrier.wait(30)
            right &= state() == before
        return right

    before = state()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [True] * 4
    assert state() == before


@pytest.mark.parametrize("stream", [0, 1.5, "cuda:1", torch.device("cuda"), True, Ellipsis, torch.cuda.Stream], ids=repr)
def test_stream_of_wrong_type_raises(stream: Any) -> None:
    before = state()
    with pytest.raises(TypeError, match=r"takes a torch\.Stream or None"):
        acc.stream(stream)
    with pytest.raises(TypeError):
        acc.set_stream(stream)
    assert state() == before


def test_stream_of_another_device_type_raises() -> None:
    cpu = torch.Stream("cpu")
    before = state()
    with pytest.raises(ValueError, match="cpu doesn't match the current accelerator cuda"):
        acc.stream(cpu)
    with pytest.raises(RuntimeError, match="cpu doesn't match the current accelerator cuda"):
        acc.set_stream(cpu)
    assert state() == before


def test_set_stream_and_current_stream() -> None:
    stream = acc.Stream(acc.device(1))
    acc.set_stream(stream)
    assert acc.current_device_index() == 1
    assert acc.current_stream() == acc.current_stream(1) == acc.current_stream("cuda:1") == acc.current_stream(-1) == stream
    assert acc.current_stream(0) == acc.default_stream(0) != stream
    assert state()[2] == address(stream)
    assert isinstance(acc.current_stream(), acc.Stream)


def test_default_stream_equals_torchs() -> None:
    acc.set_stream(acc.Stream(acc.device(1)))
    for device, index in ((None, 1), (0, 0), (1, 1), ("cuda:0", 0), (torch.device("cuda"), 1)):
        ours, theirs = acc.default_stream(device), torch.cuda.default_stream(index)
        assert (ours.stream_id, ours.device) == (theirs.stream_id, theirs.device)
        assert isinstance(ours, acc.Stream)
        assert address(ours) == theirs.cuda_stream
    assert acc.current_stream(1) != acc.default_stream(1)
    with acc.stream(acc.default_stream(1)):
        assert acc.current_stream() == acc.default_stream()


def test_external_stream() -> None:
    made_elsewhere = torch.cuda.Stream(1)
    stream = acc.external_stream(made_elsewhere.cuda_stream, "cuda:1")
    assert isinstance(stream, acc.Stream)
    assert stream.device == torch.device("cuda", 1)
    assert address(stream) == made_elsewhere.cuda_stream
    with acc.stream(stream):
        assert acc.current_stream() == stream
    assert acc.external_stream(made_elsewhere.cuda_stream).device == torch.device("cuda", 0)
    event = stream.record_event()
    event.synchronize()
    assert stream.query()


@pytest.mark.parametrize("data_ptr", [None, 1.5, "0", b"0"])
def test_external_stream_rejects_non_integers(data_ptr: Any) -> None:
    with pytest.raises(TypeError):
        acc.external_stream(data_ptr)


def test_gpu_is_not_synchronized() -> None:
    assert acc.is_synchronized_device() is False
    assert acc.use_host_timers() is False
    assert acc.resolves_data_dependency() is False
    assert acc.handles_memory_backpressure() is False


def test_synchronize_and_events() -> None:
    with acc.stream(acc.Stream(acc.device(1))):
        begin, end = acc.Event(enable_timing=True), acc.Event(enable_timing=True)
        begin.record()
        end.record()
    for device in (None, 0, 1, "cuda:1", -1):
        acc.synchronize(device)
    assert begin.query()
    assert end.query()
    assert begin.elapsed_time(end) >= 0


def test_synchronize_of_negative_index(monkeypatch: pytest.MonkeyPatch) -> None:
    synchronized: list[int] = []
    acc.set_device_index(1)
    monkeypatch.setattr(streams, "_synchronize", synchronized.append)
    for device in (-1, None, 0, "cuda:0", "cuda"):
        acc.synchronize(device)
    assert synchronized == [1, 1, 0, 0, 1]


@pytest.mark.parametrize("records", [True, False])
def test_recorded_memory_is_not_used_again(records: bool) -> None:
    side = acc.Stream(1)
    tensor = torch.ones(2**20, device="cuda:1")
    address = tensor.data_ptr()
    side.wait_stream(acc.current_stream(1))
    with acc.stream(side):
        if records:
            torch.cuda._sleep(500_000_000)  # half a second  # type: ignore[attr-defined]
        doubled = tensor * 2
    if records:
        acc.record_stream(tensor, side)
    acc.record_stream(torch.ones(2), side)  # needs no record
    del tensor
    again = torch.empty(2**20, device="cuda:1")
    assert (again.data_ptr() == address) == (not records)
    del doubled
