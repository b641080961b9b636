"""Ends what a process has started on simulated machines if the process is killed, and so cannot end it itself."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Mapping

from .. import _settings
from .._build import libraries

_RUN = _settings.variable("run")
_PROGRAM = "bin/accelerator-guard"
_STDIN, _STDOUT, _STDERR = range(3)


@contextlib.contextmanager
def guarded() -> Generator[dict[str, str], None, None]:
    """Yield variables for the environment of processes that end with this one, with all that they start.

    A program beside this process watches it (``native/guard``). If this process is killed, the program kills the processes
    whose environment has the variables. Processes that clear their environment, or that another user owns, go on.

    Raises:
        RuntimeError: The program cannot be started, or there is no build of the simulated libraries and none can be made.
    """
    token = os.urandom(16).hex()
    program = str(libraries.ensure_built() / _PROGRAM)
    reading, writing = os.pipe()
    try:
        actions = [
            (os.POSIX_SPAWN_DUP2, reading, _STDIN),
            (os.POSIX_SPAWN_OPEN, _STDOUT, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, _STDOUT, _STDERR),
        ]
        pid = os.posix_spawn(program, [program, token], {}, file_actions=actions)
    except OSError as error:
        os.close(writing)
        raise RuntimeError(f"{program} cannot be started: {error.strerror}") from error
    finally:
        os.close(reading)
    try:
        yield _marked(os.environ, token)
    finally:
        with contextlib.suppress(BrokenPipeError):  # somebody has ended the program
            os.write(writing, b"0")
        os.close(writing)
        with contextlib.suppress(ChildProcessError):  # this process ignores SIGCHLD
            os.waitpid(pid, 0)


def _marked(environment: Mapping[str, str], token: str) -> dict[str, str]:
    """Return the variables; a process on a simulated machine that starts another one ends with both."""
    return {_RUN: " ".join(filter(None, (environment.get(_RUN), token)))}
