"""Run programs on another accelerator, each in a fork of a process that has imported torch and initialized nothing."""

from __future__ import annotations

import subprocess
import textwrap

from tests.support import ROOT, torch_processes

DEADLINE_S = 300.0
# What programs need, so that the forks do not have to import it.
_PREPARE = """
import pytest, torch._dynamo, torch.distributed, torch.utils.checkpoint
import accelerator, accelerator.checkpointing, tests.backend.bad_arguments

for name in accelerator.__all__:
    if name not in ("Stream", "Event", "Graph"):
        getattr(accelerator, name)
"""


class Server:
    """Runs programs in forks of one process."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._environment = environment

    def run(self, program: str, *switches: str) -> str:
        """Run a program on the accelerator with these switches and return its output. Fail the test if the program fails."""
        status, output = self.outcome(program, *switches)
        assert status == 0, f"status {status}\n{output}"
        return output

    def outcome(
        self, program: str, *switches: str, deadline_s: float = DEADLINE_S, plugin: bool = True
    ) -> tuple[int | None, str]:
        """Run a program and return its exit status and its output.

        The status is negative after a signal and None after the deadline. If ``plugin`` is false, the program does not import
        the plug-in.
        """
        source = ("import hostacc\n" if plugin else "") + textwrap.dedent(program)
        environment = {**self._environment, "HOSTACC_SWITCHES": ",".join(switches)}
        try:
            done = torch_processes.run(source, environment, timeout=deadline_s, cwd=ROOT, prepare=_PREPARE)
        except subprocess.TimeoutExpired as expired:
            return None, f"{expired.output}{expired.stderr}"
        return done.returncode, done.stdout + done.stderr
