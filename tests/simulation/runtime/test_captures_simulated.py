"""The CUDA runtime while streams capture, and the graphs that captures make: errors, states and values."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint64, c_void_p
from typing import Any

import pytest
import torch

from tests.support.simulation_driver import make_busy

MIB = 2**20
GLOBAL, THREAD_LOCAL, RELAXED = range(3)
NOT_CAPTURING, CAPTURING, INVALIDATED = range(3)
UNSUPPORTED, IS_INVALIDATED, IMPLICIT, CAPTURED_EVENT = 900, 901, 906, 907
WITHOUT_TIMING, EXTERNAL = 2, 1
VOID_FUNCTION = ctypes.CFUNCTYPE(None, c_void_p)


class Calls:
    """The runtime, with what a test has made of it: streams, events and memory."""

    def __init__(self, runtime: ctypes.CDLL) -> None:
        self.runtime = runtime
        self.streams: list[c_void_p] = []
        self.events: list[c_void_p] = []

    def __call__(self, name: str, *arguments: Any) -> int:
        error: int = getattr(self.runtime, name)(*arguments)
        return error

    def made(self, name: str, *arguments: Any) -> c_void_p:
        result = c_void_p()
        assert self(name, byref(result), *arguments) == 0, name
        return result

    def stream(self, device: int = 0) -> c_void_p:
        with torch.cuda.device(device):
            self.streams.append(self.made("cudaStreamCreateWithFlags", 1))
        return self.streams[-1]

    def event(self, flags: int = WITHOUT_TIMING) -> c_void_p:
        self.events.append(self.made("cudaEventCreateWithFlags", flags))
        return self.events[-1]

    def begin(self, stream: c_void_p, mode: int = GLOBAL) -> None:
        assert self("cudaStreamBeginCapture", stream, mode) == 0

    def end(self, stream: c_void_p) -> tuple[int, c_void_p]:
        graph = c_void_p(1)
        error = self("cudaStreamEndCapture", stream, byref(graph))
        assert (error == 0) == (graph.value is not None)
        return error, graph

    def status(self, stream: c_void_p) -> int:
        status = c_int(-1)
        assert self("cudaStreamIsCapturing", stream, byref(status)) == 0
        return status.value

    def fill(self, tensor: torch.Tensor, value: int, stream: c_void_p) -> int:
        return self("cudaMemsetAsync", c_void_p(tensor.data_ptr()), value, c_size_t(tensor.nbytes), stream)


@pytest.fixture
def cuda(runtime: ctypes.CDLL) -> Iterator[Calls]:
    torch.cuda.set_device(0)
    torch.cuda.synchronize()
    calls, needs_checks = Calls(runtime), c_int.in_dll(runtime, "accelerator_simulation_needs_checks")
    before = needs_checks.value
    yield calls
    assert needs_checks.value == before, "ops take the slow way after the captures"
    for stream in calls.streams:
        assert calls("cudaStreamDestroy", stream) == 0
    for event in calls.events:
        assert calls("cudaEventDestroy", event) == 0
    runtime.cudaGetLastError()


# What a thread may not call while it captures, except in relaxed mode.
UNSAFE: dict[str, Callable[[Calls, c_void_p, c_void_p], int]] = {
    "cudaMalloc": lambda cuda, pinned, event: cuda("cudaMalloc", byref(c_void_p()), c_size_t(MIB)),
    "cudaMallocManaged": lambda cuda, pinned, event: cuda("cudaMallocManaged", byref(c_void_p()), c_size_t(MIB), 1),
    "cudaFree": lambda cuda, pinned, event: cuda("cudaFree", pinned),
    "cudaHostAlloc": lambda cuda, pinned, event: cuda("cudaHostAlloc", byref(c_void_p()), c_size_t(MIB), 0),
    "cudaMallocHost": lambda cuda, pinned, event: cuda("cudaMallocHost", byref(c_void_p()), c_size_t(MIB)),
    "cudaFreeHost": lambda cuda, pinned, event: cuda("cudaFreeHost", pinned),
    "cudaHostRegister": lambda cuda, pinned, event: cuda("cudaHostRegister", pinned, c_size_t(8), 0),
    "cudaHostUnregister": lambda cuda, pinned, event: cuda("cudaHostUnregister", pinned),
    "cudaIpcCloseMemHandle": lambda cuda, pinned, event: cuda("cudaIpcCloseMemHandle", pinned),
    "cudaMemcpy": lambda cuda, pinned, event: cuda("cudaMemcpy", pinned, pinned, c_size_t(8), 0),
    "cudaMemset": lambda cuda, pinned, event: cuda("cudaMemset", pinned, 0, c_size_t(8)),
    "cudaEventQuery": lambda cuda, pinned, event: cuda("cudaEventQuery", event),
    "cudaEventSynchronize": lambda cuda, pinned, event: cuda("cudaEventSynchronize", event),
    "cudaDeviceSynchronize": lambda cuda, pinned, event: cuda("cudaDeviceSynchronize"),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_unsafe_call_ends_every_capture_that_forbids_it(cuda: Calls, name: str) -> None:
    """The thread has four captures, of which the relaxed one goes on."""
    streams, modes = [cuda.stream() for _ in range(4)], (GLOBAL, THREAD_LOCAL, RELAXED, GLOBAL)
    pinned, event = cuda.made("cudaHostAlloc", c_size_t(MIB), 0), cuda.event()
    for stream, mode in zip(streams, modes, strict=True):
        cuda.begin(stream, mode)
    assert UNSAFE[name](cuda, pinned, event) == UNSUPPORTED
    assert [cuda.status(stream) for stream in streams] == [INVALIDATED, INVALIDATED, CAPTURING, INVALIDATED]
    errors = []
    for stream in streams:
        error, graph = cuda.end(stream)
        errors.append(error)
        if error == 0:
            assert cuda("cudaGraphDestroy", graph) == 0
    assert errors == [IS_INVALIDATED, IS_INVALIDATED, 0, IS_INVALIDATED]
    assert [cuda.status(stream) for stream in streams] == [NOT_CAPTURING] * 4
    assert cuda("cudaFreeHost", pinned) == 0, "the call has changed nothing"


def test_calls_that_a_capture_allows(cuda: Calls) -> None:
    """They neither fail nor become part of the graph: what they do on other streams happens at once."""
    stream, other, event = cuda.stream(), cuda.stream(), cuda.event()
    source, target = torch.full((8,), 5, dtype=torch.uint8, device="cuda"), torch.zeros(16, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    address, called = target.data_ptr(), []
    function = VOID_FUNCTION(called.append)
    made, created, free, total = c_void_p(), c_void_p(), c_size_t(), c_size_t()
    cuda.begin(stream)
    errors = {
        "copy": cuda("cudaMemcpyAsync", c_void_p(address), c_void_p(source.data_ptr()), c_size_t(8), 3, other),
        "fill": cuda("cudaMemsetAsync", c_void_p(address + 8), 7, c_size_t(8), other),
        "record": cuda("cudaEventRecord", event, other),
        "wait": cuda("cudaStreamWaitEvent", other, event, 0),
        "host function": cuda("cudaLaunchHostFunc", other, function, c_void_p(3)),
        "create": cuda("cudaStreamCreate", byref(made)),
        "destroy": cuda("cudaStreamDestroy", made),
        "create event": cuda("cudaEventCreate", byref(created)),
        "destroy event": cuda("cudaEventDestroy", created),
        "free nothing": cuda("cudaFree", None) or cuda("cudaFreeHost", None),
        "memory": cuda("cudaMemGetInfo", byref(free), byref(total)),
        "priority": cuda("cudaStreamGetPriority", stream, byref(c_int())),
    }
    assert {name: error for name, error in errors.items() if error} == {}
    assert called == [3]
    assert [cuda.status(each) for each in (stream, other)] == [CAPTURING, NOT_CAPTURING]
    error, graph = cuda.end(stream)
    count = c_size_t(9)
    assert (error, cuda("cudaGraphGetNodes", graph, None, byref(count)), count.value) == (0, 0, 0)
    assert cuda("cudaGraphDestroy", graph) == 0
    assert target.tolist() == [5] * 8 + [7] * 8


# What fails on a stream that captures, in every mode, and invalidates its capture.
OF_STREAM: dict[str, Callable[[Calls, c_void_p], int]] = {
    "cudaStreamSynchronize": lambda cuda, stream: cuda("cudaStreamSynchronize", stream),
    "cudaStreamQuery": lambda cuda, stream: cuda("cudaStreamQuery", stream),
    "cudaStreamDestroy": lambda cuda, stream: cuda("cudaStreamDestroy", stream),
    "cudaStreamAddCallback": lambda cuda, stream: cuda(
        "cudaStreamAddCallback", stream, ctypes.CFUNCTYPE(None, c_void_p, c_int, c_void_p)(lambda *_: None), None, 0
    ),
}


@pytest.mark.parametrize("name", OF_STREAM)
@pytest.mark.parametrize("joins", [False, True])
def test_call_on_a_stream_that_captures(cuda: Calls, name: str, joins: bool) -> None:
    """Also on a stream that another one's capture has taken in."""
    origin, side, bystander, event = cuda.stream(), cuda.stream(), cuda.stream(), cuda.event()
    cuda.begin(bystander, RELAXED)
    cuda.begin(origin, RELAXED)
    assert cuda("cudaEventRecord", event, origin) == cuda("cudaStreamWaitEvent", side, event, 0) == 0
    assert OF_STREAM[name](cuda, side if joins else origin) == UNSUPPORTED
    assert [cuda.status(each) for each in (origin, side, bystander)] == [INVALIDATED, INVALIDATED, CAPTURING]
    assert cuda.end(origin)[0] == IS_INVALIDATED
    assert [cuda.status(each) for each in (origin, side)] == [NOT_CAPTURING] * 2
    error, graph = cuda.end(bystander)
    assert (error, cuda("cudaGraphDestroy", graph)) == (0, 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda cuda, captured, other: cuda("cudaEventQuery", captured),
        lambda cuda, captured, other: cuda("cudaEventSynchronize", captured),
        lambda cuda, captured, other: cuda("cudaEventElapsedTime", byref(c_float()), captured, other),
        lambda cuda, captured, other: cuda("cudaEventElapsedTime", byref(c_float()), other, captured),
    ],
    ids=["query", "synchronize", "start", "end"],
)
def test_captured_event_has_no_time(cuda: Calls, call: Callable[[Calls, c_void_p, c_void_p], int]) -> None:
    stream, captured, other = cuda.stream(), cuda.event(0), cuda.event(0)
    assert cuda("cudaEventRecord", other, stream) == 0
    cuda.begin(stream, RELAXED)
    assert cuda("cudaEventRecord", captured, stream) == 0
    assert call(cuda, captured, other) == CAPTURED_EVENT
    assert cuda.status(stream) == INVALIDATED
    assert cuda.end(stream)[0] == IS_INVALIDATED


def test_invalidated_capture_takes_nothing_more(cuda: Calls) -> None:
    origin, side, other, event, late = cuda.stream(), cuda.stream(), cuda.stream(), cuda.event(), cuda.event()
    tensor = torch.zeros(8, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    cuda.begin(origin)
    assert cuda("cudaEventRecord", event, origin) == cuda("cudaStreamWaitEvent", side, event, 0) == 0
    assert cuda("cudaStreamSynchronize", side) == UNSUPPORTED
    assert {
        "fill": [cuda.fill(tensor, 1, stream) for stream in (origin, side)],
        "record": [cuda("cudaEventRecord", late, stream) for stream in (origin, side)],
        "wait": [cuda("cudaStreamWaitEvent", stream, event, 0) for stream in (origin, side)],
        "a further stream": cuda("cudaStreamWaitEvent", other, event, 0),
    } == {
        "fill": [IS_INVALIDATED] * 2,
        "record": [IS_INVALIDATED] * 2,
        "wait": [IS_INVALIDATED] * 2,
        "a further stream": IS_INVALIDATED,
    }
    assert cuda.status(other) == NOT_CAPTURING
    assert cuda.end(origin)[0] == IS_INVALIDATED
    for stream in (origin, side, other):
        assert cuda.fill(tensor, 2, stream) == 0
    assert tensor.tolist() == [2] * 8


@pytest.mark.parametrize("default", [None, 1, 2])
def test_default_stream_takes_no_part_in_a_capture(cuda: Calls, default: int | None) -> None:
    stream, event = cuda.stream(), cuda.event()
    for mode in (GLOBAL, RELAXED):
        assert cuda("cudaStreamBeginCapture", c_void_p(default), mode) == UNSUPPORTED
    cuda.begin(stream, RELAXED)
    assert cuda("cudaStreamBeginCapture", stream, RELAXED) == 401, "it captures already"
    assert cuda("cudaEventRecord", event, stream) == 0
    assert cuda("cudaStreamWaitEvent", c_void_p(default), event, 0) == IMPLICIT
    assert cuda.status(c_void_p(default)) == NOT_CAPTURING
    cuda.end(stream)


def test_capture_of_two_devices(cuda: Calls) -> None:
    """A stream of the other device joins; the graph fills memory of both, in the order of the calls."""
    origin, side = cuda.stream(), cuda.stream(1)
    fork = cuda.event()
    with torch.cuda.device(1):
        join = cuda.event()
    here, there = (torch.zeros(8, dtype=torch.uint8, device=f"cuda:{index}") for index in range(2))
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    cuda.begin(origin)
    assert cuda.fill(here, 1, origin) == 0
    assert cuda("cudaEventRecord", fork, origin) == cuda("cudaStreamWaitEvent", side, fork, 0) == 0
    with torch.cuda.device(1):
        assert cuda("cudaMemcpyAsync", c_void_p(there.data_ptr()), c_void_p(here.data_ptr()), c_size_t(8), 4, side) == 0
        assert cuda.fill(there[4:], 3, side) == 0
        assert cuda("cudaEventRecord", join, side) == 0
    assert cuda("cudaStreamWaitEvent", origin, join, 0) == 0
    assert cuda.fill(here, 2, origin) == 0
    error, graph = cuda.end(origin)
    assert error == 0
    instance = cuda.made("cudaGraphInstantiate", graph, c_uint64(0))
    assert (here.tolist(), there.tolist()) == ([0] * 8, [0] * 8)
    assert cuda("cudaGraphLaunch", instance, origin) == cuda("cudaStreamSynchronize", origin) == 0
    assert (here.tolist(), there.tolist()) == ([2] * 8, [1] * 4 + [3] * 4)
    assert cuda("cudaGraphExecDestroy", instance) == cuda("cudaGraphDestroy", graph) == 0


class Info:
    """What the runtime tells of a stream's capture."""

    def __init__(self, cuda: Calls, stream: c_void_p) -> None:
        status, identifier, graph = c_int(-1), c_uint64(), c_void_p()
        nodes, edges, count = ctypes.POINTER(c_void_p)(), c_void_p(1), c_size_t(99)
        version = str(torch.version.cuda).partition(".")[0]
        name, more = ("cudaStreamGetCaptureInfo_v2", ()) if version == "12" else ("cudaStreamGetCaptureInfo", (byref(edges),))
        outputs = byref(status), byref(identifier), byref(graph), byref(nodes), *more, byref(count)
        assert cuda(name, stream, *outputs) == 0
        self.status, self.identifier, self.graph = status.value, identifier.value, graph.value
        self.dependencies = [nodes[i] for i in range(count.value)] if self.status == CAPTURING else None


def nodes_of(cuda: Calls, graph: c_void_p) -> list[int]:
    count, nodes = c_size_t(8), (c_uint64 * 8)()
    assert cuda("cudaGraphGetNodes", graph, nodes, byref(count)) == 0
    return nodes[: count.value]


def test_capture_info(cuda: Calls) -> None:
    stream, side, event = cuda.stream(), cuda.stream(), cuda.event()
    tensor = torch.zeros(8, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    assert Info(cuda, stream).status == NOT_CAPTURING
    identifiers = []
    for _ in range(2):
        cuda.begin(stream, THREAD_LOCAL)
        info = Info(cuda, stream)
        assert (info.status, info.dependencies) == (CAPTURING, [])
        assert cuda("cudaStreamUpdateCaptureDependencies", stream, None, None, None, 0) == 0
        for node in range(2):
            assert cuda.fill(tensor, node, stream) == 0
            info = Info(cuda, stream)
            assert info.dependencies == nodes_of(cuda, c_void_p(info.graph))[-1:]
            assert len(nodes_of(cuda, c_void_p(info.graph))) == node + 1
        assert Info(cuda, side).status == NOT_CAPTURING
        assert cuda("cudaEventRecord", event, stream) == cuda("cudaStreamWaitEvent", side, event, 0) == 0
        of_side = Info(cuda, side)
        assert (of_side.status, of_side.identifier, of_side.graph) == (CAPTURING, info.identifier, info.graph)
        error, graph = cuda.end(stream)
        assert (error, graph.value) == (0, info.graph)
        identifiers.append(info.identifier)
        assert cuda("cudaGraphDestroy", graph) == 0
    assert 0 not in identifiers
    assert len({*identifiers}) == 2
    assert cuda("cudaStreamUpdateCaptureDependencies", stream, None, None, None, 0) == 401
    cuda.begin(stream)
    cuda("cudaStreamQuery", stream)
    assert Info(cuda, stream).status == INVALIDATED
    assert cuda.end(stream)[0] == IS_INVALIDATED


def test_each_node_depends_on_the_one_before(cuda: Calls, tmp_path: Any) -> None:
    stream, tensor = cuda.stream(), torch.zeros(8, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    cuda.begin(stream)
    address = c_void_p(tensor.data_ptr())
    assert cuda.fill(tensor, 1, stream) == 0
    assert cuda("cudaMemcpyAsync", address, c_void_p(tensor.data_ptr() + 4), c_size_t(4), 3, stream) == 0
    assert cuda.fill(tensor, 2, stream) == 0
    error, graph = cuda.end(stream)
    assert error == 0
    nodes, before = nodes_of(cuda, graph), []
    version = str(torch.version.cuda).partition(".")[0]
    for node in nodes:
        count, found, edges = c_size_t(4), (c_uint64 * 4)(), (c_uint64 * 4)(9, 9, 9, 9)
        more = () if version == "12" else (edges,)
        assert cuda("cudaGraphNodeGetDependencies", c_void_p(node), found, *more, byref(count)) == 0
        assert version == "12" or edges[: count.value] == [0] * count.value
        before.append(found[: count.value])
    assert before == [[], nodes[:1], nodes[1:2]]
    path = tmp_path / "graph.dot"
    assert cuda("cudaGraphDebugDotPrint", graph, c_char_p(bytes(path)), 0) == 0
    assert cuda("cudaGraphDestroy", graph) == 0
    assert path.read_text().splitlines() == [
        "digraph dot {",
        '"node_0" [label="MEMSET"];',
        '"node_1" [label="MEMCPY"];',
        '"node_0" -> "node_1";',
        '"node_2" [label="MEMSET"];',
        '"node_1" -> "node_2";',
        "}",
    ]


def test_failed_capture_leaves_the_callers_graph(cuda: Calls) -> None:
    """The graph of cudaStreamBeginCaptureToGraph is the caller's: it keeps its work and its objects."""
    stream, tensor, destroyed = cuda.stream(), torch.zeros(8, dtype=torch.uint8, device="cuda"), []
    torch.cuda.synchronize()
    cuda.begin(stream)
    assert cuda.fill(tensor, 6, stream) == 0
    _, graph = cuda.end(stream)
    destroy = VOID_FUNCTION(destroyed.append)
    thing = cuda.made("cudaUserObjectCreate", c_void_p(7), destroy, 1, 1)
    assert cuda("cudaGraphRetainUserObject", graph, thing, 1, 1) == 0
    assert cuda("cudaStreamBeginCaptureToGraph", stream, graph, None, None, c_size_t(0), GLOBAL) == 0
    assert Info(cuda, stream).graph == graph.value
    assert cuda("cudaStreamSynchronize", stream) == UNSUPPORTED
    assert cuda.end(stream)[0] == IS_INVALIDATED
    assert destroyed == []
    instance = cuda.made("cudaGraphInstantiate", graph, c_uint64(0))
    assert cuda("cudaGraphLaunch", instance, stream) == 0
    assert tensor.tolist() == [6] * 8
    assert cuda("cudaGraphExecDestroy", instance) == cuda("cudaGraphDestroy", graph) == 0
    assert destroyed == [7]


def test_other_captures_go_on_while_a_failed_one_releases_its_graph(cuda: Calls) -> None:
    stream, other, has_asked = cuda.stream(), cuda.stream(), threading.Event()
    asked: list[bool] = []

    def ask() -> None:
        cuda.status(other)
        has_asked.set()

    thread = threading.Thread(target=ask)

    def wait_for_other_thread(_: object) -> None:
        thread.start()
        asked.append(has_asked.wait(5))

    destroy = VOID_FUNCTION(wait_for_other_thread)
    cuda.begin(other, RELAXED)
    cuda.begin(stream, RELAXED)
    thing = cuda.made("cudaUserObjectCreate", None, destroy, 1, 1)
    assert cuda("cudaGraphRetainUserObject", c_void_p(Info(cuda, stream).graph), thing, 1, 1) == 0
    assert cuda("cudaStreamSynchronize", stream) == UNSUPPORTED
    assert cuda.end(stream)[0] == IS_INVALIDATED
    thread.join(10)
    assert asked == [True]
    assert cuda("cudaGraphDestroy", cuda.end(other)[1]) == 0


def test_instance_keeps_the_graphs_work_and_objects(cuda: Calls) -> None:
    stream, tensor, destroyed = cuda.stream(), torch.zeros(8, dtype=torch.uint8, device="cuda"), []
    torch.cuda.synchronize()
    cuda.begin(stream)
    assert cuda.fill(tensor, 4, stream) == 0
    _, graph = cuda.end(stream)
    destroy = VOID_FUNCTION(destroyed.append)
    moved, shared, unused = (cuda.made("cudaUserObjectCreate", c_void_p(n), destroy, n, 1) for n in (1, 2, 3))
    assert cuda("cudaGraphRetainUserObject", graph, moved, 1, 1) == cuda("cudaGraphRetainUserObject", graph, shared, 1, 0) == 0
    assert cuda("cudaUserObjectRelease", unused, 2) == 0
    assert destroyed == []
    assert cuda("cudaUserObjectRelease", unused, 1) == 0
    assert destroyed == [3]
    instances = [cuda.made("cudaGraphInstantiateWithFlags", graph, c_uint64(0)) for _ in range(2)]
    assert cuda("cudaGraphDestroy", graph) == cuda("cudaGraphExecDestroy", instances[0]) == 0
    assert destroyed == [3]
    assert cuda("cudaGraphLaunch", instances[1], stream) == 0
    assert tensor.tolist() == [4] * 8
    assert cuda("cudaGraphExecDestroy", instances[1]) == 0
    assert destroyed == [3, 1], "the program has both of its references to the other one"
    for expected in ([3, 1], [3, 1, 2]):
        assert cuda("cudaUserObjectRelease", shared, 1) == 0
        assert destroyed == expected


def test_host_function_runs_at_each_launch_in_its_place(cuda: Calls) -> None:
    stream, other, tensor = cuda.stream(), cuda.stream(), torch.zeros(8, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    seen: list[tuple[int, int]] = []
    functions = [VOID_FUNCTION(lambda number: seen.append((number, tensor.tolist()[0])))]
    cuda.begin(stream)
    for number in (1, 2):
        assert cuda.fill(tensor, number * 10, stream) == 0
        assert cuda("cudaLaunchHostFunc", stream, functions[0], c_void_p(number)) == 0
    _, graph = cuda.end(stream)
    instance = cuda.made("cudaGraphInstantiate", graph, c_uint64(0))
    assert seen == []
    for each in (stream, other):
        assert cuda("cudaGraphLaunch", instance, each) == 0
    assert seen == [(1, 10), (2, 20)] * 2
    assert cuda("cudaGraphExecDestroy", instance) == cuda("cudaGraphDestroy", graph) == 0


def test_external_events_are_recorded_and_waited_for_at_each_launch(cuda: Calls) -> None:
    stream, other, start, end = cuda.stream(), cuda.stream(), cuda.event(0), cuda.event(0)
    made: list[c_void_p] = []

    def captured(on: c_void_p, body: Callable[[], None]) -> c_void_p:
        cuda.begin(on)
        body()
        error, graph = cuda.end(on)
        assert error == 0
        made.append(cuda.made("cudaGraphInstantiate", graph, c_uint64(0)))
        assert cuda("cudaGraphDestroy", graph) == 0
        return made[-1]

    def submit(cycles: int) -> torch.cuda.Stream:
        def timed_sleep() -> None:
            assert cuda("cudaEventRecordWithFlags", start, stream, EXTERNAL) == 0
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.value)):
                torch.cuda._sleep(cycles)
            assert cuda("cudaEventRecordWithFlags", end, stream, EXTERNAL) == 0

        def wait() -> None:
            assert cuda("cudaStreamWaitEvent", other, end, EXTERNAL) == 0

        sleeping, waiting = captured(stream, timed_sleep), captured(other, wait)
        assert cuda("cudaEventSynchronize", end) == 0, "the capture has not recorded it"
        assert cuda("cudaGraphLaunch", sleeping, stream) == cuda("cudaGraphLaunch", waiting, other) == 0
        return torch.cuda.ExternalStream(other.value)

    make_busy(submit, 20).synchronize()
    milliseconds = c_float()
    assert cuda("cudaEventElapsedTime", byref(milliseconds), start, end) == 0
    assert milliseconds.value >= 20
    for instance in made:
        assert cuda("cudaGraphExecDestroy", instance) == 0
