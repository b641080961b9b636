"""What runs on simulated machines ends with the process that started it, even if that is killed."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from accelerator.simulation._outside.state_folder import state_folder
from tests.support import plain_environment
from tests.support.pytest_suite import Suite
from tests.support.simulation import DEADLINE, REPOSITORY, linux_only
from tests.support.simulation_driver import needs_cuda_torch

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [linux_only, needs_cuda_torch]

# A command that has started another one, and writes the pids of both. The other one ignores signals and has no terminal.
COMMAND = "nohup setsid sleep 300 >/dev/null 2>&1 & echo $$ > {folder}/$$.pid; echo $! > {folder}/$!.pid; wait"
TEST = """
import os, pathlib, subprocess, pytest

@pytest.mark.simulated_machine(gpus=1)
def test_that_is_killed():
    subprocess.run(["sh", "-c", {command!r}])

def test_on_the_session():
    subprocess.run(["sh", "-c", {command!r}])
"""
SERVED = """
import os, pathlib, time, pytest

@pytest.mark.simulated_machine(gpus=1)
def test_that_outlives_its_server():
    folder = pathlib.Path({folder!r})
    (folder / "server").write_text(str(os.getppid()))
    (folder / f"{{os.getpid()}}.pid").write_text(f"{{os.getpid()}}\\n")
    time.sleep(300)
"""
SIMULATE = [sys.executable, "-m", "accelerator", "simulate"]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "accelerator.simulation.pytest_plugin", "-p", "no:cacheprovider"]


class Started:
    """A process, and those that it has started."""

    def __init__(self, folder: Path, command: list[str], count: int) -> None:
        (folder / "temporary").mkdir()
        environment = plain_environment(TMPDIR=str(folder / "temporary"))
        self.parent = subprocess.Popen(
            command, env=environment, cwd=REPOSITORY, stdin=subprocess.DEVNULL, start_new_session=True
        )
        self.pids: set[int] = set()
        until = time.monotonic() + DEADLINE
        while len(self.pids) < count and time.monotonic() < until and self.parent.poll() is None:
            time.sleep(0.02)
            self.pids = {int(path.stem) for path in folder.glob("*.pid") if path.read_text().endswith("\n")}
        assert len(self.pids) == count, self.parent.poll()

    def kill(self) -> None:
        self.parent.kill()
        self.parent.wait()

    def running(self) -> set[int]:
        """Wait until no process runs, and return those that run after the deadline."""
        until = time.monotonic() + 30
        while (running := set(filter(_is_running, self.pids))) and time.monotonic() < until:
            time.sleep(0.02)
        return running

    def end(self) -> None:
        for pid in filter(_is_running, self.pids):
            os.kill(pid, signal.SIGKILL)
        if self.parent.poll() is None:
            self.kill()


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class _Start:
    def __init__(self) -> None:
        self.started: list[Started] = []

    def __call__(self, folder: Path, command: list[str], count: int) -> Started:
        self.started.append(Started(folder, command, count))
        return self.started[-1]


@pytest.fixture
def start() -> Iterator[_Start]:
    starter = _Start()
    yield starter
    for each in starter.started:
        each.end()


def shell(folder: Path) -> list[str]:
    return ["--", "sh", "-c", COMMAND.format(folder=folder)]


@pytest.mark.parametrize(
    ("command", "count"),
    [
        ([*SIMULATE], 2),
        ([*SIMULATE, "--nodes", "2"], 4),
        ([sys.executable, "-m", "accelerator", "rehearse"], 2),
        ([*SIMULATE, "--", *SIMULATE], 2),
    ],
    ids=["simulate", "nodes", "rehearse", "nested"],
)
def test_a_killed_command_line_ends_what_it_started(start: _Start, tmp_path: Path, command: list[str], count: int) -> None:
    started = start(tmp_path, [*command, *shell(tmp_path)], count)
    started.kill()
    assert started.running() == set()


def test_an_inner_simulation_ends_alone(start: _Start, tmp_path: Path) -> None:
    inner = tmp_path / "inner.sh"
    inner.write_text(f"echo $$ > {tmp_path}/inner; exec {shlex.join([*SIMULATE, *shell(tmp_path)])}")
    started = start(tmp_path, [*SIMULATE, "--", "sh", "-c", f"sh {inner}; sleep 300"], 2)
    os.kill(int((tmp_path / "inner").read_text()), signal.SIGKILL)
    assert started.running() == set()
    assert started.parent.poll() is None


@pytest.mark.parametrize(
    ("options", "name"),
    [(["--simulate-gpus", "1"], "test_on_the_session"), ([], "test_that_is_killed")],
    ids=["session", "machine"],
)
def test_a_killed_pytest_ends_its_machines(
    start: _Start, tmp_path: Path, options: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Suite(tmp_path).hide_torch()
    file = tmp_path / "test_killed.py"
    file.write_text(TEST.format(command=COMMAND.format(folder=tmp_path)))
    started = start(tmp_path, [*PYTEST, *options, f"{file}::{name}"], 2)
    assert list(tmp_path.glob("temporary/accelerator-simulation-*"))
    started.kill()
    assert started.running() == set()
    # The next simulation removes its folder, once the last process has ended.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    until = time.monotonic() + 30
    while (left := list(tmp_path.glob("temporary/accelerator-simulation-*"))) and time.monotonic() < until:
        with state_folder():
            time.sleep(0.02)
    assert not left


def test_a_killed_server_ends_its_test(start: _Start, tmp_path: Path) -> None:
    Suite(tmp_path).hide_torch()
    file = tmp_path / "test_killed.py"
    file.write_text(SERVED.format(folder=str(tmp_path)))
    started = start(tmp_path, [*PYTEST, str(file)], 1)
    os.kill(int((tmp_path / "server").read_text()), signal.SIGKILL)
    assert started.running() == set()
    assert started.parent.wait(DEADLINE) == 1


def test_what_a_command_leaves_behind_stays_if_nothing_is_killed(start: _Start, tmp_path: Path) -> None:
    command = COMMAND.format(folder=tmp_path).replace("; wait", "")
    started = start(tmp_path, [*SIMULATE, "--", "sh", "-c", f"{command}; sleep 0.3"], 2)
    assert started.parent.wait(DEADLINE) == 0
    assert len(list(filter(_is_running, started.pids))) == 1


def test_the_guard_ends_with_the_command(tmp_path: Path) -> None:
    """A pipe to the output ends with the command line: the guard does not keep it open."""
    done = subprocess.run(
        [*SIMULATE, "--", "true"], env=plain_environment(), capture_output=True, cwd=REPOSITORY, timeout=DEADLINE
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
