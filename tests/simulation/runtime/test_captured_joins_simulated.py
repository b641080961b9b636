"""A capture ends with an error if its origin does not wait, directly or through other streams, for all captured work."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator

import pytest
import torch

UNJOINED = 904
ORIGIN, A, B = range(3)

# Steps of a schedule: work on a stream, a record of a stream's event, a wait of a stream for another one's event, and
# "join", which records and waits.
Step = tuple[str, int] | tuple[str, int, int]
STEPS: tuple[Step, ...] = (
    *(("work", A), ("work", B), ("join", A, B), ("join", B, A), ("join", ORIGIN, A), ("join", ORIGIN, B)),
    *(("record", A), ("wait", ORIGIN, A)),
)
FORKS: tuple[Step, ...] = (("join", A, ORIGIN), ("join", B, A), ("work", B))


class Model:
    """What each stream and event waits for: how much of the work of each stream."""

    def __init__(self) -> None:
        self.streams = [[0, 0, 0] for _ in range(3)]
        self.events = [[0, 0, 0] for _ in range(3)]

    def do(self, step: Step) -> None:
        name, stream = step[:2]
        if name == "work":
            self.streams[stream][stream] += 1
        elif name == "record":
            self.events[stream] = [*self.streams[stream]]
        else:
            if name == "join":
                self.do(("record", step[2]))  # type: ignore[misc]
            event = self.events[step[2]]  # type: ignore[misc]
            self.streams[stream] = [max(times) for times in zip(self.streams[stream], event, strict=True)]

    def has_joined(self) -> bool | None:
        """Return None if the origin waits for all work, but not through every stream that does: CUDA's answer is unknown."""
        origin = self.streams[ORIGIN]
        if any(origin[stream] < self.streams[stream][stream] for stream in (A, B)):
            return False
        return (
            True if all(seen <= known for stream in self.streams for seen, known in zip(stream, origin, strict=True)) else None
        )


@pytest.fixture
def capture(runtime: ctypes.CDLL) -> Iterator[object]:
    """Yield a function that captures a schedule and returns the error of its end."""
    torch.cuda.init()
    memory = torch.empty(4, device="cuda")
    address, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(16)
    streams, events = [ctypes.c_void_p() for _ in range(3)], [ctypes.c_void_p() for _ in range(3)]
    for stream, event in zip(streams, events, strict=True):
        assert runtime.cudaStreamCreateWithFlags(ctypes.byref(stream), 1) == 0
        assert runtime.cudaEventCreateWithFlags(ctypes.byref(event), 2) == 0

    def do(name: str, stream: int, other: int = -1) -> None:
        if name == "work":
            assert runtime.cudaMemsetAsync(address, 0, size, streams[stream]) == 0
        if name == "record":
            assert runtime.cudaEventRecord(events[stream], streams[stream]) == 0
        if name == "join":
            assert runtime.cudaEventRecord(events[other], streams[other]) == 0
        if name in ("join", "wait"):
            assert runtime.cudaStreamWaitEvent(streams[stream], events[other], 0) == 0

    def run(schedule: tuple[Step, ...]) -> int:
        graph = ctypes.c_void_p()
        assert runtime.cudaStreamBeginCapture(streams[ORIGIN], 0) == 0
        for step in schedule:
            do(*step)
        error: int = runtime.cudaStreamEndCapture(streams[ORIGIN], ctypes.byref(graph))
        if error == 0:
            assert runtime.cudaGraphDestroy(graph) == 0
        return error

    yield run
    runtime.cudaGetLastError()
    for stream, event in zip(streams, events, strict=True):
        assert runtime.cudaStreamDestroy(stream) == 0
        assert runtime.cudaEventDestroy(event) == 0


def test_every_schedule_of_a_chain_of_streams(capture: object) -> None:
    """The streams form a chain: A waits for the origin, and B for A."""
    wrong, checked = [], {True: 0, False: 0}
    for schedule in itertools.product(STEPS, repeat=4):
        model = Model()
        for step in (*FORKS, *schedule):
            model.do(step)
        joined = model.has_joined()
        if joined is None:
            continue
        checked[joined] += 1
        if capture((*FORKS, *schedule)) != (0 if joined else UNJOINED):  # type: ignore[operator]
            wrong.append((schedule, joined))
    assert not wrong, (len(wrong), wrong[:5])
    assert min(checked.values()) > 100
