"""Races of kernels that are not torch's own: each access counts, so programs without a race report nothing."""

from __future__ import annotations

import re
import signal
import textwrap
from typing import Any

import pytest

from tests.support import python, simulated_environment
from tests.support.simulation import linux_only
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [linux_only, needs_cuda_torch, pytest.mark.xdist_group("extensions")]

START = """
import ctypes, torch
from accelerator import simulation
from tests.simulation.extensions.binaries import Binary
from tests.simulation.extensions.texts import *

n, side = 1000, torch.cuda.Stream()
saxpy, totals = Binary(SAXPY).kernel("saxpy"), Binary(COUNTS)
x, y, z = (torch.ones(n, device="cuda") for _ in range(3))
torch.cuda.synchronize()

def launch(x, y, count=n):
    assert saxpy(4, 256, ctypes.c_float(2), x, y, ctypes.c_uint(count)) == 0

def count(name, x):
    assert totals.kernel(name)(4, 64, x) == 0
"""
REPORT = """
for race in simulation.races():
    print(race.first, race.second, race.is_possible, sep="|")
"""


def races(program: str) -> list[str]:
    done = python(START + textwrap.dedent(program) + REPORT, simulated_environment(gpus=1, races="report"))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


RACY = {
    "the kernel on a side stream writes what an op reads": (
        """
        with torch.cuda.stream(side):
            launch(x, y)
        y.sum()
        """,
        r"saxpy on stream 1 of cuda:0 writes it: .*|aten::sum on the default stream of cuda:0 reads it: .*|False",
    ),
    "an op writes what the kernel on a side stream reads": (
        """
        x.add_(1)
        with torch.cuda.stream(side):
            launch(x, y)
        """,
        r"aten::add_ on the default stream of cuda:0 writes it: .*|saxpy on stream 1 of cuda:0 reads it: .*|False",
    ),
    "two kernels write the last number alone": (
        """
        launch(x, y)
        with torch.cuda.stream(side):
            launch(x[n - 1:], y[n - 1:], 1)
        """,
        r"saxpy on the default stream of cuda:0 writes it: .*|saxpy on stream 1 of cuda:0 reads it: .*|False",
    ),
    "a replayed graph": (
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch(x, y)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            graph.replay()
        y.sum()
        """,
        r"saxpy on stream \d of cuda:0 writes it: .*|aten::sum on the default stream of cuda:0 reads it: .*|False",
    ),
    "the middle of a bulk copy": (
        """
        with torch.cuda.stream(side):
            count("bulk", x)
        x[30:31].add_(1)
        """,
        r"bulk on stream 1 of cuda:0 reads it: .*|aten::add_ on the default stream of cuda:0 writes it: .*|False",
    ),
    "atomic additions, and an op": (
        """
        with torch.cuda.stream(side):
            count("add", x)
        x.sum()
        """,
        r"add on stream 1 of cuda:0 writes it: .*|aten::sum on the default stream of cuda:0 reads it: .*|False",
    ),
    "a store, then atomic additions of its stream": (
        """
        with torch.cuda.stream(side):
            x.zero_()
            count("add", x)
        count("add", x)
        """,
        r"aten::zero_ on stream 1 of cuda:0 writes it: .*|add on the default stream of cuda:0 writes it: .*|False",
    ),
    "a read, then atomic additions of its stream": (
        """
        with torch.cuda.stream(side):
            x.sum()
            count("add", x)
        count("add", x)
        """,
        r"aten::sum on stream 1 of cuda:0 reads it: .*|add on the default stream of cuda:0 writes it: .*|False",
    ),
}


@pytest.mark.parametrize("name", RACY)
def test_the_wrong_stream_is_found(name: str) -> None:
    program, expected = RACY[name]
    lines = races(program)
    assert lines, "no race"
    patterns = expected.split("|")
    assert any(all(map(re.match, patterns, line.split("|"))) for line in lines), lines


SILENT = {
    "streams wait": """
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            launch(x, y)
        torch.cuda.current_stream().wait_stream(side)
        y.sum()
        """,
    "two kernels read the same": """
        launch(x, y)
        with torch.cuda.stream(side):
            launch(x, z)
            x.sum()
        """,
    "halves of one tensor": """
        launch(x[:500], y[:500], 500)
        with torch.cuda.stream(side):
            launch(x[500:], y[500:], 500)
        """,
    "columns of one matrix": """
        matrix = torch.zeros(64, 2, device="cuda")
        torch.cuda.synchronize()
        count("column", matrix)
        with torch.cuda.stream(side):
            count("column", matrix[:, 1:])
        """,
    "atomic additions on two streams": """
        count("add", x)
        with torch.cuda.stream(side):
            count("add", x)
        """,
    "memory that only kernels have used, freed and recorded": """
        for _ in range(20):
            y = torch.empty(n, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                launch(x, y)
            y.record_stream(side)
            del y
            z = torch.ones(n, device="cuda")
        """,
    "flags on two streams": """
        count("flag", x)
        with torch.cuda.stream(side):
            count("flag", x)
        """,
    "numbers beyond a bulk copy": """
        count("bulk", x)
        with torch.cuda.stream(side):
            x[64:].add_(1)
        """,
    "memory that is freed and recorded": """
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            launch(x, y)
        y.record_stream(side)
        del y
        torch.cuda.synchronize()
        y = torch.ones(n, device="cuda")
        """,
}


@pytest.mark.parametrize("name", SILENT)
def test_programs_without_a_race_report_nothing(name: str) -> None:
    assert races(SILENT[name]) == []


SPINNING = """
import faulthandler, threading, time

spin, host = Binary(SPIN).kernel("spin"), torch.zeros(n).pin_memory()

def run_spin(seconds):
    with torch.cuda.stream(side):
        assert spin(1, 1, ctypes.c_uint64(int(seconds * 1e9))) == 0

def start_spin():
    thread = threading.Thread(target=run_spin, args=(0.4,))
    thread.start()
    time.sleep(0.1)
    return thread

run_spin(0)
"""


def run_until_it_crashes(program: str, **options: object) -> str:
    """Return what a program prints before it accesses no memory, which faulthandler reports once."""
    program = START + SPINNING + textwrap.dedent(program) + "ctypes.string_at(1)"
    done = python(program, simulated_environment(gpus=1, **options), timeout=60)
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert done.stderr.count("Fatal Python error: Segmentation fault") == 1, done.stderr
    return done.stdout


@pytest.mark.slow
def test_race_detection_sets_its_handler_while_a_kernel_runs() -> None:
    program = """
        def copy_beside_spin():
            thread = start_spin()
            host.copy_(x, non_blocking=True)
            thread.join()

        faulthandler.enable()
        copy_beside_spin()
        host[0].item()
        print([race.second.partition(":")[0] for race in simulation.races()], flush=True)
        torch.cuda.synchronize()
        copy_beside_spin()
        torch.cuda.synchronize()
        """
    assert run_until_it_crashes(program, races="report") == "['the host reads byte 0 of it']\n"


@pytest.mark.slow
def test_a_program_sets_its_handler_while_a_kernel_runs() -> None:
    program = """
        faulthandler.disable()
        thread = start_spin()
        faulthandler.enable()
        thread.join()
        start_spin()
        """
    run_until_it_crashes(program)


@pytest.mark.parametrize(
    ("machine", "pending"),
    [
        pytest.param({"late_copies": True}, "nan 0", id="late"),
        pytest.param({"races": "report"}, "3.0 1", id="races", marks=pytest.mark.slow),
        pytest.param({"late_copies": True, "races": "report"}, "nan 1", id="both", marks=pytest.mark.slow),
    ],
)
def test_a_kernel_uses_the_target_of_a_copy_before_it(machine: dict[str, Any], pending: str) -> None:
    """The stream orders them, so the kernel reads and writes what was copied. The host has not waited."""
    program = """
host, source = torch.zeros(n).pin_memory(), torch.ones(n).pin_memory()
host.copy_(x, non_blocking=True)
launch(host, y)
launch(x, host)
z.copy_(source, non_blocking=True)
launch(x, source)
before = len(simulation.races())
print(before, host[0].item(), len(simulation.races()))
torch.cuda.synchronize()
print(y.tolist() == [3.0] * n, host.tolist() == [3.0] * n, source.tolist() == [3.0] * n)
"""
    done = python(START + program, simulated_environment(gpus=1, **machine))
    assert (done.returncode, done.stdout) == (0, f"0 {pending}\nTrue True True\n"), done.stderr
