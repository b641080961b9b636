"""Fixtures for tests that call the simulated CUDA runtime without torch, and for those that run pytest."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from tests.support.pytest_suite import Suite
from tests.support.simulation_driver import loaded_runtime


@pytest.fixture(scope="session")
def runtime() -> ctypes.CDLL:
    return loaded_runtime()


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)
