"""Fails tests whose bodies have races."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest

from .. import _races

_WRONG_MARK = "allow_races takes a reason, as in allow_races('the values are not used')"


def begin_body() -> None:
    """Prepare for the body of a test: pairs of lines that an earlier test reported are reported again."""
    _synchronize()
    _races.begin_test()


def end_body(item: pytest.Item) -> str | None:
    """Return why the test must fail because of races in its body, or None.

    Waits for all devices, so that what the test left on their streams cannot race with the next test.
    """
    _synchronize()
    messages = [race.message for race in _races.races_of_test() if not race.is_possible]
    for mark in item.iter_markers("allow_races"):
        if mark.kwargs.keys() - {"reason"} or len(mark.args) + len(mark.kwargs) != 1:
            return _WRONG_MARK
        reason: Any = (*mark.args, *mark.kwargs.values())[0]
        if not isinstance(reason, str) or not reason:
            return _WRONG_MARK
        return None
    return "\n\n".join(messages) if messages else None


def _synchronize() -> None:
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork():
        return
    with contextlib.suppress(RuntimeError):  # the test has left a capture open, or a device in an error
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
