"""Run programs on another accelerator, each in a child of a process that has imported torch and initialized nothing.

A child starts in milliseconds. A new process would need seconds to import torch.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from typing import Any

DEADLINE_S = 300.0


class Server:
    """A process that has imported torch and forks a child for each program."""

    def __init__(self, environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "tests.backend.server"]
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, program: str, *switches: str, deadline_s: float = DEADLINE_S, **variables: str) -> str:
        """Run a program on the accelerator with these switches and return its output. Fail the test if the program fails."""
        status, output = self.outcome(program, *switches, deadline_s=deadline_s, **variables)
        assert status == 0, f"status {status}\n{output}"
        return output

    def outcome(
        self, program: str, *switches: str, deadline_s: float = DEADLINE_S, plugin: bool = True, **variables: str
    ) -> tuple[int | None, str]:
        """Run a program and return its exit status and its output.

        The status is negative after a signal and None after the deadline. If ``plugin`` is false, the program does not import
        the plug-in.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        variables = {"HOSTACC_SWITCHES": ",".join(switches), **variables}
        source = ("import hostacc\n" if plugin else "") + textwrap.dedent(program)
        request = {"source": source, "variables": variables, "deadline_s": deadline_s}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        status, output = json.loads(self._process.stdout.readline())
        return status, output

    def close(self) -> None:
        """End the process."""
        self._process.kill()  # there is nothing to save, and torch takes long to exit
        self._process.communicate()


def _serve() -> None:
    # Import what programs need, so that the children do not have to.
    for name in ("torch", "torch.distributed", "torch.utils.checkpoint", "accelerator.checkpointing", "tests.support"):
        importlib.import_module(name)
    import accelerator as acc

    for name in acc.__all__:
        if name not in ("Stream", "Event", "Graph"):
            getattr(acc, name)
    responses = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        responses.write(json.dumps(_run(request["source"], request["variables"], request["deadline_s"])) + "\n")
        responses.flush()


def _run(source: str, variables: dict[str, str], deadline_s: float) -> tuple[int | None, str]:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _run_child(source, variables, writing)
    os.close(writing)
    output, deadline, status = b"", time.monotonic() + deadline_s, 0
    # Read until the deadline, not until the child ends: its own children may keep the pipe open.
    while True:
        ready = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))[0]
        chunk = os.read(reading, 65536) if ready else b""
        output += chunk
        if not chunk:
            break
    if not ready:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    os.close(reading)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return (status if ready else None), output.decode(errors="replace")


def _run_child(source: str, variables: dict[str, str], writing: int) -> None:
    status = 1
    try:
        os.dup2(writing, 1)
        os.dup2(writing, 2)
        os.close(writing)
        os.environ.update(variables)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(source, "<program>", "exec"), namespace)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
