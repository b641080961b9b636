"""Fixtures for tests that call the simulated CUDA runtime without torch."""

from __future__ import annotations

import ctypes

import pytest

from tests.support.simulation_driver import loaded_runtime


@pytest.fixture(scope="session")
def runtime() -> ctypes.CDLL:
    return loaded_runtime()
