"""Races are found with the two lines and the missing call; corrected programs are silent."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest

from tests import support
from tests.support import simulated_environment
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [needs_cuda_torch, pytest.mark.xdist_group("races")]
cases: Any = pytest.importorskip("tests.simulation.races.cases", reason="needs torch", exc_type=ImportError)

_RUN = """
import torch, json, sys
from tests.simulation.races import cases
found = cases.run_all(json.loads(sys.argv[1]))
print("FOUND", json.dumps(found))
"""


def run_cases(names: list[str], **machine: Any) -> dict[str, list[dict[str, Any]]]:
    """Run programs in one process and return what was found in each."""
    environment = simulated_environment(gpus=2, races="report", **machine)
    done = support.python(_RUN, environment, json.dumps(names))
    assert done.returncode == 0, done.stderr
    found: dict[str, list[dict[str, Any]]] = json.loads(done.stdout.partition("FOUND ")[2])
    printed = [block for races in found.values() for race in races for block in [race["message"]]]
    assert all(block in done.stderr for block in printed)
    return found


@cache
def _found() -> dict[str, list[dict[str, Any]]]:
    return run_cases(list(cases.CASES))


def _check(name: str, found: list[dict[str, Any]]) -> None:
    case = cases.CASES[name]
    if not case.advice:
        assert found == []
        return
    assert len(found) == 1
    first, second = case.lines()
    for race in found:
        assert race["message"].startswith("race: ")
        assert f"cases.py:{first} in " in race["first"]
        assert f"cases.py:{second} in " in race["second"]
        assert case.advice in race["advice"]
        assert race["is_possible"] == case.is_possible


@pytest.mark.parametrize("name", cases.CASES)
def test_case(name: str) -> None:
    _check(name, _found()[name])


_FLOATS = "bytes of a float32 tensor of shape"
_WAIT = "call wait_stream() or wait_event() on {}, for {}, before the second access"
_DEFAULT, _SIDE = "the default stream of cuda:0", "stream N of cuda:0"
_REPLAYED = "cases.py:{captured} in _captured, in a graph that cases.py:{} in {name} launches"

_SECOND_GPU = "stream N of cuda:1"
_RECORD = (
    f"the memory was freed in between: call record_stream(stream) on the tensor of the first access, with {_SIDE}, before its"
    " last reference goes"
)


def _streams(what: str, first: str, second: str, *, on: str = _SIDE, then_on: str = _DEFAULT, advice: str = _WAIT) -> list[str]:
    """Return the report of accesses such as "aten::mul reads" on two streams."""
    place = "cases.py:{{{}}} in {{name}}"
    lines = [f"race: {what}: nothing orders two accesses on two streams"]
    for access, stream, line in ((first, on, "first"), (second, then_on, "second")):
        op, verb = access.split(" ", 1)
        lines.append(f"{op} on {stream} {verb} it: {place.format(line)}")
    return [*lines, advice.format(then_on, on)]


def _host(count: int, shape: str, copy: str, host: str, byte: int) -> list[str]:
    """Return the report of an access of the host to pinned memory that a copy still reads or writes."""
    return [
        f"race: {count} bytes of pinned memory, a float32 tensor of shape {shape}: the host has not waited for a copy",
        f"aten::copy_ on {_DEFAULT} {copy} it: cases.py:{{first}} in {{name}}",
        f"the host {host} byte {byte} of it: cases.py:{{second}} in {{name}}",
        f"call synchronize() on that stream, or on an event recorded after the copy, before the host {host} it",
    ]


# The whole reports of one case of each kind, without folders and the numbers of streams. "{first}" and "{second}" are lines.
TEXTS: dict[str, list[str]] = {
    "same_tensor": _streams(f"4000 {_FLOATS} (1000,)", "aten::mul reads", "aten::add_ writes"),
    # The tensor is that of the second access, the bytes are those of both.
    "view_and_base": _streams(f"400 {_FLOATS} (1000,)", "aten::zero_ writes", "aten::sum reads"),
    "overlapping_columns": _streams(f"4000 {_FLOATS} (1000, 991)", "aten::zero_ writes", "aten::add_ writes"),
    # The second access ends within a hole of the first, and begins where it begins.
    "rows_of_a_column": _streams(f"40 {_FLOATS} (2, 10)", "aten::zero_ writes", "aten::add_ writes"),
    "permuted_parts": _streams(f"64 {_FLOATS} (4, 4, 2)", "aten::zero_ writes", "aten::add_ writes"),  # x[:, 1:, 2]
    "windows": _streams(f"8 {_FLOATS} (7, 4)", "aten::zero_ writes", "aten::sum reads"),  # many of them have the two numbers
    "bytes_of_a_number": _streams(f"2 {_FLOATS} (2,)", "aten::zero_ writes", "aten::add_ writes"),
    "fill_of_a_part": _streams(f"4 {_FLOATS} (101,)", "cudaMemsetAsync writes", "aten::sum reads"),
    # Of the second access only the bytes are known.
    "fill_after_an_op": _streams("400 bytes of 400 bytes of memory", "aten::sum reads", "cudaMemsetAsync writes"),
    "columns_that_a_copy_reads": _streams(f"4 {_FLOATS} (6,)", "cudaMemcpyAsync reads", "aten::zero_ writes"),
    "columns_that_a_copy_writes": _streams(f"4 {_FLOATS} (11,)", "cudaMemcpyAsync writes", "aten::sum reads"),
    "blocking_stream_of_the_other_gpu": _streams(
        f"400 {_FLOATS} (1000,)", "cudaMemcpyPeerAsync reads", "aten::add_ writes", on=_SECOND_GPU
    ),
    "missing_record_stream": _streams(f"49380 {_FLOATS} (12345,)", "aten::sum reads", "aten::fill_ writes", advice=_RECORD),
    "host_reads_too_early": _host(4000, "(1000,)", "writes", "reads", 0),
    "host_reads_the_end_too_early": _host(400000, "(100000,)", "writes", "reads", 280004),
    "host_writes_source": _host(4000, "(1000,)", "reads", "writes", 0),
    "host_reads_a_number": _host(4, "()", "writes", "reads", 0),
    "host_reads_the_last_number": _host(2000, "(500,)", "writes", "reads", 1996),
    "two_replays": [
        f"race: 4000 {_FLOATS} (1000,): nothing orders two accesses on two streams",
        f"aten::add_ on {_SIDE} writes it: {_REPLAYED.replace('{}', '{first}')}",
        f"aten::add_ on {_SIDE} writes it: {_REPLAYED.replace('{}', '{second}')}",
        _WAIT.format(_SIDE, _SIDE),
    ],
    "rows_of_table": _streams(
        f"possible, depending on values: 2000 {_FLOATS} (50, 10)", "aten::index_select may read", "aten::zero_ writes"
    ),
    "copy_between_gpus": _streams(
        f"4000 {_FLOATS} (1000,)", "aten::copy_ writes", "aten::sum reads", on=_DEFAULT, then_on=_SECOND_GPU
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_report_word_by_word(name: str) -> None:
    [race] = _found()[name]
    (first, second), captured = cases.CASES[name].lines(), cases.captured_line()
    names = {"first": first, "second": second, "captured": captured, "name": name}
    expected = [line.format(**names) for line in TEXTS[name]]
    lines = [line.strip() for line in re.sub(r"\S+/(?=cases\.py)", "", race["message"]).splitlines()]
    lines = [re.sub(r"\bstream \d+ of", "stream N of", line) for line in lines]
    assert lines == expected
    assert [race[field].rpartition("/")[2] for field in ("first", "second")] == [
        line.rpartition("/")[2] for line in race["message"].splitlines()[1:3]
    ]
    assert race["advice"] == race["message"].splitlines()[3].strip()


@cache
def _found_without_computing() -> dict[str, list[dict[str, Any]]]:
    """Without computing, the kernel overrides in Python report the accesses, as without a C++ compiler."""
    return run_cases(list(cases.CASES), compute=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.CASES)
def test_case_without_computing(name: str) -> None:
    _check(name, _found_without_computing()[name])


@pytest.mark.slow
def test_every_race_is_found_each_time() -> None:
    racy = [name for name, case in cases.CASES.items() if case.advice]
    for _ in range(20):
        for name, found in run_cases(racy).items():
            _check(name, found)


def test_a_wait_of_the_seventeenth_stream_counts() -> None:
    """The clocks of streams are in an array, which moves when that stream waits for another one."""
    program = """
import ctypes, sys, torch
from accelerator import simulation
x, host = torch.ones(100, device="cuda"), torch.zeros(100).pin_memory()
for side in [torch.cuda.Stream() for _ in range(15)]:
    with torch.cuda.stream(side):
        torch.ones(1, device="cuda")
host.copy_(x, non_blocking=True)
with sys.modules["_accelerator_simulation._inside.ops.engine"].engine.accesses(b"aten::copy_") as recorded:
    recorded.order(0, 1)
torch.cuda.synchronize(1)
print(host.sum().item(), len(simulation.races()))
"""
    done = support.python(program, simulated_environment(gpus=2, races="report"))
    assert (done.stdout, done.stderr) == ("100.0 0\n", "")
