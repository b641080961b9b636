"""Where a rehearsed program needed values that are not known: the ops, and the lines of the program."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from types import FrameType
from typing import Any

import torch

_places: dict[tuple[str, str | None], int] = {}
this_thread = threading.local()
_LIBRARIES = tuple(
    os.path.join(folder, "")
    for folder in (os.path.dirname(torch.__file__), os.path.abspath(f"{os.path.dirname(__file__)}/../.."))
)

_INSTALLED = os.sep + "lib" + os.sep + "python"


# ---- Places. ----


def note(op: str) -> None:
    """Note that a value that is not known decides a shape, or is read by the host."""
    if getattr(this_thread, "is_quiet", False):
        return
    place = op, program_line(frames_from(sys._getframe(1)))
    _places[place] = _places.get(place, 0) + 1


def noted() -> Iterable[tuple[str, str | None, int]]:
    """Return for each place the op, the line of the program, and how often it was reached."""
    return [(op, line, count) for (op, line), count in [*_places.items()]]


def forget_noted() -> None:
    """Forget the places, in a forked child."""
    _places.clear()


def frames_from(frame: FrameType | None) -> list[FrameType]:
    """Return a frame and those that called it."""
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def program_line(frames: list[FrameType]) -> str | None:
    """Return the innermost line outside of installed packages; if there is none, outside of torch and the simulation.

    If the frames are those of a backward, in a thread of torch, the program waits in its own.
    """
    stacks = [frames]
    main = threading.main_thread().ident
    if main is not None and main != threading.get_ident():  # a frame that refers to itself would keep its tensors alive
        stacks.append(frames_from(sys._current_frames().get(main)))
    for stack in stacks:
        for is_program in (_is_program, is_outside_of_torch):
            for frame in stack:
                if is_program(frame.f_code.co_filename):
                    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return None


def _is_program(name: str) -> bool:
    return not name.startswith((*_LIBRARIES, "<")) and _INSTALLED not in name


def is_outside_of_torch(name: str) -> bool:
    """Return whether a file is neither torch's nor the simulation's nor Python's machinery."""
    return not name.startswith((*_LIBRARIES, "<frozen")) and not name.endswith("threading.py")


@contextlib.contextmanager
def thread_set(name: str, value: Any) -> Generator[None]:
    """Set an attribute of this thread."""
    before = getattr(this_thread, name, None)
    setattr(this_thread, name, value)
    try:
        yield
    finally:
        setattr(this_thread, name, before)


def noting_copies(op: str) -> contextlib.AbstractContextManager[None]:
    """Note copies to the host in this thread: an op of another library makes them, and reads them without calling torch."""
    return thread_set("library_op", op)


def validating() -> contextlib.AbstractContextManager[None]:
    """Let all conditions of this thread be true that are not known."""
    return thread_set("is_validating", True)


def without_notes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose reads by the host are not noted."""

    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        with thread_set("is_quiet", True):
            return function(*arguments, **options)

    return run
