"""The end of an all-reduce across processes of this host: whatever they do, all of them end and the causes are named."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from accelerator._command import all_reduce

pytestmark = [pytest.mark.torch_free, pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")]

CAUSE, EFFECT = "ValueError: a cause", "RuntimeError: Connection closed by peer"


def write(text: str) -> Callable[[int], None]:
    return lambda pipe: os.write(pipe, text.encode()) and None


def sleep(pipe: int) -> None:
    time.sleep(20)


def die(pipe: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def abort(pipe: int) -> None:
    signal.signal(signal.SIGABRT, signal.SIG_DFL)  # pytest's handler prints a stack
    os.abort()


def hang_after_answer(pipe: int) -> None:
    os.write(pipe, b"ok")
    sleep(pipe)


# What a process does, and its part of the result.
RANKS: dict[str, Callable[[int], None]] = {
    "right": write("ok"),
    "cause": write(CAUSE),
    "effect": write(EFFECT),
    "died": die,
    "aborted": abort,
    "silent": sleep,
    "hangs": hang_after_answer,
}
SLEEPING = ("silent", "hangs")
ABORTED = "its process ended with status -6"
PROBLEMS = {"cause": CAUSE, "effect": EFFECT, "died": "its process ended with status -9", "aborted": ABORTED}


def expected(kinds: tuple[str, ...]) -> dict[int, str]:
    failed = {rank: PROBLEMS[kind] for rank, kind in enumerate(kinds) if kind in PROBLEMS}
    causes = {rank: problem for rank, problem in failed.items() if problem not in (EFFECT, ABORTED)}
    return (
        causes or failed or {rank: "no answer within 0.1 s" for rank, kind in enumerate(kinds) if kind in ("silent", "hangs")}
    )


def start(behave: Callable[[int], None]) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    try:
        behave(writer)
    finally:
        os._exit(0)


def _kinds() -> list[Any]:
    """Return what three processes do, in each combination. Most are slow tests."""
    return [
        pytest.param(kinds, id="-".join(kinds), marks=() if len({*kinds}) == 3 and "right" in kinds else pytest.mark.slow)
        for kinds in itertools.combinations_with_replacement(RANKS, 3)
    ]


@pytest.mark.parametrize("kinds", _kinds())
def test_every_process_ends_and_the_causes_are_named(kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "DEADLINE_S", 0.1)
    monkeypatch.setattr(all_reduce, "_PATIENCE_S", 0.05)
    begin = time.monotonic()
    ranks = [start(RANKS[kind]) for kind in kinds]
    for kind, (pid, _) in zip(kinds, ranks, strict=True):
        if kind not in SLEEPING:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # how soon it ends is not part of the test
    assert all_reduce._wait(ranks) == expected(kinds)
    assert time.monotonic() - begin < 10
    for pid, pipe in ranks:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(pipe)


def test_a_failure_shortens_the_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "_PATIENCE_S", 0.1)
    begin = time.monotonic()
    assert all_reduce._wait([start(RANKS[kind]) for kind in ("silent", "cause", "silent")]) == {1: CAUSE}
    assert time.monotonic() - begin < 10 < all_reduce.DEADLINE_S


def test_a_fork_that_fails_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    started: list[int] = []
    pipes: list[int] = []
    fork, pipe = os.fork, os.pipe

    def fork_once() -> int:
        if started:
            raise BlockingIOError("Resource temporarily unavailable")
        pid = fork()
        started.append(pid)
        return pid

    def make_pipe() -> tuple[int, int]:
        pipes.extend(pipe())
        return pipes[-2], pipes[-1]

    monkeypatch.setattr(all_reduce.acc, "communication_backend_name", lambda: "gloo")
    monkeypatch.setattr(all_reduce, "reduce", lambda *arguments: time.sleep(60))
    monkeypatch.setattr(os, "fork", fork_once)
    monkeypatch.setattr(os, "pipe", make_pipe)
    with pytest.raises(BlockingIOError):
        all_reduce.across([0, 1])
    with pytest.raises(ChildProcessError):
        os.waitpid(started[0], os.WNOHANG)
    for end in pipes:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(end)
