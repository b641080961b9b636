"""The fixture ``hostacc``: runs each program on another accelerator in a fork of one process."""

from __future__ import annotations

import pytest

from tests.backend import environment
from tests.backend.server import Server


@pytest.fixture(scope="session")
def hostacc() -> Server:
    return Server(environment())
