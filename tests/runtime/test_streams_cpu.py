"""Streams, events and low-level functions under the CPU fallback."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import accelerator as acc


def test_current_stream_is_the_default_stream() -> None:
    assert acc.current_stream() == acc.default_stream() == acc.current_stream(0) == acc.default_stream("cpu")
    assert isinstance(acc.current_stream(), acc.Stream)
    assert isinstance(acc.Stream(), torch.Stream)
    assert acc.set_stream(acc.Stream()) is None
    assert acc.synchronize() is None


def test_contexts_have_no_effect() -> None:
    context = acc.stream(acc.Stream())
    before = acc.current_stream()
    with context as nothing, context, acc.stream(None):
        assert nothing is None
        assert acc.current_stream() == before
    with pytest.raises(KeyError), context:
        raise KeyError


@pytest.mark.parametrize("stream", [0, 1.5, "cpu", torch.device("cpu"), True, Ellipsis], ids=repr)
def test_stream_of_wrong_type_raises(stream: Any) -> None:
    with pytest.raises(TypeError, match=r"takes a torch\.Stream or None"):
        acc.stream(stream)
    with pytest.raises(TypeError, match=r"takes a torch\.Stream"):
        acc.set_stream(stream)


def test_events() -> None:
    host_begin = time.perf_counter()
    begin, end = acc.Event(enable_timing=True), acc.Event(enable_timing=True)
    stream = acc.current_stream()
    begin.record()
    end.record(stream)
    begin.wait()
    stream.wait_event(end)
    stream.wait_stream(acc.Stream())
    end.synchronize()
    stream.synchronize()
    assert stream.query()
    assert end.query()
    assert 0 <= begin.elapsed_time(end) <= (time.perf_counter() - host_begin) * 1000
    assert stream.record_event().query()
    with pytest.raises(ValueError, match="enable_timing"):
        begin.elapsed_time(acc.Event())
    with pytest.raises(ValueError, match="recorded"):
        begin.elapsed_time(acc.Event(enable_timing=True))


def test_recording_a_stream_does_nothing() -> None:
    tensor = torch.ones(2)
    with pytest.raises(NotImplementedError):
        tensor.record_stream(acc.current_stream())
    assert acc.record_stream(tensor, acc.current_stream()) is None
    assert acc.record_stream(tensor.to_sparse(), acc.Stream()) is None
    with pytest.raises(TypeError, match=r"record_stream\(\) takes a torch.Tensor, not list"):
        acc.record_stream([tensor], acc.Stream())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"record_stream\(\) takes a torch.Stream, not NoneType"):
        acc.record_stream(tensor, None)  # type: ignore[arg-type]


def test_external_stream_raises() -> None:
    with pytest.raises(RuntimeError, match="under the CPU fallback"):
        acc.external_stream(0)
    with pytest.raises(TypeError):
        acc.external_stream(None)  # type: ignore[arg-type]


def test_cpu_device_is_synchronized() -> None:
    assert acc.is_synchronized_device() is True
    assert acc.use_host_timers() is True
    assert acc.resolves_data_dependency() is True
    assert acc.handles_memory_backpressure() is True


def test_init_and_lazy_call_on_the_cpu() -> None:
    called: list[int] = []
    assert acc.init() is None
    assert acc.is_initialized() is False
    assert acc.lazy_call(lambda: called.append(1)) is None
    assert called == [1]
    with pytest.raises(TypeError, match="takes a callable"):
        acc.lazy_call(1)  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [acc.cudart, acc.current_blas_handle])
def test_cuda_libraries_raise(function: Any) -> None:
    with pytest.raises(RuntimeError, match="needs CUDA, but there is no accelerator"):
        function()


def test_sync_debug_mode() -> None:
    for mode in (0, 1, 2, "default", "warn", "error"):
        assert acc.set_sync_debug_mode(mode) is None
        assert acc.get_sync_debug_mode() == 0
    for wrong in (3, -1, "loud"):
        with pytest.raises(RuntimeError, match="sync debug mode must be"):
            acc.set_sync_debug_mode(wrong)
    for wrong in (1.0, None, True):
        with pytest.raises(TypeError, match="sync debug mode must be"):
            acc.set_sync_debug_mode(wrong)  # type: ignore[arg-type]


def test_ipc_collect() -> None:
    assert acc.ipc_collect() is None


def test_elapsed_time_is_in_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter_ns", iter((1_000, 2_501_000)).__next__)
    start, end = acc.Event(enable_timing=True), acc.Event(enable_timing=True)
    start.record()
    end.record()
    assert start.elapsed_time(end) == 2.5
