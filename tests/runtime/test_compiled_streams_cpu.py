"""Streams and events of the CPU fallback in compiled code: it gives what the same code gives without ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import accelerator as acc
from tests.support import plain_environment, run

side: Any = acc.Stream()
event: Any = acc.Event()
timed: Any = acc.Event(enable_timing=True)


def synchronizes(x: torch.Tensor) -> Any:
    y = x + 1
    side.synchronize()
    return y * 2


def records(x: torch.Tensor) -> Any:
    y = x + 1
    event.record()
    return y * 2, event.query()


def records_on_a_stream(x: torch.Tensor) -> Any:
    y = x + 1
    event.record(side)
    event.wait(side)
    side.wait_event(event)
    event.synchronize()
    return y * 2


def enters(x: torch.Tensor) -> Any:
    y = x + 1
    with acc.stream(side):
        y = y * 2
    return y + 1


def enters_the_stream_itself(x: torch.Tensor) -> Any:
    y = x + 1
    with side:
        y = y * 2
    return y + 1


def compares(x: torch.Tensor) -> Any:
    y = x + 1
    side.wait_stream(acc.current_stream())
    return (y * 2 if side.query() and acc.current_stream() == side else y), acc.current_stream()


def takes_arguments(x: torch.Tensor, stream: Any = side, recorded: Any = event) -> Any:
    recorded.record(stream)
    acc.set_stream(stream)
    return x * 2, stream, recorded


def creates(x: torch.Tensor) -> Any:
    stream, created = acc.Stream(), acc.Event()
    with acc.stream(stream):
        y = x + 1
        created.record()
    stream.record_event().synchronize()
    acc.record_stream(y, acc.default_stream())
    return y * 2


def measures(x: torch.Tensor) -> Any:
    end = acc.Event(enable_timing=True)
    timed.record()
    y = x + 1
    end.record()
    return y * 2, timed.elapsed_time(end) >= 0


TRACED = (synchronizes, records, records_on_a_stream, enters, enters_the_stream_itself, compares, takes_arguments)
PROGRAMS = (*TRACED, creates, measures)


def compiled(program: Callable[..., Any], **options: Any) -> Any:
    """Compile a program, call it twice and return the second result."""
    torch._dynamo.reset()
    function = torch.compile(program, **options)
    function(torch.ones(2))
    return function(torch.ones(2))


def comparable(result: Any) -> list[Any]:
    parts = result if isinstance(result, tuple) else (result,)
    return [part.tolist() if isinstance(part, torch.Tensor) else part for part in parts]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_compiled_code_gives_what_the_code_gives(program: Callable[..., Any], backend: str) -> None:
    assert comparable(compiled(program, backend=backend)) == comparable(program(torch.ones(2)))


@pytest.mark.parametrize("program", TRACED, ids=lambda program: program.__name__)
def test_streams_and_events_are_traced(program: Callable[..., Any]) -> None:
    if program is enters_the_stream_itself and torch.__version__ < "2.14":
        pytest.skip("older torch, such as 2.10, refuses to trace a stream as a context manager in one graph")
    assert comparable(compiled(program, backend="eager", fullgraph=True)) == comparable(program(torch.ones(2)))


@pytest.mark.slow
@pytest.mark.parametrize("prelude", ["", "import torch._dynamo"])
def test_dynamo_is_imported_before_or_after_the_first_stream(prelude: str) -> None:
    code = f"""
    {prelude}
    import sys, torch, accelerator as acc
    event = acc.Event()
    def finders():
        return [type(finder).__name__ for finder in sys.meta_path].count("_DynamoFinder")
    before = finders()
    def program(x):
        event.record()
        return x + 1
    print(before, torch.compile(program, backend="eager", fullgraph=True)(torch.ones(1)).tolist(), finders())
    """
    assert run(code, plain_environment()).strip() == ("0 [2.0] 0" if prelude else "1 [2.0] 0")
