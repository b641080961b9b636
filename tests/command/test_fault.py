"""Tests ``python -m accelerator fault``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from accelerator._command import fault as command
from accelerator.simulation._outside import machine_faults
from accelerator.simulation._outside.state_folder import state_folder
from accelerator.simulation._settings import fault_words
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
        ("clear gpu=0 gpu=1", "'gpu=1': gpu is given twice"),
        ("status gpu=1", "status takes node=N"),
        *((words, "restart takes node=N") for words in ("restart", "restart gpu=1", "node=1 restart gpu=1")),
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


FIRST = """
hang,gpu=2,after_collectives=7: waits, after 0 collectives
xid=63,gpu=1: over, fired at T on GPU 1
slow=1us,after_seconds=900: waits
xid=64,gpu=2: over, fired at T on GPU 2
xid=92,gpu=1: over, fired at T on GPU 1
xid=79,gpu=0: active, fired at T on GPU 0
flip=3,gpu=1: waits, after 0 ops
link,gpu=1,after_launches=2: waits, after 0 launches
GPU 0: lost, 0 uncorrectable and 0 corrected ECC errors, 0 remapped rows; to do: reboot the node
GPU 1: 0 uncorrectable and 1 corrected ECC errors, 1 remapped rows (pending); to do: drain and reset the GPU
GPU 2: 0 uncorrectable and 0 corrected ECC errors, 0 remapped rows, a failed remapping; to do: reset the GPU
"""
AFTER_RESET_OF_GPU_2 = [
    ("hang,gpu=2,after_collectives=7: waits", "hang,gpu=2,after_collectives=7: cleared, never fired"),
    ("a failed remapping; to do: reset the GPU", "a failed remapping; to do: none"),  # which only clear ends
]
AFTER_CLEAR_OF_GPU_1 = [
    ("flip=3,gpu=1: waits", "flip=3,gpu=1: cleared, never fired"),
    ("link,gpu=1,after_launches=2: waits", "link,gpu=1,after_launches=2: cleared, never fired"),
    (" (pending); to do: drain and reset the GPU", "; to do: none"),
]
AFTER_RESET: list[tuple[str, str]] = []  # a lost GPU cannot be reset
AFTER_CLEAR = [
    ("slow=1us,after_seconds=900: waits", "slow=1us,after_seconds=900: cleared, never fired"),
    ("79,gpu=0: active", "79,gpu=0: cleared"),
    ("GPU 0: lost, 0 uncorrectable and 0 corrected ECC errors, 0 remapped rows; to do: reboot the node\n", ""),
    ("GPU 2: 0 uncorrectable and 0 corrected ECC errors, 0 remapped rows, a failed remapping; to do: none\n", ""),
]


def test_status_word_by_word(tmp_path: Path) -> None:
    state, expected = tmp_path / "state", FIRST[1:]
    faults = [line.partition(":")[0] for line in expected.splitlines() if not line.startswith("GPU")]
    # NVML alone fires what concerns no process.
    program = "report([code(n.nvmlDeviceGetHandleByIndex, gpu) for gpu in range(3)])"
    assert evaluate(program, 3, state=state, faults=faults) == [15, 0, 0]

    def described() -> str:
        return re.sub(r"\d\d:\d\d:\d\d", "T", machine_faults.describe(state))

    assert described() == expected
    for gpu, is_reset, changes in (
        (2, True, AFTER_RESET_OF_GPU_2),
        (1, False, AFTER_CLEAR_OF_GPU_1),
        (None, True, AFTER_RESET),
        (None, False, AFTER_CLEAR),
    ):
        machine_faults.end(state, gpu, is_reset=is_reset)
        for before, after in changes:
            assert before in expected
            expected = expected.replace(before, after)
        assert described() == expected, (gpu, is_reset)


def test_a_fault_of_a_node_is_only_that_nodes(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert evaluate(COUNT, 2, state=state, faults=["hang,node=1"]) == 0  # a machine alone is node 0
    assert machine_faults.describe(state) == ""
    machine_faults.add(state, fault_words.parse("hang"))
    machine_faults.add(state, fault_words.parse("flip=3,node=1"))
    assert machine_faults.describe(state) == "hang: waits\nflip=3,node=1: waits, after 0 ops\n"


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Return the folders of two clusters and of a machine, whose commands run. There is one whose command has ended."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("ACCELERATOR_SIM_STATE", raising=False)
    with ExitStack() as running:
        found = sorted(running.enter_context(state_folder()) for _ in range(3))
        (tmp_path / "accelerator-simulation-ended").mkdir()
        found.append(tmp_path / "accelerator-simulation-ended")
        (found[3] / "lock").touch()
        # In this order, because the order of the files of a folder is often that of their creation.
        for name in ("state-10", "state-2", "state-0.problem", "state-1", "state-0", "ended-1", "ended-0"):
            (found[0] / name).touch()
        for name in ("state-0", "ended-0", "state.races"):
            (found[1] / name).touch()
        for folder in found[2:]:
            (folder / "state").touch()
            (folder / "ended-1").touch()
        (found[2] / "ended-1").unlink()
        yield found


def names(folders: list[Path]) -> list[str]:
    """Return the states of the fixture's machines in the order in which they are named."""
    return [str(folders[0] / f"state-{node}") for node in (0, 1, 2, 10)] + [
        str(folders[1] / "state-0"),
        str(folders[2] / "state"),
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("xid=94,gpu=1 node=2", [("add", 2, "xid=94,gpu=1,node=2")]),
        ("hang gpu=3 for=2 node=10", [("add", 3, "hang,gpu=3,for=2,node=10")]),
        ("clear node=1", [("end", 1, None, False)]),
        ("node=10 gpu=2 clear", [("end", 3, 2, False)]),
        ("reset gpu=3 node=1", [("end", 1, 3, True)]),
        ("--state {5} reset", [("end", 5, None, True)]),
        ("--state {4} slow=1ms", [("add", 4, "slow=1ms")]),
    ],
)
def test_words_reach_the_machine_that_they_name(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, words: str, expected: list[Any]
) -> None:
    states, calls = names(folders), []
    monkeypatch.setattr(
        machine_faults, "add", lambda state, fault: calls.append(("add", states.index(str(state)), fault.words))
    )
    monkeypatch.setattr(
        machine_faults, "end", lambda state, gpu, *, is_reset: calls.append(("end", states.index(str(state)), gpu, is_reset))
    )
    assert command.main(words.format(*states).split()) == 0
    assert calls == expected
    monkeypatch.setenv("ACCELERATOR_SIM_STATE", states[4])  # a process on a machine means its own
    assert command.main(["clear"]) == 0
    assert calls[len(expected) :] == [("end", 4, None, False)]


def test_status_names_the_machine_if_there_are_several(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = names(folders)
    monkeypatch.setattr(machine_faults, "describe", lambda state: "" if state.name == "state-1" else f"of {state.name}\n")
    assert command.main(["status"]) == 0
    texts = ["of state-0\n", "", "of state-2\n", "of state-10\n", "of state-0\n", "of state\n"]
    assert capsys.readouterr().out == "".join(f"{state}\n{text}" for state, text in zip(states, texts, strict=True))
    assert command.main(["status", "node=2"]) == command.main(["status", "node=1"]) == 0
    assert capsys.readouterr().out == "of state-2\nno faults\n"
    assert command.main(["status", "node=0"]) == 0
    assert capsys.readouterr().out == f"{states[0]}\nof state-0\n{states[4]}\nof state-0\n"


def test_one_of_several_machines_must_be_named(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    states = names(folders)
    prefix = "python -m accelerator fault: "
    several = f"{prefix}several machines run; name one by node=N or --state: "
    for word in ("clear", "reset", "hang"):
        assert command.main([word]) == 1
        assert capsys.readouterr().err == f"{several}{', '.join(states)}\n"
    assert command.main(["hang", "node=0"]) == 1
    assert capsys.readouterr().err == f"{several}{states[0]}, {states[4]}\n"
    assert command.main(["status", "node=3"]) == 1
    assert capsys.readouterr().err == f"{prefix}no simulated machine with a node 3 runs on which a process has used a GPU\n"


def test_a_restart_removes_the_mark_of_the_node(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    states = names(folders)

    def marks() -> list[str]:
        return [f"{number}/{mark.name}" for number, folder in enumerate(folders) for mark in sorted(folder.glob("ended-*"))]

    prefix = "python -m accelerator fault: "
    assert command.main(["restart", "node=0"]) == 1
    several = f"node 0 of several clusters has failed; name one by --state: {states[0]}, {states[4]}"
    assert capsys.readouterr().err == f"{prefix}{several}\n"
    assert command.main(["restart", "node=2"]) == 1
    none = "no node 2 has failed in a cluster that runs with --on-node-failure continue"
    assert capsys.readouterr().err == f"{prefix}{none}\n"
    assert marks() == ["0/ended-0", "0/ended-1", "1/ended-0", "3/ended-1"]
    assert command.main(["restart", "node=1"]) == 0
    assert marks() == ["0/ended-0", "1/ended-0", "3/ended-1"]
    monkeypatch.setenv("ACCELERATOR_SIM_STATE", states[4])
    assert command.main(["--state", states[2], "restart", "node=0"]) == 0
    assert marks() == ["1/ended-0", "3/ended-1"]
    assert command.main(["restart", "node=0"]) == 0
    assert marks() == ["3/ended-1"]


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
