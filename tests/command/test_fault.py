"""Tests ``python -m accelerator fault``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command.test_simulate import takes_cuda_build
from tests.support.simulation import REPOSITORY, evaluate, linux_only, python

pytestmark = [linux_only, pytest.mark.torch_free]

FAULT = "import sys; from accelerator._command.fault import main; sys.exit(main(sys.argv[1:]))"
COUNT = "report(code(n.nvmlDeviceGetHandleByIndex, 1))"


def fault(*words: str, temporary: Path | None = None) -> subprocess.CompletedProcess[str]:
    variables = {"TMPDIR": str(temporary)} if temporary else {}
    environment = {name: value for name, value in os.environ.items() if name != "ACCELERATOR_SIM_STATE"}
    return python(FAULT, *words, env={**environment, **variables})


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("", "the following arguments are required: WHAT"),
        ("xid=7", "Xid 7 is not simulated; these are: 13, 31"),
        ("bang gpu=1", "'bang' is no fault; a fault has one of xid=N"),
        ("status rank=1", "'rank=1' is neither gpu=N nor node=N"),
        ("clear gpu=x", "'gpu=x' is neither gpu=N nor node=N"),
        ("--stat x status", "unrecognized arguments: --stat; did you mean --state?"),
    ],
)
def test_wrong_usage_is_named(words: str, problem: str) -> None:
    done = fault(*words.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr


def test_no_machine_runs(tmp_path: Path) -> None:
    done = fault("status", temporary=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "python -m accelerator fault: no simulated machine runs on which a process has used a GPU\n"
    done = fault("hang", "node=3", temporary=tmp_path)
    assert "no simulated machine with a node 3 runs" in done.stderr


def test_a_file_that_is_no_state(tmp_path: Path) -> None:
    state = tmp_path / "state"
    done = fault("--state", str(state), "status")
    assert (done.returncode, done.stderr) == (1, f"python -m accelerator fault: {state}: there is no such file\n")
    state.write_text("notes")
    done = fault("--state", str(state), "status")
    assert done.returncode == 1
    # The last line: the first process that needs the driver says that it compiles it.
    problem = f"{state}: it is not the state of a machine, or another version's"
    assert done.stderr.splitlines()[-1] == f"python -m accelerator fault: {problem}"


def test_faults_reach_the_machine_with_a_state(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert evaluate(COUNT, 2, state=state) == 0
    assert fault("--state", str(state), "status").stdout == "no faults\n"
    assert fault("--state", str(state), "xid=79", "gpu=1").returncode == 0
    assert fault("--state", str(state), "hang", "gpu=0").returncode == 0
    assert fault("--state", str(state), "clear", "gpu=0").returncode == 0
    assert fault("--state", str(state), "status").stdout == "xid=79,gpu=1: waits\nhang,gpu=0: cleared, never fired\n"
    assert evaluate(COUNT, 2, state=state) == 15
    assert "GPU 1: lost, 0 uncorrectable" in fault("--state", str(state), "status").stdout
    done = fault("--state", str(state), "reset", "gpu=1")
    assert done.returncode == 1
    assert "GPU 1 is lost, and a reset does not bring it back; clear does\n" in done.stderr
    assert fault("--state", str(state), "reset").returncode == 0  # of the other one
    assert evaluate(COUNT, 2, state=state) == 15
    assert fault("--state", str(state), "clear", "gpu=1").returncode == 0
    assert evaluate(COUNT, 2, state=state) == 0


@takes_cuda_build
def test_the_one_machine_that_runs_needs_no_state(tmp_path: Path) -> None:
    program = """if True:
        import sys
        import pynvml as n
        n.nvmlInit()
        n.nvmlDeviceGetHandleByIndex(1)
        print("begun", flush=True)
        sys.stdin.readline()
        try:
            n.nvmlDeviceGetHandleByIndex(1)
        except n.NVMLError as error:
            print(error.value)
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment.pop("ACCELERATOR_SIM_STATE", None)
    command = [sys.executable, "-m", "accelerator", "simulate", "--gpus", "2", "--", sys.executable, "-c", program]
    with subprocess.Popen(
        command,
        env=environment,
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        assert fault("xid=79", "gpu=1", temporary=tmp_path).returncode == 0
        output, errors = process.communicate("\n", timeout=60)
        assert (process.returncode, output) == (0, "15\n"), errors
        assert errors == "NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus\n"
