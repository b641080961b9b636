"""Streams, events, random states and graphs of the simulated CUDA, tested through torch in this process."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support.simulation_driver import make_busy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIB = 2**20
# torch.cuda._sleep takes a number of clock cycles. A cycle of a simulated GPU lasts a nanosecond.
MILLISECOND = 1_000_000
# Of captures and of threads, by CUDA's numbers.
MODES = ("global", "thread local", "relaxed")


def sleep_on(stream: torch.cuda.Stream, cycles: int) -> torch.cuda.Stream:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)
    return stream


class TestStreams:
    def test_sleeping_stream_is_busy_until_it_is_done(self) -> None:
        begin = time.monotonic()
        stream = make_busy(partial(sleep_on, torch.cuda.Stream()))
        stream.synchronize()
        assert time.monotonic() - begin >= 0.05
        assert stream.query()

    def test_streams_are_independent(self) -> None:
        busy, idle = torch.cuda.Stream(), torch.cuda.Stream()

        def submit(cycles: int) -> torch.cuda.Stream:
            sleep_on(busy, cycles)
            assert idle.query()
            idle.synchronize()
            return busy

        make_busy(submit, 100)

    def test_wait_event_delays_the_stream(self) -> None:
        first, second = torch.cuda.Stream(), torch.cuda.Stream()

        def submit(cycles: int) -> torch.cuda.Stream:
            second.wait_event(sleep_on(first, cycles).record_event())
            return second

        make_busy(submit)
        second.synchronize()
        assert first.query()

    def test_device_synchronization_waits_for_all_of_its_streams(self) -> None:
        stream = torch.cuda.Stream(1)

        def submit(cycles: int) -> torch.cuda.Stream:
            sleep_on(stream, cycles)
            torch.cuda.synchronize(0)
            return stream

        make_busy(submit)
        torch.cuda.synchronize(1)
        assert stream.query()

    def test_priorities(self, runtime: ctypes.CDLL) -> None:
        least, greatest = ctypes.c_int(), ctypes.c_int()
        assert runtime.cudaDeviceGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(greatest)) == 0
        assert (least.value, greatest.value) == (0, -5)
        assert torch.cuda.Stream(priority=-1).priority == -1
        assert torch.cuda.Stream().priority == 0

    @pytest.mark.parametrize(("requested", "expected"), [(-3, -3), (-6, -5), (-1000, -5), (1, 0), (1000, 0)])
    def test_priorities_are_clamped(self, runtime: ctypes.CDLL, requested: int, expected: int) -> None:
        stream, priority = ctypes.c_void_p(), ctypes.c_int(77)
        assert runtime.cudaStreamCreateWithPriority(ctypes.byref(stream), 1, requested) == 0
        assert runtime.cudaStreamGetPriority(stream, ctypes.byref(priority)) == 0
        assert priority.value == expected
        assert runtime.cudaStreamDestroy(stream) == 0

    def test_unknown_stream_is_an_error(self, runtime: ctypes.CDLL) -> None:
        no_stream = ctypes.create_string_buffer(256)
        assert runtime.cudaStreamQuery(no_stream) == 400
        stream = ctypes.c_void_p()
        assert runtime.cudaStreamCreate(ctypes.byref(stream)) == 0
        assert runtime.cudaStreamDestroy(stream) == 0
        assert runtime.cudaStreamDestroy(stream) == 400
        assert runtime.cudaGetLastError() == 400

    def test_host_function_runs(self, runtime: ctypes.CDLL) -> None:
        called = threading.Event()
        callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: called.set())
        assert runtime.cudaLaunchHostFunc(None, callback, None) == 0
        assert called.is_set()


class TestEvents:
    def test_elapsed_time(self) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin = time.monotonic()

        def submit(cycles: int) -> torch.cuda.Event:
            start.record()
            torch.cuda._sleep(cycles)
            end.record()
            return end

        make_busy(submit, 30)
        end.synchronize()
        assert end.query()
        assert 30 <= start.elapsed_time(end) <= (time.monotonic() - begin) * 1000

    def test_elapsed_time_without_work_is_host_time(self) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        time.sleep(0.02)
        end.record()
        assert start.elapsed_time(end) >= 20

    def test_queries_of_unrecorded_and_pending_events(self, runtime: ctypes.CDLL) -> None:
        start, end, milliseconds = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_float()
        assert runtime.cudaEventCreate(ctypes.byref(start)) == runtime.cudaEventCreate(ctypes.byref(end)) == 0
        assert runtime.cudaEventQuery(start) == 0, "an event that was never recorded is complete"
        assert runtime.cudaEventElapsedTime(ctypes.byref(milliseconds), start, end) == 400
        assert runtime.cudaEventRecord(start, None) == 0
        assert runtime.cudaGetLastError() == 400
        torch.cuda._sleep(20 * MILLISECOND)
        assert runtime.cudaEventRecord(end, None) == 0
        assert runtime.cudaEventQuery(end) == 600
        assert runtime.cudaEventElapsedTime(ctypes.byref(milliseconds), start, end) == 600
        assert runtime.cudaEventSynchronize(end) == 0
        assert runtime.cudaEventElapsedTime(ctypes.byref(milliseconds), start, end) == 0
        assert milliseconds.value >= 20
        assert runtime.cudaEventDestroy(start) == runtime.cudaEventDestroy(end) == 0
        assert runtime.cudaEventQuery(end) == 400
        assert runtime.cudaGetLastError() == 400

    def test_events_without_timing_have_no_elapsed_time(self, runtime: ctypes.CDLL) -> None:
        disable_timing = 2
        event, milliseconds = ctypes.c_void_p(), ctypes.c_float()
        assert runtime.cudaEventCreateWithFlags(ctypes.byref(event), disable_timing) == 0
        assert runtime.cudaEventRecord(event, None) == 0
        assert runtime.cudaEventElapsedTime(ctypes.byref(milliseconds), event, event) == 400
        assert runtime.cudaEventDestroy(event) == 0
        assert runtime.cudaGetLastError() == 400

    def test_recording_on_another_devices_stream_is_an_error(self, runtime: ctypes.CDLL) -> None:
        event = ctypes.c_void_p()
        assert runtime.cudaEventCreate(ctypes.byref(event)) == 0
        other = torch.cuda.Stream(1)
        assert runtime.cudaEventRecord(event, ctypes.c_void_p(other.cuda_stream)) == 400
        assert runtime.cudaEventDestroy(event) == 0
        assert runtime.cudaGetLastError() == 400

    def test_elapsed_time_over_two_devices_is_an_error(self, runtime: ctypes.CDLL) -> None:
        milliseconds, events = ctypes.c_float(), [ctypes.c_void_p(), ctypes.c_void_p()]
        for device, event in enumerate(events):
            with torch.cuda.device(device):
                assert runtime.cudaEventCreate(ctypes.byref(event)) == 0
                assert runtime.cudaEventRecord(event, None) == 0
                assert runtime.cudaEventElapsedTime(ctypes.byref(milliseconds), event, event) == 0
        assert runtime.cudaEventElapsedTime(ctypes.byref(milliseconds), *events) == 400
        assert runtime.cudaGetLastError() == 400
        for event in events:
            assert runtime.cudaEventDestroy(event) == 0

    def test_wait_for_another_device_makes_the_device_busy(self) -> None:
        event = torch.cuda.Event()
        begin = time.monotonic()
        with torch.cuda.device(0):
            torch.cuda._sleep(300 * MILLISECOND)
            event.record()
        streams = [torch.cuda.Stream(1), torch.cuda.current_stream(1)]
        streams[0].wait_event(event)
        assert [stream.query() for stream in streams] == [False, True]
        torch.cuda.synchronize(1)
        assert time.monotonic() - begin >= 0.3

    @pytest.mark.parametrize("ends", ["ended", "invalidated"])
    def test_event_is_reused_after_a_capture(self, runtime: ctypes.CDLL, ends: str) -> None:
        stream, other, graph = torch.cuda.Stream(), torch.cuda.Stream(), ctypes.c_void_p()
        handle, event = ctypes.c_void_p(stream.cuda_stream), ctypes.c_void_p()
        assert runtime.cudaEventCreate(ctypes.byref(event)) == 0
        for _ in range(3):
            assert runtime.cudaStreamBeginCapture(handle, 0) == 0
            assert runtime.cudaEventRecord(event, handle) == 0
            if ends == "invalidated":
                assert runtime.cudaStreamSynchronize(handle) == 900
            assert (runtime.cudaStreamEndCapture(handle, ctypes.byref(graph)) == 0) == (ends == "ended")
            assert (runtime.cudaGraphDestroy(graph) == 0) == (ends == "ended")
            assert runtime.cudaEventQuery(event) == 907  # a captured event
            assert runtime.cudaStreamWaitEvent(ctypes.c_void_p(other.cuda_stream), event, 0) == 907
            assert runtime.cudaEventRecord(event, handle) == 0
            milliseconds = ctypes.c_float(-1)
            assert runtime.cudaStreamWaitEvent(ctypes.c_void_p(other.cuda_stream), event, 0) == 0
            assert [runtime.cudaEventSynchronize(event), runtime.cudaEventQuery(event)] == [0, 0]
            assert runtime.cudaEventElapsedTime(ctypes.byref(milliseconds), event, event) == 0
            assert milliseconds.value == 0
        assert runtime.cudaEventDestroy(event) == 0
        runtime.cudaGetLastError()

    def test_destroyed_ipc_event_closes_its_descriptor(self, runtime: ctypes.CDLL) -> None:
        def descriptors() -> int:
            return len(os.listdir("/proc/self/fd"))

        interprocess_without_timing = 6
        before, handle = descriptors(), (ctypes.c_char * 64)()
        event = ctypes.c_void_p()
        assert runtime.cudaEventCreateWithFlags(ctypes.byref(event), interprocess_without_timing) == 0
        assert runtime.cudaIpcGetEventHandle(handle, event) == 0
        assert descriptors() == before + 1
        assert runtime.cudaEventDestroy(event) == 0
        assert descriptors() == before


class TestRandomStates:
    def test_state_round_trip(self) -> None:
        torch.cuda.manual_seed_all(1234)
        before = torch.cuda.get_rng_state(1)
        assert torch.cuda.initial_seed() == 1234
        torch.rand(100, device="cuda:1")
        after = torch.cuda.get_rng_state(1)
        assert not torch.equal(before, after), "drawing numbers advances the offset"
        torch.cuda.set_rng_state(before, 1)
        assert torch.equal(torch.cuda.get_rng_state(1), before)
        torch.rand(100, device="cuda:1")
        assert torch.equal(torch.cuda.get_rng_state(1), after), "the same draws advance it as far"

    def test_devices_have_their_own_state(self) -> None:
        torch.cuda.manual_seed_all(5)
        other = torch.cuda.get_rng_state(1)
        torch.rand(10, device="cuda:0")
        assert torch.equal(torch.cuda.get_rng_state(1), other)
        assert not torch.equal(torch.cuda.get_rng_state(0), other)


class TestGraphs:
    @pytest.fixture(autouse=True)
    def fetch_last_error(self, runtime: ctypes.CDLL) -> Iterator[None]:
        yield
        runtime.cudaGetLastError()

    def test_replay_copies_current_host_values(self) -> None:
        source, target = torch.zeros(1000, pin_memory=True), torch.empty(1000, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            target.copy_(source, non_blocking=True)
        for value in (3.0, 4.0):
            source.fill_(value)
            graph.replay()
            torch.cuda.synchronize()
            assert target.cpu().eq(value).all()

    def test_captured_copy_does_not_run_at_capture(self) -> None:
        source, target = torch.ones(10, pin_memory=True), torch.ones(10).cuda()
        source.fill_(2)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            target.copy_(source, non_blocking=True)
        assert target.cpu().eq(1).all()

    def test_captured_sleep_runs_at_replay(self) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.cuda._sleep(30 * MILLISECOND)
        torch.cuda.synchronize()
        begin = time.monotonic()
        graph.replay()
        torch.cuda.synchronize()
        assert time.monotonic() - begin >= 0.03

    def test_capture_of_forked_and_joined_streams(self) -> None:
        source, target = torch.zeros(10, pin_memory=True), torch.zeros(10).cuda()
        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                assert torch.cuda.is_current_stream_capturing()
                target.copy_(source, non_blocking=True)
            torch.cuda.current_stream().wait_stream(side)
        source.fill_(9)
        graph.replay()
        assert target.cpu().eq(9).all()

    def test_destroyed_graph_releases_its_user_objects(self, runtime: ctypes.CDLL) -> None:
        move, destroyed = 1, []
        destroy = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(destroyed.append)
        stream, graph, user_object = torch.cuda.Stream(), ctypes.c_void_p(), ctypes.c_void_p()
        self.begin(runtime, stream)
        assert runtime.cudaStreamEndCapture(ctypes.c_void_p(stream.cuda_stream), ctypes.byref(graph)) == 0
        assert runtime.cudaUserObjectCreate(ctypes.byref(user_object), ctypes.c_void_p(7), destroy, 1, 1) == 0
        assert runtime.cudaGraphRetainUserObject(graph, user_object, 2, 0) == 0
        assert runtime.cudaGraphRetainUserObject(graph, user_object, 1, move) == 0
        assert destroyed == []
        assert runtime.cudaGraphDestroy(graph) == 0
        assert destroyed == [7]

    def test_printed_graph_names_every_kind_of_node(self, runtime: ctypes.CDLL, tmp_path: Path) -> None:
        stream, other, graph = torch.cuda.Stream(), torch.cuda.Stream(), ctypes.c_void_p()
        handle, external = ctypes.c_void_p(stream.cuda_stream), 1
        values, event = torch.ones(4, device="cuda"), torch.cuda.Event()
        event.record(other)
        host_function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
        computation = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_uint64)(lambda _: True)
        address, size = ctypes.c_void_p(values.data_ptr()), ctypes.c_size_t(8)
        self.begin(runtime, stream)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1)
        assert runtime.accelerator_simulation_compute(handle, computation, ctypes.c_uint64(0)) == 0
        assert runtime.cudaMemcpyAsync(address, ctypes.c_void_p(values.data_ptr() + 8), size, 3, handle) == 0
        assert runtime.cudaMemsetAsync(address, 0, size, handle) == 0
        assert runtime.cudaLaunchHostFunc(handle, host_function, None) == 0
        assert runtime.cudaEventRecordWithFlags(ctypes.c_void_p(event.cuda_event), handle, external) == 0
        assert runtime.cudaStreamWaitEvent(handle, ctypes.c_void_p(event.cuda_event), external) == 0
        assert runtime.cudaStreamEndCapture(handle, ctypes.byref(graph)) == 0
        path = tmp_path / "graph.dot"
        assert runtime.cudaGraphDebugDotPrint(graph, bytes(path), 0) == 0
        assert runtime.cudaGraphDestroy(graph) == 0
        labels = [line.split('"')[3] for line in path.read_text().splitlines() if "label" in line]
        assert labels == ["KERNEL", "KERNEL", "MEMCPY", "MEMSET", "HOST", "EVENT_RECORD", "EVENT_WAIT"]

    # Tests of failing captures do not use torch.cuda.graph, because torch 2.6 does not recover from a failed capture.
    def begin(self, runtime: ctypes.CDLL, stream: torch.cuda.Stream) -> None:
        assert runtime.cudaStreamBeginCapture(ctypes.c_void_p(stream.cuda_stream), 0) == 0

    def end(self, runtime: ctypes.CDLL, stream: torch.cuda.Stream) -> int:
        graph = ctypes.c_void_p()
        error = runtime.cudaStreamEndCapture(ctypes.c_void_p(stream.cuda_stream), ctypes.byref(graph))
        assert (graph.value is None) == (error != 0)
        if graph.value is not None:
            assert runtime.cudaGraphDestroy(graph) == 0
        return error

    def test_capture_of_unjoined_stream_is_an_error(self, runtime: ctypes.CDLL) -> None:
        stream, side = torch.cuda.Stream(), torch.cuda.Stream()
        for joins_back, error in ((True, 0), (False, 904)):
            self.begin(runtime, stream)
            side.wait_stream(stream)
            with torch.cuda.stream(side):
                torch.cuda._sleep(10)
            if joins_back:
                stream.wait_stream(side)
            assert self.end(runtime, stream) == error
            with torch.cuda.stream(side):
                assert not torch.cuda.is_current_stream_capturing()

    def test_synchronizing_ends_the_capture(self, runtime: ctypes.CDLL) -> None:
        stream = torch.cuda.Stream()
        for forbidden in (torch.cuda.synchronize, stream.synchronize, stream.query):
            self.begin(runtime, stream)
            with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
                forbidden()
            with torch.cuda.stream(stream), pytest.raises(RuntimeError, match="previous error during capture"):
                torch.cuda._sleep(10)
            assert self.end(runtime, stream) == 901
            assert runtime.cudaGetLastError() == 901
            forbidden()

    def test_waiting_for_uncaptured_work_is_an_error(self, runtime: ctypes.CDLL) -> None:
        event, stream = torch.cuda.Event(), torch.cuda.Stream()
        event.record()
        self.begin(runtime, stream)
        with pytest.raises(RuntimeError, match="uncaptured work"):
            stream.wait_event(event)
        assert self.end(runtime, stream) == 901

    @pytest.mark.parametrize("in_other_thread", [False, True])
    @pytest.mark.parametrize("thread_mode", MODES)
    @pytest.mark.parametrize("mode", MODES)
    def test_modes_of_capture_and_thread_decide_which_calls_fail(
        self, runtime: ctypes.CDLL, mode: str, thread_mode: str, in_other_thread: bool
    ) -> None:
        """A thread in global mode respects global captures of all threads, any but a relaxed one its own captures."""
        respects = mode != "relaxed" and thread_mode != "relaxed"
        if in_other_thread:
            respects = mode == thread_mode == "global"
        stream, graph, pointer = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        assert runtime.cudaStreamCreateWithFlags(ctypes.byref(stream), 1) == 0
        assert runtime.cudaStreamBeginCapture(stream, MODES.index(mode)) == 0

        def allocate() -> tuple[int, int]:
            exchanged = ctypes.c_int(MODES.index(thread_mode))
            assert runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(exchanged)) == 0
            error = runtime.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(MIB))
            assert runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(exchanged)) == 0
            return error, exchanged.value

        if in_other_thread:
            with ThreadPoolExecutor(1) as pool:
                error, exchanged = pool.submit(allocate).result()
        else:
            error, exchanged = allocate()
        assert MODES[exchanged] == thread_mode
        assert error == (900 if respects else 0)
        assert runtime.cudaStreamEndCapture(stream, ctypes.byref(graph)) == (901 if error else 0)
        assert runtime.cudaFree(pointer) == 0
        assert runtime.cudaStreamDestroy(stream) == 0

    def test_wait_for_an_event_that_was_never_recorded(self, runtime: ctypes.CDLL) -> None:
        stream, event = torch.cuda.Stream(), ctypes.c_void_p()
        assert runtime.cudaEventCreate(ctypes.byref(event)) == 0
        self.begin(runtime, stream)
        assert runtime.cudaStreamWaitEvent(ctypes.c_void_p(stream.cuda_stream), event, 0) == 0
        assert self.end(runtime, stream) == 0
        assert runtime.cudaEventDestroy(event) == 0

    def test_two_instances_of_a_graph_that_grows(self, runtime: ctypes.CDLL) -> None:
        """An instance does the work that its graph had when it was made."""
        stream, graph, memory = torch.cuda.Stream(), ctypes.c_void_p(), torch.zeros(2, dtype=torch.uint8, device="cuda")
        handle, instances = ctypes.c_void_p(stream.cuda_stream), [ctypes.c_void_p(), ctypes.c_void_p()]
        torch.cuda.synchronize()
        for number, instance in enumerate(instances):
            if number == 0:
                self.begin(runtime, stream)
            else:
                assert runtime.cudaStreamBeginCaptureToGraph(handle, graph, None, None, ctypes.c_size_t(0), 0) == 0
            address = ctypes.c_void_p(memory.data_ptr() + number)
            assert runtime.cudaMemsetAsync(address, 7, ctypes.c_size_t(1), handle) == 0
            assert runtime.cudaStreamEndCapture(handle, ctypes.byref(graph)) == 0
            assert runtime.cudaGraphInstantiate(ctypes.byref(instance), graph, 0) == 0
        for instance, expected in zip(instances, ([7, 0], [7, 7]), strict=True):
            memory.zero_()
            torch.cuda.synchronize()
            assert runtime.cudaGraphLaunch(instance, handle) == 0
            stream.synchronize()
            assert memory.tolist() == expected
            assert runtime.cudaGraphExecDestroy(instance) == 0
        assert runtime.cudaGraphDestroy(graph) == 0

    def test_end_capture_on_the_wrong_stream_or_thread(self, runtime: ctypes.CDLL) -> None:
        stream, other, graph = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        event = ctypes.c_void_p()
        assert runtime.cudaStreamCreateWithFlags(ctypes.byref(stream), 1) == 0
        assert runtime.cudaStreamCreateWithFlags(ctypes.byref(other), 1) == 0
        assert runtime.cudaEventCreateWithFlags(ctypes.byref(event), 2) == 0
        assert runtime.cudaStreamEndCapture(stream, ctypes.byref(graph)) == 401
        assert runtime.cudaStreamBeginCapture(stream, 1) == 0
        assert runtime.cudaEventRecord(event, stream) == 0
        assert runtime.cudaStreamWaitEvent(other, event, 0) == 0
        assert runtime.cudaStreamEndCapture(other, ctypes.byref(graph)) == 903
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(runtime.cudaStreamEndCapture, stream, ctypes.byref(graph)).result() == 908
        assert runtime.cudaEventQuery(event) == 900
        assert runtime.cudaStreamEndCapture(stream, ctypes.byref(graph)) == 901
        assert runtime.cudaEventQuery(event) == 907, "its last record was captured"
        assert runtime.cudaStreamBeginCapture(stream, 2) == 0, "relaxed: any thread may end it"
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(runtime.cudaStreamEndCapture, stream, ctypes.byref(graph)).result() == 0
        assert runtime.cudaGraphDestroy(graph) == 0
        for handle in (stream, other):
            assert runtime.cudaStreamDestroy(handle) == 0
        assert runtime.cudaEventDestroy(event) == 0

    def test_captures_that_would_merge_are_both_invalid(self, runtime: ctypes.CDLL) -> None:
        streams, event, graph = [ctypes.c_void_p(), ctypes.c_void_p()], ctypes.c_void_p(), ctypes.c_void_p()
        assert runtime.cudaEventCreateWithFlags(ctypes.byref(event), 2) == 0
        for stream in streams:
            assert runtime.cudaStreamCreateWithFlags(ctypes.byref(stream), 1) == 0
            assert runtime.cudaStreamBeginCapture(stream, 1) == 0
        assert runtime.cudaEventRecord(event, streams[0]) == 0
        assert runtime.cudaStreamWaitEvent(streams[1], event, 0) == 902
        assert [runtime.cudaStreamEndCapture(stream, ctypes.byref(graph)) for stream in streams] == [901, 901]
        for stream in streams:
            assert runtime.cudaStreamDestroy(stream) == 0
        assert runtime.cudaEventDestroy(event) == 0

    def test_memory_allocated_during_capture_is_kept(self) -> None:
        graph, source = torch.cuda.CUDAGraph(), torch.full((1000,), 6.0).pin_memory()
        with torch.cuda.graph(graph):
            inside = torch.empty(1000, device="cuda")
            inside.copy_(source, non_blocking=True)
        graph.replay()
        assert inside.cpu().eq(6).all()

    def test_empty_graph_warns(self) -> None:
        with pytest.warns(UserWarning, match="(?i)graph is empty"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            pass
