"""Messages between a session and the server of a simulated machine, on one host and of one package version."""

from __future__ import annotations

import contextlib
import pickle
import socket
from typing import Any, NamedTuple


class Order(NamedTuple):
    """What a server needs to start."""

    arguments: list[str]
    paths: list[str]
    basetemp: str | None
    workerinput: dict[str, Any]
    options: dict[str, Any]  # the session's, which its plug-ins may have changed
    has_faults: bool  # each test then has a state of its own, in which the faults begin anew


class Outcome(NamedTuple):
    """How a test's process ended.

    Attributes:
        problem: why it could not start, or None.
        status: as returned by `os.waitstatus_to_exitcode`.
        records: its reports: concatenated pickles.
        output: standard output and standard error that no report contains.
    """

    problem: str | None
    status: int = 0
    records: bytes = b""
    output: tuple[str, str] = ("", "")


class Channel:
    """One end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._file = end.makefile("rwb")

    def fileno(self) -> int:
        """Return the descriptor, for `select`."""
        return self._end.fileno()

    def send(self, message: object) -> None:
        """Send an object. If the other side has ended, do nothing: `receive` returns None then."""
        try:
            pickle.dump(message, self._file)
            self._file.flush()
        except OSError:
            pass

    def receive(self) -> Any:
        """Return the next object from the other side, or None once it has ended."""
        try:
            return pickle.load(self._file)
        except (EOFError, OSError, pickle.UnpicklingError):
            return None

    def close(self) -> None:
        """Close this end."""
        with self._end, contextlib.suppress(OSError):  # unsent data has no reader
            self._file.close()
