"""Runs a program in a child process with a deadline and returns the JSON that it prints between two marks."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import imports, process
from . import visibility_variables as this_environment

if TYPE_CHECKING:
    import subprocess


_LINES_QUOTED, _CHARACTERS_QUOTED = 4, 500
_WAIT_FOR_KILLED_S = 1.0


class ChildError(RuntimeError):
    """No output: the child could not be started, missed the deadline, or ended without output."""


class NotStarted(ChildError):
    """The child could not be started."""


def source(module: ModuleType) -> str | None:
    """The source text of a module, from wherever this package was imported."""
    # The loader's get_source would import tokenize, which fails in a signal handler that interrupts the import of it.
    get_data = getattr(getattr(module, "__loader__", None), "get_data", None)
    path: str | None = getattr(module, "__file__", None)
    if get_data is None or path is None:
        return None
    try:
        data: bytes = get_data(path.removesuffix("c"))  # a frozen application may name the compiled file
    except OSError:
        return None
    return data.decode()


def run(
    program: str | None, arguments: Sequence[str], environment: Mapping[str, str | None], *, subject: str, deadline_s: float
) -> Any:
    """Run a program, which gets the arguments and the mark.

    Args:
        program: the source text of the program.
        arguments: its arguments.
        environment: variables to set in the child, or to remove if None, in addition to those of this process.
        subject: what the child asks, for messages.
        deadline_s: the time after which it is killed.

    Raises:
        ChildError: if there is no output; NotStarted if the child could not be started.
    """
    try:
        imports.import_modules("subprocess")
        import subprocess
    except (OSError, ImportError, RuntimeError) as error:  # too many open files, or as import_modules
        raise NotStarted(f"no child process could be started to ask {subject} ({error})") from None
    python = process.python()
    if python is None or program is None:
        raise NotStarted(f"{subject} can only be asked in a child process, and there is no Python executable to start one")
    mark = os.urandom(16).hex()
    variables = {**this_environment.variables(), **environment}
    try:
        child = subprocess.Popen(
            [python, "-I", "-S", "-c", program, *arguments, mark],
            env={name: value for name, value in variables.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except (OSError, ValueError, RuntimeError) as error:
        # ValueError: a value that no environment can hold. RuntimeError: a sub-interpreter may not fork.
        raise NotStarted(f"no child process could be started to ask {subject} ({error})") from None
    try:
        output, errors = child.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        _kill(child)
        raise ChildError(f"{subject} did not answer a child process within {deadline_s:g} s") from None
    except BaseException:
        _kill(child)
        raise
    try:
        return json.loads(output.split(f"\n{mark}\n".encode())[1])
    except (IndexError, ValueError):
        message = f"the child process that asked {subject} ended with status {child.returncode} ({_end_of(errors)!r})"
        raise ChildError(message) from None


def _end_of(errors: bytes) -> str:
    """The end of what a child printed, in one line. A library that aborts prints its error a few lines before the last one."""
    lines = errors.decode(errors="replace").strip().splitlines()[-_LINES_QUOTED:]
    return " ".join(" ".join(lines).split())[-_CHARACTERS_QUOTED:]


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a child and wait for it, so that it does not stay a zombie."""
    child.kill()
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()
    try:
        child.wait(_WAIT_FOR_KILLED_S)
    except Exception:  # in an uninterruptible system call, it ends when the driver returns
        threading.Thread(target=child.wait, daemon=True).start()
