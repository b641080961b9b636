"""Every test has a time limit, in every run of the suite: a program or collective that hangs fails its test."""

from __future__ import annotations

import signal
import sys

import pytest

pytestmark = [
    pytest.mark.torch_free,
    pytest.mark.skipif(sys.platform == "win32", reason="needs: the timers of POSIX"),
]


@pytest.mark.parametrize(
    "seconds",
    [300, pytest.param(900, marks=pytest.mark.slow), pytest.param(3600, marks=[pytest.mark.slow, pytest.mark.exhaustive])],
)
def test_the_timer_of_this_test_runs(seconds: int) -> None:
    assert seconds - 60 < signal.getitimer(signal.ITIMER_REAL)[0] <= seconds
