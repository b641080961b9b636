"""Every function that takes a device argument acts on that device, whichever is current, and without one on the current one."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from tests import support
from tests.support import simulated_environment
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [needs_cuda_torch, pytest.mark.xdist_group("other_device")]
other_device: Any = pytest.importorskip("tests.runtime.other_device", reason="needs torch", exc_type=ImportError)

# Their results name the accelerator and no device.
WITHOUT_INDEX = ("device", "device_name")


@cache
def _results() -> dict[str, Any]:
    done = support.module("tests.runtime.other_device", simulated_environment(**other_device.MACHINE))
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)
    return results


@pytest.mark.parametrize("name", other_device.CALLS)
def test_function_acts_on_its_device(name: str) -> None:
    first, second = _results()[name]
    assert first[:2] == second[:2]
    assert first[0] != first[1], "the devices do not differ: the test would notice nothing"
    if len(first) == 3 and name not in WITHOUT_INDEX:
        assert [first[2], second[2]] == first[:2]


@pytest.mark.parametrize("name", other_device.WAITING)
def test_function_waits_for_its_device(name: str) -> None:
    assert _results()[name] == [False, True]
