"""Every function that takes a device argument acts on that device, whichever is current, and without one on the current one."""

from __future__ import annotations

import inspect
import json
from functools import cache
from typing import Any

import pytest

from tests import support
from tests.support import simulated_environment
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [needs_cuda_torch, pytest.mark.xdist_group("other_device")]
other_device: Any = pytest.importorskip("tests.runtime.other_device", reason="needs torch", exc_type=ImportError)

# Their device is always the CPU.
OF_THE_CPU = {"pin_empty", "pin_empty_like"}
# Their results name the accelerator and no device.
WITHOUT_INDEX = ("device", "device_name")


@cache
def _results() -> dict[str, Any]:
    done = support.module("tests.runtime.other_device", simulated_environment(**other_device.MACHINE))
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)
    return results


def test_every_function_of_a_device_is_tested() -> None:
    import accelerator as acc

    words = {"device", "devices", "device_index", "peer_device"}
    functions = {name: value for name, value in inspect.getmembers(acc) if inspect.isfunction(value)}
    of_a_device = {name for name, function in functions.items() if words & inspect.signature(function).parameters.keys()}
    tested = {name.partition(",")[0] for name in (*other_device.CALLS, *other_device.WAITING)}
    assert of_a_device - OF_THE_CPU <= tested


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
