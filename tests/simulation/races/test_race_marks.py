"""``pytest --simulate-races`` and the marks ``allow_races`` and ``simulated_machine(races=...)``."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accelerator.simulation import Race
from accelerator.simulation._pytest import race_failures
from tests.simulation.races.test_race_options import RACE
from tests.support import simulated_environment
from tests.support.discovery import on_simulated_gpus
from tests.support.pytest_suite import Suite
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [on_simulated_gpus, needs_cuda_torch]

_BODIES = """
    import os
    import pytest
    {preamble}

    def race(lines=2):
        import torch
        side = torch.cuda.Stream()
        x = torch.ones(1000, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            x * 2
        if lines == 1:
            torch.cuda.current_stream().wait_stream(side)
        x.add_(1)

    def test_first():
        race()

    def test_same_lines():
        race()

    @pytest.mark.allow_races("the values are not used")
    def test_allowed():
        race()

    @pytest.mark.allow_races(reason="the values are not used")
    def test_allowed_by_keyword():
        race()

    @pytest.mark.allow_races
    def test_wrong_mark():
        race(1)

    allow = pytest.mark.allow_races
    WRONG = allow(""), allow(1), allow("a", "b"), allow("a", reason="b"), allow(why="a")

    @pytest.mark.parametrize("number", [pytest.param(i, marks=mark) for i, mark in enumerate(WRONG)])
    def test_wrong_marks(number):
        race(1)

    def test_two_races():
        race()
        race()
        import torch
        x, side = torch.ones(2000, device="cuda"), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            x.sum()
        x.add_(1)

    def test_possible_race():
        import torch
        table, rows, side = torch.ones(100, 10, device="cuda"), torch.arange(5, device="cuda"), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            table.index_select(0, rows)
        table[50:].zero_()

    @pytest.fixture
    def racy():
        race()
        yield
        race()

    def test_fixture(racy):
        pass

    def test_process():
        # What a process that the body starts writes, and one of another test.
        file, test = (os.environ.get(f"ACCELERATOR_SIM_RACE_{{name}}") for name in ("FILE", "TEST"))
        if file:
            with open(file, "a") as stored:
                stored.write(f"another\\nrace: not of this test\\n\\0{{test}}\\nrace: of a process\\n\\0")

    def test_ordered():
        race(1)

    def test_that_fails_of_its_own():
        race()
        raise ValueError("an error of its own")

    def test_left_for_the_next_test():
        import torch
        race.kept = [torch.ones(10, device=f"cuda:{{index}}") for index in range(2)]
        for index, kept in enumerate(race.kept):
            torch.cuda.synchronize(index)
            with torch.cuda.stream(torch.cuda.Stream(index)):
                kept.add_(1)

    def test_next():
        for kept in getattr(race, "kept", []):
            kept.add_(1)
"""

_CHILDREN = """
    import subprocess
    import sys

    import pytest
    {preamble}

    def test_child():
        subprocess.run([sys.executable, "-c", {program!r}], check=True)

    def test_next():
        pass
"""


def _failure(output: str, name: str) -> str:
    match = re.search(rf"_+ {name} _+\n(?:\[gw[^\n]*\n)?(.*?)\n[-_=]{{3,}}", output, re.DOTALL)
    assert match, output
    return match[1]


def _check(output: str) -> None:
    assert "race: 4000 bytes of a float32 tensor of shape (1000,): nothing orders two accesses on two streams" in output
    assert "call wait_stream() or wait_event() on the default stream of cuda:0" in output
    assert output.count("\nallow_races takes a reason, as in allow_races('the values are not used')\n") == 6
    assert _failure(output, "test_same_lines").count("race: ") == 1  # reported again, once
    assert re.findall("race: [0-9]+", _failure(output, "test_two_races")) == ["race: 4000", "race: 8000"]
    assert _failure(output, "test_process") == "race: of a process"
    assert "FAILED test_it.py::test_that_fails_of_its_own - ValueError: an error of its own" in output


@pytest.mark.parametrize("workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)], ids=["alone", "xdist"])
def test_a_whole_session(suite: Suite, workers: tuple[str, ...]) -> None:
    suite.write(_BODIES.format(preamble=""))
    done = suite.check({"failed": 11, "passed": 7}, "--simulate-gpus=2", "--simulate-races", *workers)
    assert done.returncode == 1
    _check(done.stdout)


@pytest.mark.slow
def test_machines_of_tests(suite: Suite) -> None:
    suite.write(_BODIES.format(preamble="pytestmark = pytest.mark.simulated_machine(gpus=2, races='report')"))
    done = suite.check({"failed": 11, "passed": 7})
    _check(done.stdout)


@pytest.mark.slow
def test_without_the_option_races_pass(suite: Suite) -> None:
    suite.write(_BODIES.format(preamble=""))
    suite.check({"failed": 1, "passed": 17}, "--simulate-gpus=2", "--strict-markers")


_OWN_MACHINES = """
    import pytest

    @pytest.mark.simulated_machine(1)
    def test_of_the_session():
        exec({race!r})

    @pytest.mark.simulated_machine(1, races=None)
    def test_without():
        exec({race!r})

    @pytest.mark.simulated_machine(1, races="raise")
    def test_of_its_own():
        exec({race!r})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "runner",
    [
        pytest.param(["--simulate-gpus=1", "--simulate-races"], id="options"),
        pytest.param(["-o", "simulate_races=true"], id="configuration"),
    ],
)
def test_machines_of_tests_find_races_if_the_session_does(suite: Suite, runner: list[str]) -> None:
    suite.write(_OWN_MACHINES.format(race=RACE))
    done = suite.check({"failed": 2, "passed": 1}, *runner)
    assert "race: 4000 bytes" in _failure(done.stdout, "test_of_the_session")
    assert "RuntimeError: race: 4000 bytes" in _failure(done.stdout, "test_of_its_own")


@pytest.mark.slow
def test_machines_of_tests_find_races_if_the_command_does(suite: Suite) -> None:
    suite.write(_OWN_MACHINES.format(race=RACE))
    suite.check({"failed": 2, "passed": 1}, **simulated_environment(gpus=1, races="report"))


def test_the_option_needs_gpus(suite: Suite) -> None:
    done = suite.run("--simulate-races")
    assert "--simulate-races needs --simulate-gpus" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preamble", "options"),
    [
        ("", ("--simulate-gpus=1", "--simulate-races")),
        ("pytestmark = pytest.mark.simulated_machine(races='report')", ()),
    ],
    ids=["session", "machines"],
)
def test_processes_that_a_body_starts(suite: Suite, preamble: str, options: tuple[str, ...]) -> None:
    suite.write(_CHILDREN.format(preamble=preamble, program=RACE))
    done = suite.check({"failed": 1, "passed": 1}, *options)
    failure = done.stdout.partition("test_child")[2].partition("Captured")[0]
    assert "race: 4000 bytes of a float32 tensor of shape (1000,)" in failure
    assert "aten::add_ on the default stream of cuda:0 writes it: <string>:" in failure


WRONG = "allow_races takes a reason, as in allow_races('the values are not used')"
FOUND = "race: of this process\n  its lines\n\nrace: of a child"


@pytest.mark.parametrize(
    ("marks", "problem"),
    [
        ([], FOUND),
        ([pytest.mark.allow_races("a reason")], None),
        ([pytest.mark.allow_races(reason="a reason")], None),
        ([pytest.mark.allow_races], WRONG),
        ([pytest.mark.allow_races("")], WRONG),
        ([pytest.mark.allow_races(3)], WRONG),
        ([pytest.mark.allow_races("a", "b")], WRONG),
        ([pytest.mark.allow_races("a", reason="b")], WRONG),
        ([pytest.mark.allow_races(why="a reason")], WRONG),
    ],
)
def test_what_fails_a_test(marks: list[Any], problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Races of other tests do not, nor those that depend on values, and one that both sides report counts once."""
    own = FOUND.partition("\n\n")[0]
    races = [Race(own, "", "", "", False), Race("race: possible", "", "", "", True), Race(own, "", "", "", False)]
    monkeypatch.setattr(race_failures.found_races, "races_of_test", lambda: races)
    monkeypatch.setattr(race_failures, "_synchronize", lambda: None)
    file = tmp_path / "races"
    item: Any = SimpleNamespace(iter_markers=lambda name: [mark.mark for mark in marks if name == "allow_races"])
    assert race_failures._problem(item, str(file), "5-6") == (own if problem == FOUND else problem)
    file.write_text(f"5-6\n{own}\n\x005-67\nrace: of another test\n\x005-6\nrace: of a child\n\0")
    assert race_failures._problem(item, str(file), "5-6") == problem
