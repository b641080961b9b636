"""Messages between a session and the server of a simulated machine, both of this version and on this host."""

from __future__ import annotations

import contextlib
import pickle
import socket
from typing import Any, NamedTuple


class Order(NamedTuple):
    """What a server is started with."""

    arguments: list[str]
    paths: list[str]
    basetemp: str | None
    workerinput: dict[str, Any]


class Outcome(NamedTuple):
    """How a test's process ended.

    Attributes:
        problem: why it could not be started, or None.
        status: as of `os.waitstatus_to_exitcode`.
        records: what it reported: pickles, one after the other.
        output: what it had printed and not reported: standard output and standard error.
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
        """For `select`."""
        return self._end.fileno()

    def send(self, message: object) -> None:
        """Send an object; nothing happens where the other side is gone, which `receive` tells."""
        try:
            pickle.dump(message, self._file)
            self._file.flush()
        except OSError:
            pass

    def receive(self) -> Any:
        """The next object from the other side, None once it is gone."""
        try:
            return pickle.load(self._file)
        except (EOFError, OSError, pickle.UnpicklingError):
            return None

    def close(self) -> None:
        """Leave."""
        with self._end, contextlib.suppress(OSError):  # what was not sent yet has no reader any more
            self._file.close()
