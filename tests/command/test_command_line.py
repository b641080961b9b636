"""Options and help of the command line, and output that cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

import accelerator
from accelerator.__main__ import main
from tests.support import plain_environment, sample, simulated_environment
from tests.support.discovery import on_simulated_gpus


def run(*arguments: str, environment: dict[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accelerator", *arguments]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    environment = {**(environment or plain_environment())}
    environment.pop("PYTHONUNBUFFERED", None)  # so that Python buffers the output, which may fail at exit
    return subprocess.run(command, env=environment, text=True, timeout=300, check=False, **streams)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--watch", "0"], "'0' is not a number of seconds"),
        *(
            pytest.param(["--watch", text], f"{text!r} is not a number of seconds", marks=pytest.mark.slow)
            for text in ("nan", "abc", "\uff12")
        ),
        (["check", "--timeout", "1_0"], "'1_0' is not a number of seconds"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["report", "more"], "unrecognized arguments: more"),
        (["bogus"], "unknown command 'bogus': there are report, check, simulate, fault and rehearse"),
        (["check", "--timeout", "-1"], "is not a number of seconds"),
        (["check", "--watch"], "unrecognized arguments: --watch"),
        (["--js"], "unrecognized arguments: --js; did you mean --json?"),
        (["check", "--jsn", "more"], "unrecognized arguments: --jsn more; did you mean --json?"),
        (["check", "--timeot=3"], "unrecognized arguments: --timeot=3; did you mean --timeout?"),
        (["simulate", "--gpu", "2", "--", "true"], "unrecognized arguments: --gpu; did you mean --gpus?"),
        (["simulate", "--no-computing", "--", "true"], "unrecognized arguments: --no-computing; did you mean --no-compute?"),
        (["rehearse", "--world-sizes", "2", "--", "true"], "unrecognized arguments: --world-sizes; did you mean --world-size?"),
        (["--color", "sometimes"], "invalid choice: 'sometimes'"),
    ],
)
def test_wrong_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(arguments)
    except SystemExit as end:
        status = end.code
    output, errors = capsys.readouterr()
    assert (status, output) == (2, "")
    assert message in errors
    assert errors.startswith("python -m accelerator")
    assert errors.count("\n") == 1


def test_exit_status_of_wrong_usage() -> None:
    done = run("--nonsense")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("python -m accelerator: unrecognized arguments: --nonsense")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [[], ["report"], ["check"]])
def test_help_and_version(command: list[str]) -> None:
    printed = run(*command, "--help")
    assert printed.returncode == 0
    assert "--json" in printed.stdout
    assert max(map(len, printed.stdout.splitlines())) <= 80
    printed = run(*command, "--version")
    assert (printed.returncode, printed.stdout) == (0, f"accelerator {accelerator.__version__}\n")
    assert "simulate" in run("--help").stdout


def test_help_of_rehearse_fits_80_columns() -> None:
    printed = run("rehearse", "--help")
    assert "H100-NVL" in printed.stdout
    assert max(map(len, printed.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("command", "encoding"),
    [("report", "ascii"), ("report", "cp1252"), pytest.param("check", "ascii", marks=pytest.mark.slow)],
)
@on_simulated_gpus
def test_output_without_unicode(command: str, encoding: str) -> None:
    environment = simulated_environment({"PYTHONIOENCODING": encoding}, gpus=1, name="x" * 60)
    done = run(command, environment=environment, encoding=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("+ memory: " if command == "check" else "x" * 19 + "~" + "x" * 19) in done.stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device here")
@pytest.mark.parametrize(
    "arguments",
    sample(
        [["report"], ["report", "--json"], ["report", "--watch"], ["check"], ["--help"], ["check", "--help"], ["--version"]],
        *(["report"], ["check"], ["--help"]),
    ),
)
def test_full_disk_is_reported(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = run(*arguments, stdout=full)
    assert done.returncode == 1
    assert done.stderr == "python -m accelerator: cannot write the output: No space left on device\n"


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["report"], 0), (["report", "--watch"], 0), pytest.param(["check"], 0, marks=pytest.mark.slow), (["--help"], 0)],
)
def test_closed_pipe_is_not_an_error(arguments: list[str], status: int) -> None:
    ours, its = os.pipe()
    os.close(ours)
    with open(its, "w") as closed:
        done = run(*arguments, stdout=closed)
    assert (done.returncode, done.stderr) == (status, "")
