"""Reads the races of this process. The simulated runtime finds them and decides what is reported (``native/races``)."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import NamedTuple

_LIBRARIES = ("libcudart.so.12", "libcudart.so.13")


class Race(NamedTuple):
    """Two accesses to the same memory, at least one of them a write, that nothing orders.

    Attributes:
        message: The whole report. Its first line begins with ``race:``.
        first: The earlier access: the operation, its stream and the line of the program.
        second: The later access, of an operation or of the host.
        advice: The call that is missing.
        is_possible: Whether the two may touch different elements, because values decide which elements they touch.
    """

    message: str
    first: str
    second: str
    advice: str
    is_possible: bool


def races() -> tuple[Race, ...]:
    """Return the races that were found in this process so far.

    Returns:
        One for each pair of lines of the program, in the order in which they were found. Empty without ``--races`` or
        ``environment(races=...)``, and in a process without simulated GPUs.

    Example:
        >>> from accelerator import simulation
        >>> simulation.races()
        ()
    """
    return _found(since_test=False)


def begin_test() -> None:
    """Let pairs of lines that were reported before be reported again."""
    for library in _libraries():
        library.accelerator_simulation_race_begin_test()


def races_of_test() -> tuple[Race, ...]:
    """Return the races since `begin_test`."""
    return _found(since_test=True)


def _found(since_test: bool) -> tuple[Race, ...]:
    found: list[Race] = []
    for library in _libraries():
        first = library.accelerator_simulation_race_first_of_test() if since_test else 0
        for index in range(first, library.accelerator_simulation_race_count()):
            is_possible = ctypes.c_int()
            message = os.fsdecode(library.accelerator_simulation_race_text(index, ctypes.byref(is_possible))).rstrip("\n")
            _, first, second, advice = (line.strip() for line in message.splitlines())
            found.append(Race(message, first, second, advice, bool(is_possible.value)))
    return tuple(found)


def _libraries() -> list[ctypes.CDLL]:
    # CDLL(None) searches the program and its preloaded libraries, and opens nothing.
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "accelerator_simulation"):
        return []
    libraries = [ctypes.CDLL(name) for name in _LIBRARIES]
    for library in libraries:
        library.accelerator_simulation_race_text.restype = ctypes.c_char_p
        library.accelerator_simulation_race_text.argtypes = (ctypes.c_int, ctypes.c_void_p)
    return libraries
