"""Prepares a process on GPUs that compute nothing."""

from __future__ import annotations

from . import alone, host_memory, recorder

__all__ = ["install"]


def install() -> None:
    """Prepare this process. Imports and initializes nothing."""
    host_memory.install()
    alone.install()
    recorder.install()
