"""Prepares a process on GPUs that compute nothing."""

from __future__ import annotations

from .._compile import dynamo
from . import alone, host_memory, recorder

__all__ = ["install"]


def install() -> None:
    """Prepare this process. Imports and initializes nothing."""
    dynamo.install()
    host_memory.install()
    alone.install()
    recorder.install()
