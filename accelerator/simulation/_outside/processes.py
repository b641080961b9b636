"""Starts a command on a simulated machine, forwards signals to it, and waits for it, however long it takes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, NamedTuple

from .guard import guarded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NOT_EXECUTABLE = 126
_NO_SUCH_COMMAND = 127
_SIGNALLED = 128


class CannotStart(Exception):
    """The command cannot be started."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Signals(NamedTuple):
    """The signals that `handle_signals` blocks."""

    awaited: set[signal.Signals]
    before: set[int]
    """What was blocked before; a command starts with this."""


def run(caller: str, command: list[str], child: Mapping[str, str]) -> int:
    """Run a command and return its exit status as a shell does.

    Signals that other processes send to this one are forwarded to the command. If this process is killed, the command ends too,
    with all processes that it has started.

    Args:
        caller: What runs it, such as ``python -m accelerator simulate``: messages begin with it.
        command: The program and its arguments.
        child: The environment of the command.
    """
    with guarded() as variables, handle_signals() as signals:
        try:
            pid = start(command, {**child, **variables}, signals)
        except CannotStart as problem:
            report(caller, str(problem))
            return problem.status
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return shell_status(status)
            received = signal.sigwaitinfo(signals.awaited)
            # A positive code means that the terminal sent the signal through the kernel, and the command has received it too.
            if received.si_signo != signal.SIGCHLD and received.si_code <= 0:
                os.kill(pid, received.si_signo)


@contextlib.contextmanager
def handle_signals() -> Generator[Signals, None, None]:
    """Block the signals that end a process, and SIGCHLD, for ``sigwaitinfo``."""
    awaited = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD}
    # The signals are blocked, not handled: those that arrive while the command starts stay pending, and sigwaitinfo
    # names their sender.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    # If the parent process left SIGCHLD ignored, the signal never comes and the kernel discards the command's status.
    is_ignored = signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    if is_ignored:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield Signals(awaited, {int(number) for number in before})
    finally:
        # Discard signals that came after the command's end: they would end this process before it cleans up.
        while signal.sigtimedwait(awaited, 0) is not None:
            pass
        if is_ignored:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start(
    command: list[str], child: Mapping[str, str], signals: Signals, file_actions: Sequence[tuple[int, int, int]] = ()
) -> int:
    """Start a command and return its pid.

    Raises:
        CannotStart: The program was not found or is not executable.
    """
    try:
        # Search the command's PATH, which has the simulated machine's nvidia-smi, not this process's.
        program = shutil.which(command[0], path=child.get("PATH")) or command[0]
        return os.posix_spawnp(
            program,
            command,
            child,
            file_actions=file_actions,
            setsigmask=signals.before,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )
    except FileNotFoundError:
        raise CannotStart(f"{command[0]}: command not found", _NO_SUCH_COMMAND) from None
    except OSError as error:
        raise CannotStart(f"{command[0]}: {error.strerror}", _NOT_EXECUTABLE) from None


def shell_status(status: int) -> int:
    """Convert what ``waitpid`` returns into the exit status that a shell reports."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else _SIGNALLED - code


def report(caller: str, message: str) -> None:
    """Print one line that says what is wrong."""
    print(f"{caller}: {message}", file=sys.stderr)
