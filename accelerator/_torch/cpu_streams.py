"""Streams and events of the CPU fallback. The CPU finishes all work before a call returns."""

from __future__ import annotations

import time
from typing import Any

import torch

from . import bindings, state


class CPUStream(torch.Stream):
    """The CPU's only stream. torch's own CPU stream cannot record events."""

    # torch.compile of torch 2.6 passes the ids of an existing stream. They are ignored: there is only one stream.
    def __new__(
        cls, device: Any = "cpu", *, priority: int = 0, stream_id: int = 0, device_index: int = -1, device_type: int = 0
    ) -> CPUStream:
        state.current(device, allow_negative=True)
        return super().__new__(cls, device="cpu")

    # torch.compile cannot trace the comparison of torch's class.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, CPUStream) or super().__eq__(other)

    __hash__ = torch.Stream.__hash__

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: torch.Event) -> None:
        pass

    def wait_stream(self, other: torch.Stream) -> None:
        pass

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = CPUEvent() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> CPUStream:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


class CPUEvent(torch.Event):
    """An event of the CPU's stream. It has always occurred; its time is the host's."""

    _timed: bool
    _recorded_ns: int | None

    def __new__(
        cls, device: Any = "cpu", *, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> CPUEvent:
        state.current(device, allow_negative=True)
        event = super().__new__(cls, device="cpu", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)
        event._timed, event._recorded_ns = enable_timing, None
        return event

    def record(self, stream: torch.Stream | None = None) -> None:
        if self._timed:  # torch.compile cannot trace a clock
            self._recorded_ns = time.perf_counter_ns()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self, stream: torch.Stream | None = None) -> None:
        pass

    def elapsed_time(self, other: torch.Event) -> float:
        """Return the milliseconds of host time between the records of this event and another one."""
        if not (self._timed and isinstance(other, CPUEvent) and other._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True' to measure elapsed time.")
        if self._recorded_ns is None or other._recorded_ns is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (other._recorded_ns - self._recorded_ns) / 1e6


# The stream of `cpu_stream`, once it is created. Compiled code reads it here.
created: list[torch.Stream] = []


def cpu_stream() -> torch.Stream:
    """Return the CPU's stream. It is created at the first call, because torch 2.6 looks for a GPU when it creates one."""
    if not created:
        created.append(torch.Stream.__new__(CPUStream, device="cpu"))
    return created[0]


# Dynamo's own classes for streams and events need an accelerator: without one an event has no stream to be recorded on, and
# Inductor generates code that fails.
bindings.trace_methods(CPUStream, CPUEvent)
