"""Says why tests fail by races: those of their bodies, in this process and the ones that it starts."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest

from .. import _settings
from .._outside import found_races

# The native libraries read it, also in the processes that a test starts.
_TEST = _settings.variable("race_test")
_WRONG_MARK = "allow_races takes a reason, as in allow_races('the values are not used')"


@contextlib.contextmanager
def of_body(item: pytest.Item) -> Generator[Callable[[], str | None], None, None]:
    """Find the races of the body of a test and of the processes that it starts.

    Pairs of lines that an earlier test reported are reported again.

    Yields:
        A function that returns why the test must fail because of races, or None.
    """
    _synchronize()
    found_races.begin_test()
    file, test, before = _settings.read("race_file"), f"{os.getpid()}-{time.monotonic_ns()}", os.environ.get(_TEST)
    os.environ[_TEST] = test
    try:
        yield lambda: _problem(item, file, test)
    finally:
        os.environ.pop(_TEST, None)
        if before is not None:
            os.environ[_TEST] = before


def _problem(item: pytest.Item, file: str | None, test: str) -> str | None:
    # The next test must not race with what this one left on the streams.
    _synchronize()
    messages = [race.message for race in found_races.races_of_test() if not race.is_possible]
    messages += [message for message in _reports(file, test) if message not in messages]
    for mark in item.iter_markers("allow_races"):
        if mark.kwargs.keys() - {"reason"} or len(mark.args) + len(mark.kwargs) != 1:
            return _WRONG_MARK
        reason: Any = (*mark.args, *mark.kwargs.values())[0]
        if not isinstance(reason, str) or not reason:
            return _WRONG_MARK
        return None
    return "\n\n".join(dict.fromkeys(messages)) or None


def _reports(file: str | None, test: str) -> list[str]:
    """Return what the processes of a test have written to the file of the run, if it has one."""
    if file is None or not os.path.exists(file):
        return []
    with open(file, encoding="utf-8", errors="surrogateescape") as stored:
        entries = (entry.partition("\n") for entry in stored.read().split("\0"))
        return [report.rstrip("\n") for of_test, _, report in entries if of_test == test]


def _synchronize() -> None:
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork():
        return
    with contextlib.suppress(RuntimeError):  # the test has left a capture open, or a device in an error
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
