"""``--races``, ``races=`` and what they do to the exit status and to ops."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import accelerator.simulation
from tests import support
from tests.support import simulated_environment
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = needs_cuda_torch

_TWO_STREAMS = """
import torch
side = torch.cuda.Stream()
x = torch.ones(1000, device="cuda")
torch.cuda.synchronize()
with torch.cuda.stream(side):
    x * 2
{}
x.add_(1)
print("done")
"""
RACE = _TWO_STREAMS.format("")
NO_RACE = _TWO_STREAMS.format("torch.cuda.current_stream().wait_stream(side)")


def _simulate(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accelerator", "simulate", "--gpus", "1", *options, "--", sys.executable, "-c", program]
    root = Path(accelerator.__file__).parents[1]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=root)


@pytest.mark.slow
def test_the_exit_status_counts_every_process() -> None:
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {RACE!r}], check=True)"
    done = _simulate(parent, "--races", "report")
    assert done.returncode == 1, done.stderr
    blocks = [line for line in done.stderr.splitlines() if line.startswith("race: ")]
    assert blocks == ["race: 4000 bytes of a float32 tensor of shape (1000,): nothing orders two accesses on two streams"]


@pytest.mark.slow
def test_a_possible_race_is_no_failure() -> None:
    program = """
import torch
table, side, rows = torch.ones(100, 10).cuda(), torch.cuda.Stream(), torch.arange(5).cuda()
torch.cuda.synchronize()
with torch.cuda.stream(side):
    table.index_select(0, rows)
table[50:].zero_()
torch.cuda.synchronize()
"""
    done = _simulate(program, "--races", "report")
    assert "race: possible, depending on values: " in done.stderr
    assert done.returncode == 0


def test_the_command_keeps_another_status() -> None:
    assert _simulate("raise SystemExit(3)", "--races", "report").returncode == 3


@pytest.mark.parametrize("program", [NO_RACE, RACE])
def test_without_the_option_nothing_is_reported(program: str) -> None:
    done = support.python(program, simulated_environment(gpus=1))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_certain_race_is_reported_beside_a_possible_one_of_the_same_lines() -> None:
    program = """
import torch
from accelerator import simulation
side, table = torch.cuda.Stream(), torch.ones(100, 10, device="cuda")
def race(access):
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        access(table)
    table[50:].zero_()
rows, added = torch.arange(5, device="cuda"), torch.ones(5, 10, device="cuda")
accesses = lambda table: table.index_add_(0, rows, added), lambda table: table.add_(1)
for number in (0, 0, 1, 1, 0):
    race(accesses[number])
print([race.is_possible for race in simulation.races()])
"""
    done = support.python(program, simulated_environment(gpus=1, races="report"))
    assert done.stdout == "[True, False]\n", done.stderr
    assert done.stderr.count("race: possible, depending on values: 2000 bytes") == 1
    assert done.stderr.count("race: 2000 bytes") == 1


def test_raise_stops_the_second_op() -> None:
    done = support.python(RACE, simulated_environment(gpus=1, races="raise"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert "RuntimeError: race: 4000 bytes" in done.stderr
    assert support.python(NO_RACE, simulated_environment(gpus=1, races="raise")).stdout == "done\n"


@pytest.mark.parametrize(("dtype", "text"), [("int64", "an int64"), ("uint8", "a uint8")])
def test_a_report_names_the_type(dtype: str, text: str) -> None:
    program = RACE.replace("1000,", f"1000, dtype=torch.{dtype},")
    done = support.python(program, simulated_environment(gpus=1, races="report"))
    assert f"bytes of {text} tensor of shape (1000,): " in done.stderr


def test_the_first_copy_on_a_device_is_not_one_between_devices() -> None:
    program = RACE.replace("x * 2", "x.copy_(torch.ones_like(x))")
    done = support.python(program, simulated_environment(gpus=1, races="report"))
    assert "on stream 1 of cuda:0 writes it: <string>:7 in <module>" in done.stderr
    assert "cudaMemcpyPeerAsync" not in done.stderr


def test_a_host_access_raises_at_the_next_op() -> None:
    program = """
import torch
x, host = torch.ones(100, device="cuda"), torch.zeros(100).pin_memory()
host.copy_(x, non_blocking=True)
host.sum()
try:
    x.add_(1)
except RuntimeError as error:
    print(str(error).splitlines()[0])
"""
    done = support.python(program, simulated_environment(gpus=1, races="raise"))
    assert done.stdout == (
        "race: 400 bytes of pinned memory, a float32 tensor of shape (100,): the host has not waited for a copy\n"
    )


def test_each_kind_of_second_access_raises_the_report_once() -> None:
    program = """
import torch
from accelerator import simulation
side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
x, y, host = torch.ones(1000, device="cuda"), torch.ones(1000, device="cuda"), torch.ones(1000).pin_memory()
table, rows = torch.ones(100, 10, device="cuda"), torch.arange(5, device="cuda")
def attempt(first, second):
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        first()
    try:
        second()
    except RuntimeError as error:
        report = simulation.races()[-1]
        assert str(error).rstrip() == report.message
        print(report.second.partition(" on ")[0])
    else:
        print("no error")
    torch.ones(3, device="cuda").sum()
attempt(lambda: x.add_(1), lambda: x.copy_(host, non_blocking=True))
attempt(lambda: x.add_(1), lambda: host.copy_(x, non_blocking=True))
attempt(lambda: x.sum(), lambda: x.copy_(y))
attempt(lambda: (torch.ones(98765, device="cuda").sum(), x)[1], lambda: torch.zeros(98765, device="cuda"))
attempt(lambda: table.index_select(0, rows), lambda: table[50:].zero_())
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2)
    y.copy_(x)
    torch.cuda.current_stream().wait_stream(side)
try:
    host.fill_(1)
    rows.sum()
except RuntimeError as error:
    print(str(error).splitlines()[2].strip().partition(" on ")[0])
"""
    done = support.python(program, simulated_environment(gpus=1, races="raise"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["aten::copy_"] * 3 + ["no error"] * 2 + ["aten::copy_"]


def test_a_process_stores_its_reports_with_its_test(tmp_path: Path) -> None:
    variables = {"ACCELERATOR_SIM_RACE_TEST": "a test"}
    machine = simulated_environment(variables, gpus=1, races="report", state=tmp_path / "state")
    done = support.python(RACE + RACE.replace("x * 2", "x * 3"), machine)
    reports = done.stderr.split("race: ")[1:]
    assert len(reports) == 2
    assert (tmp_path / "state.races").read_text() == "".join(f"a test\nrace: {report}\0" for report in reports)


def test_a_fault_of_the_program_and_handlers_set_later() -> None:
    program = """
import torch
import ctypes, faulthandler, os
from accelerator import simulation
x, host = torch.ones(100, device="cuda"), torch.zeros(100).pin_memory()
host.copy_(x, non_blocking=True)
process = os.fork()
if process == 0:  # nothing is pending there
    print(host.sum().item(), len(simulation.races()), flush=True)
    os._exit(0)
os.waitpid(process, 0)
print(host.sum().item(), len(simulation.races()))
faulthandler.enable()
host.copy_(x, non_blocking=True)
print(host.sum().item(), len(simulation.races()), flush=True)
host.copy_(x, non_blocking=True)
ctypes.string_at(8)
"""
    done = support.python(program, simulated_environment(gpus=1, races="report"))
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, "100.0 0\n100.0 1\n100.0 2\n"), done.stderr
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert done.stderr.count("race: 400 bytes") == 2


def test_a_program_that_resets_all_signals() -> None:
    program = """
import torch
import signal
x, host = torch.ones(100, device="cuda"), torch.zeros(100).pin_memory()
for number in range(signal.SIGRTMIN, signal.SIGRTMAX + 1):
    signal.signal(number, signal.SIG_DFL)
host.copy_(x, non_blocking=True)
host.sum()
print(signal.getsignal(signal.SIGRTMAX - 3))
"""
    done = support.python(program, simulated_environment(gpus=1, races="report"))
    assert done.stdout.splitlines()[-1:] == ["0"], (done.returncode, done.stderr)
    assert "<string>:8 in <module>" in done.stderr


@pytest.mark.parametrize("races", ["all", 1, True])
def test_wrong_values(races: object) -> None:
    with pytest.raises((TypeError, ValueError), match="races must be"):
        accelerator.simulation.environment(races=races)  # type: ignore[arg-type]


@pytest.mark.parametrize("possible", ["x.masked_fill_(mask, 1)", "x.index_select(0, rows)"])
def test_a_possible_access_hides_no_certain_one(possible: str) -> None:
    program = f"""
import torch, accelerator
x, rows = torch.ones(9, device="cuda"), torch.arange(3, device="cuda")
mask = x > 9
torch.cuda.synchronize()
with torch.cuda.stream(torch.cuda.Stream()):
    x.mul_(2)
    {possible}
x.add_(1)
print([(race.is_possible, race.first.split()[0]) for race in accelerator.simulation.races()])
"""
    done = support.python(program, simulated_environment(gpus=1, races="report"))
    name = possible.partition(".")[2].partition("(")[0]
    assert done.stdout == f"[(False, 'aten::mul_'), (True, 'aten::{name}')]\n", done.stderr
