"""The exit statuses of ``simulate`` and ``rehearse``, as products of what decides them."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT, plain_environment
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = needs_cuda_torch

# Runs command lines in one process, and prints their statuses.
PROGRAM = """
import importlib, json, sys
name, calls = json.loads(sys.argv[1])
main = importlib.import_module(f"accelerator._command.{name}").main
print(json.dumps([main(arguments) for arguments in calls]))
"""


def run(command: str, calls: list[list[str]]) -> tuple[list[int], str]:
    """Return the statuses, and what was written to stderr."""
    arguments = [sys.executable, "-c", PROGRAM, json.dumps([command, calls])]
    done = subprocess.run(
        arguments, cwd=ROOT, env=plain_environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def statuses(command: str, calls: list[list[str]]) -> list[int]:
    return run(command, calls)[0]


# What ends a command, and its status.
ENDS = {f"exit {end}": end for end in (0, 1, 3, 255)} | {"kill -INT $$": 130, "kill -KILL $$": 137, "kill -TERM $$": 143}
# Python ignores these two signals, and a command does not.
IGNORED_BY_PYTHON = {"kill -PIPE $$": 141, "kill -XFSZ $$": 153}
# Libraries write the races of all processes to this file.
RACE = 'echo race >> "$ACCELERATOR_SIM_RACE_FILE"; '


@pytest.mark.parametrize("nodes", [[], ["--nodes", "2"]], ids=["one machine", "two nodes"])
def test_status_of_simulate(nodes: list[str]) -> None:
    cases = list(itertools.product((False, True), ENDS))
    calls = [
        [*nodes, *(["--races", "report"] if has_race else []), "--", "sh", "-c", RACE * has_race + end]
        for has_race, end in cases
    ]
    expected = [1 if has_race and ENDS[end] == 0 else ENDS[end] for has_race, end in cases]
    cases += [(False, end) for end in IGNORED_BY_PYTHON]
    calls += [[*nodes, "--", "sh", "-c", end] for end in IGNORED_BY_PYTHON]
    expected += IGNORED_BY_PYTHON.values()
    assert dict(zip(cases, statuses("simulate", calls), strict=True)) == dict(zip(cases, expected, strict=True))


def test_status_of_rehearse_is_that_of_the_first_rank_that_fails() -> None:
    cases = list(itertools.product((0, 3, 5), repeat=2))
    calls = [
        ["--world-size", "2", "--rank", "0,1", "--", "sh", "-c", f"test $RANK = 0 && exit {first}; exit {second}"]
        for first, second in cases
    ]
    found = statuses("rehearse", calls)
    assert dict(zip(cases, found, strict=True)) == {(first, second): first or second for first, second in cases}


def test_status_of_a_rehearsed_command() -> None:
    ends = ENDS | IGNORED_BY_PYTHON
    found = statuses("rehearse", [["--", "sh", "-c", end] for end in ends])
    assert dict(zip(ends, found, strict=True)) == ends


def test_status_of_a_rehearsal_whose_file_cannot_be_written(tmp_path: Path) -> None:
    missing = str(tmp_path / "none" / "figures.json")
    found, said = run("rehearse", [["--json", missing, "--", "sh", "-c", f"exit {status}"] for status in (0, 3)])
    assert found == [2, 3]
    assert said.count(f"No such file or directory: '{missing}'") == 2
