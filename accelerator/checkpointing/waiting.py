"""Recomputations of one checkpoint by several threads: one at a time, or they would draw each other's random numbers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from . import bindings

_POLL_SECONDS = 0.001


class Running(Protocol):
    """A recomputation, with the thread that runs it."""

    thread: int


def wait_for_turn(mine: Running, running: Sequence[Running], is_done: Callable[[], bool]) -> None:
    """Wait for the recomputations that other threads started earlier, or until one of them has done the work.

    It does not wait for a recomputation whose thread itself waits, because autograd may need this thread to continue.

    Args:
        mine: this thread's recomputation.
        running: all recomputations of the checkpoint, in the order in which they started.
        is_done: whether this thread's recomputation is no longer needed.
    """
    while any(each.thread != mine.thread and not _waits(each.thread) for each in running[: running.index(mine)]):
        if is_done():
            return
        time.sleep(_POLL_SECONDS)


def _waits(thread: int) -> bool:
    """Whether a thread waits in autograd's engine or here."""
    frame = sys._current_frames().get(thread)
    return frame is None or frame.f_code is bindings.engine_code or frame.f_code is wait_for_turn.__code__
