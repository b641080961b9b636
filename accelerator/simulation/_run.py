"""Starts a command on a simulated machine, forwards signals to it and waits for it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["run"]

_NOT_EXECUTABLE = 126
_NO_SUCH_COMMAND = 127
_SIGNALLED = 128


def run(command: list[str], child: Mapping[str, str]) -> int:
    """Run a command and return its exit status as a shell does.

    Signals that other processes send to this one are forwarded to the command.

    Args:
        command: The program and its arguments.
        child: The environment of the command.
    """
    if sys.platform != "linux":
        raise AssertionError("simulated GPUs need Linux")  # `environment` raises before this; the line is for type checkers
    forwarded = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
    awaited = {*forwarded, signal.SIGCHLD}
    # The signals are blocked, not handled: those that arrive while the command starts stay pending, and sigwaitinfo
    # names their sender.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    # If the parent process left SIGCHLD ignored, the signal never comes and the kernel discards the command's status.
    is_ignored = signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    if is_ignored:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        try:
            # Search the command's PATH, which has the simulated machine's nvidia-smi, not this process's.
            program = shutil.which(command[0], path=child.get("PATH")) or command[0]
            pid = os.posix_spawnp(program, command, child, setsigmask=before, setsigdef=[signal.SIGPIPE, signal.SIGXFSZ])
        except FileNotFoundError:
            return _report_error(f"{command[0]}: command not found", _NO_SUCH_COMMAND)
        except OSError as error:
            return _report_error(f"{command[0]}: {error.strerror}", _NOT_EXECUTABLE)
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else _SIGNALLED - code
            received = signal.sigwaitinfo(awaited)
            # A positive code means that the terminal sent the signal through the kernel, and the command has received it too.
            if received.si_signo != signal.SIGCHLD and received.si_code <= 0:
                os.kill(pid, received.si_signo)
    finally:
        # Discard signals that came after the command's end: they would end this process before it cleans up.
        while signal.sigtimedwait(awaited, 0) is not None:
            pass
        if is_ignored:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _report_error(message: str, status: int) -> int:
    """Print one line that says what is wrong."""
    print(f"python -m accelerator simulate: {message}", file=sys.stderr)
    return status
