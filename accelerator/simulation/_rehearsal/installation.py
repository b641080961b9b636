"""Prepares a process on GPUs that compute nothing."""

from __future__ import annotations

from .._compile import dynamo
from . import cpu_fills, recorder, without_peers

__all__ = ["install"]


def install() -> None:
    """Prepare this process. Imports and initializes nothing."""
    dynamo.install()
    cpu_fills.install()
    without_peers.install()
    recorder.install()
