"""The fixture ``hostacc``: a process that forks a child for each program on another accelerator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backend import environment
from tests.backend.server import Server


@pytest.fixture(scope="session")
def hostacc() -> Iterator[Server]:
    server = Server(environment())
    yield server
    server.close()
