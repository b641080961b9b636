"""Races are found with the two lines and the missing call; corrected programs are silent."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from tests import support
from tests.support import simulated_environment
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = needs_cuda_torch
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
