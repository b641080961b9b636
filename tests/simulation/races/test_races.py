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


_NOTHING_ORDERS = ": nothing orders two accesses on two streams"
_FLOATS = "bytes of a float32 tensor of shape"
_WAIT = "call wait_stream() or wait_event() on {}, for {}, before the second access"
_DEFAULT, _SIDE = "the default stream of cuda:0", "stream N of cuda:0"
_REPLAYED = "cases.py:{captured} in _captured, in a graph that cases.py:{} in {name} launches"

# The whole reports of one case of each kind, without folders and the numbers of streams. "{first}" and "{second}" are lines.
TEXTS: dict[str, tuple[str, ...]] = {
    "same_tensor": (
        f"race: 4000 {_FLOATS} (1000,){_NOTHING_ORDERS}",
        f"aten::mul on {_SIDE} reads it: cases.py:{{first}} in {{name}}",
        f"aten::add_ on {_DEFAULT} writes it: cases.py:{{second}} in {{name}}",
        _WAIT.format(_DEFAULT, _SIDE),
    ),
    "view_and_base": (  # the tensor is that of the second access, the bytes are those of both
        f"race: 400 {_FLOATS} (1000,){_NOTHING_ORDERS}",
        f"aten::zero_ on {_SIDE} writes it: cases.py:{{first}} in {{name}}",
        f"aten::sum on {_DEFAULT} reads it: cases.py:{{second}} in {{name}}",
        _WAIT.format(_DEFAULT, _SIDE),
    ),
    "overlapping_columns": (
        f"race: 4000 {_FLOATS} (1000, 991){_NOTHING_ORDERS}",
        f"aten::zero_ on {_SIDE} writes it: cases.py:{{first}} in {{name}}",
        f"aten::add_ on {_DEFAULT} writes it: cases.py:{{second}} in {{name}}",
        _WAIT.format(_DEFAULT, _SIDE),
    ),
    "rows_of_a_column": (  # the second access ends within a hole of the first, and begins where it begins
        f"race: 40 {_FLOATS} (2, 10){_NOTHING_ORDERS}",
        f"aten::zero_ on {_SIDE} writes it: cases.py:{{first}} in {{name}}",
        f"aten::add_ on {_DEFAULT} writes it: cases.py:{{second}} in {{name}}",
        _WAIT.format(_DEFAULT, _SIDE),
    ),
    "permuted_parts": (  # x[:, 1:, 2], of 4 * 4 numbers
        f"race: 64 {_FLOATS} (4, 4, 2){_NOTHING_ORDERS}",
        f"aten::zero_ on {_SIDE} writes it: cases.py:{{first}} in {{name}}",
        f"aten::add_ on {_DEFAULT} writes it: cases.py:{{second}} in {{name}}",
        _WAIT.format(_DEFAULT, _SIDE),
    ),
    "windows": (  # many of them have the two numbers
        f"race: 8 {_FLOATS} (7, 4){_NOTHING_ORDERS}",
        f"aten::zero_ on {_SIDE} writes it: cases.py:{{first}} in {{name}}",
        f"aten::sum on {_DEFAULT} reads it: cases.py:{{second}} in {{name}}",
        _WAIT.format(_DEFAULT, _SIDE),
    ),
    "bytes_of_a_number": (
        f"race: 2 {_FLOATS} (2,){_NOTHING_ORDERS}",
        f"aten::zero_ on {_SIDE} writes it: cases.py:{{first}} in {{name}}",
        f"aten::add_ on {_DEFAULT} writes it: cases.py:{{second}} in {{name}}",
        _WAIT.format(_DEFAULT, _SIDE),
    ),
    "fill_of_a_part": (
        f"race: 4 {_FLOATS} (101,){_NOTHING_ORDERS}",
        f"cudaMemsetAsync on {_SIDE} writes it: cases.py:{{first}} in {{name}}",
        f"aten::sum on {_DEFAULT} reads it: cases.py:{{second}} in {{name}}",
        _WAIT.format(_DEFAULT, _SIDE),
    ),
    "fill_after_an_op": (  # of the second access only the bytes are known
        f"race: 400 bytes of 400 bytes of memory{_NOTHING_ORDERS}",
        f"aten::sum on {_SIDE} reads it: cases.py:{{first}} in {{name}}",
        f"cudaMemsetAsync on {_DEFAULT} writes it: cases.py:{{second}} in {{name}}",
        _WAIT.format(_DEFAULT, _SIDE),
    ),
    "columns_that_a_copy_reads": (
        f"race: 4 {_FLOATS} (6,){_NOTHING_ORDERS}",
        f"cudaMemcpyAsync on {_SIDE} reads it: cases.py:{{first}} in {{name}}",
        f"aten::zero_ on {_DEFAULT} writes it: cases.py:{{second}} in {{name}}",
        _WAIT.format(_DEFAULT, _SIDE),
    ),
    "columns_that_a_copy_writes": (
        f"race: 4 {_FLOATS} (11,){_NOTHING_ORDERS}",
        f"cudaMemcpyAsync on {_SIDE} writes it: cases.py:{{first}} in {{name}}",
        f"aten::sum on {_DEFAULT} reads it: cases.py:{{second}} in {{name}}",
        _WAIT.format(_DEFAULT, _SIDE),
    ),
    "blocking_stream_of_the_other_gpu": (
        f"race: 400 {_FLOATS} (1000,){_NOTHING_ORDERS}",
        "cudaMemcpyPeerAsync on stream N of cuda:1 reads it: cases.py:{first} in {name}",
        f"aten::add_ on {_DEFAULT} writes it: cases.py:{{second}} in {{name}}",
        _WAIT.format(_DEFAULT, "stream N of cuda:1"),
    ),
    "missing_record_stream": (
        f"race: 49380 {_FLOATS} (12345,){_NOTHING_ORDERS}",
        f"aten::sum on {_SIDE} reads it: cases.py:{{first}} in {{name}}",
        f"aten::fill_ on {_DEFAULT} writes it: cases.py:{{second}} in {{name}}",
        f"the memory was freed in between: call record_stream(stream) on the tensor of the first access, with {_SIDE}, before"
        " its last reference goes",
    ),
    "host_reads_too_early": (
        "race: 4000 bytes of pinned memory, a float32 tensor of shape (1000,): the host has not waited for a copy",
        f"aten::copy_ on {_DEFAULT} writes it: cases.py:{{first}} in {{name}}",
        "the host reads byte 0 of it: cases.py:{second} in {name}",
        "call synchronize() on that stream, or on an event recorded after the copy, before the host reads it",
    ),
    "host_reads_the_end_too_early": (
        "race: 400000 bytes of pinned memory, a float32 tensor of shape (100000,): the host has not waited for a copy",
        f"aten::copy_ on {_DEFAULT} writes it: cases.py:{{first}} in {{name}}",
        "the host reads byte 280004 of it: cases.py:{second} in {name}",
        "call synchronize() on that stream, or on an event recorded after the copy, before the host reads it",
    ),
    "host_writes_source": (
        "race: 4000 bytes of pinned memory, a float32 tensor of shape (1000,): the host has not waited for a copy",
        f"aten::copy_ on {_DEFAULT} reads it: cases.py:{{first}} in {{name}}",
        "the host writes byte 0 of it: cases.py:{second} in {name}",
        "call synchronize() on that stream, or on an event recorded after the copy, before the host writes it",
    ),
    "host_reads_a_number": (
        "race: 4 bytes of pinned memory, a float32 tensor of shape (): the host has not waited for a copy",
        f"aten::copy_ on {_DEFAULT} writes it: cases.py:{{first}} in {{name}}",
        "the host reads byte 0 of it: cases.py:{second} in {name}",
        "call synchronize() on that stream, or on an event recorded after the copy, before the host reads it",
    ),
    "host_reads_the_last_number": (
        "race: 2000 bytes of pinned memory, a float32 tensor of shape (500,): the host has not waited for a copy",
        f"aten::copy_ on {_DEFAULT} writes it: cases.py:{{first}} in {{name}}",
        "the host reads byte 1996 of it: cases.py:{second} in {name}",
        "call synchronize() on that stream, or on an event recorded after the copy, before the host reads it",
    ),
    "two_replays": (
        f"race: 4000 {_FLOATS} (1000,){_NOTHING_ORDERS}",
        f"aten::add_ on {_SIDE} writes it: {_REPLAYED.replace('{}', '{first}')}",
        f"aten::add_ on {_SIDE} writes it: {_REPLAYED.replace('{}', '{second}')}",
        _WAIT.format(_SIDE, _SIDE),
    ),
    "rows_of_table": (
        f"race: possible, depending on values: 2000 {_FLOATS} (50, 10){_NOTHING_ORDERS}",
        f"aten::index_select on {_SIDE} may read it: cases.py:{{first}} in {{name}}",
        f"aten::zero_ on {_DEFAULT} writes it: cases.py:{{second}} in {{name}}",
        _WAIT.format(_DEFAULT, _SIDE),
    ),
    "copy_between_gpus": (
        f"race: 4000 {_FLOATS} (1000,){_NOTHING_ORDERS}",
        f"aten::copy_ on {_DEFAULT} writes it: cases.py:{{first}} in {{name}}",
        "aten::sum on stream N of cuda:1 reads it: cases.py:{second} in {name}",
        _WAIT.format("stream N of cuda:1", _DEFAULT),
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
