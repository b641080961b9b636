"""What tests of the simulation share that call it below torch."""

from __future__ import annotations

import ctypes

import pytest

from tests.support.simulation_driver import loaded_runtime


@pytest.fixture(scope="session")
def runtime() -> ctypes.CDLL:
    return loaded_runtime()
