"""Collection depends on the commit only, skips on simulated GPUs are failures, and the scheduler reads every group."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import forbid_skip, read_group
from tests.support import ROOT, run, simulated_environment
from tests.support.discovery import on_simulated_gpus

# Collects the tests in forked children with different clocks and numbers of processors.
COLLECT = """
import contextlib, datetime, io, os, sys, time
import pytest, torch

def collect(days, processors):
    date, now, clock = datetime.date, datetime.datetime, time.time
    shift = datetime.timedelta(days=days)
    class Date(date):
        today = classmethod(lambda cls: date.today() + shift)
    class DateTime(now):
        now = classmethod(lambda cls, zone=None: now.now(zone) + shift)
        today = classmethod(lambda cls: now.today() + shift)
    datetime.date, datetime.datetime = Date, DateTime
    time.time = lambda: clock() + shift.total_seconds()
    time.time_ns = lambda: int(time.time() * 1e9)
    os.cpu_count = lambda: processors
    os.sched_getaffinity = lambda pid: set(range(processors))
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        status = pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]])
    assert status == 0, output.getvalue()[-3000:]
    return [line for line in output.getvalue().splitlines() if "::" in line]

for days, processors in (0, 2), (1, 2), (2, 2), (200, 64):
    sys.stdout.flush()
    child = os.fork()
    if not child:
        print(*collect(days, processors), sep="\\n")
        print("END", flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


def collect(path: Path, **variables: str) -> list[list[str]]:
    """Return the tests that pytest collects in each of the four children."""
    output = run(COLLECT, simulated_environment(variables, gpus=2), str(path), timeout=400)
    return [part.split("\n")[:-1] for part in output.replace("\nEND\n", "\n\0").split("\0")[:-1]]


@pytest.mark.slow
@on_simulated_gpus
def test_collected_tests_do_not_depend_on_date_or_machine() -> None:
    first, *others = collect(ROOT / "tests")
    assert len(first) > 1000
    assert [other == first for other in others] == [True] * 3


@pytest.mark.slow
@on_simulated_gpus
def test_date_dependent_tests_are_detected(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(
        "import datetime, pytest\n"
        "@pytest.mark.parametrize('day', [datetime.date.today().toordinal()])\n"
        "def test_it(day): pass\n"
    )
    lists = collect(tmp_path)
    assert len({tuple(tests) for tests in lists}) == len(lists) == 4


@pytest.mark.parametrize(
    ("file", "reason", "ci", "outcome"),
    [
        ("test_it_simulated.py", "torch 2.6 has no such op", "1", "skipped"),
        ("test_it_simulated.py", "no such op", "", "failed"),
        ("test_it_simulated.py", "could not import 'triton'", "1", "failed"),
        ("test_it_simulated.py", "needs: python -m accelerator simulate", "", "skipped"),
        ("test_it_simulated.py", "needs: python -m accelerator simulate", "1", "failed"),
        ("test_it.py", "no such op", "1", "skipped"),
    ],
)
def test_skips_on_simulated_gpus_are_failures(
    file: str, reason: str, ci: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", ci)
    report = pytest.TestReport(f"{file}::test", (file, 1, "test"), {}, "skipped", (file, 1, f"Skipped: {reason}"), "call")
    assert forbid_skip(report, Path(file)).outcome == outcome


def test_the_scheduler_reads_every_group() -> None:
    files = [file for file in sorted((ROOT / "tests").rglob("test_*.py")) if file != Path(__file__)]
    declared = {file.name for file in files if re.search(r"\bxdist_group\b", file.read_text(encoding="utf-8"))}
    assert declared
    assert {file.name for file in files if read_group(file)} == declared
