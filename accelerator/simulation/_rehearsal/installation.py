"""Prepares a process on GPUs that compute nothing."""

from __future__ import annotations

from .. import _settings
from .._compile import dynamo
from . import cpu_fills, recorder, with_peers, without_peers

__all__ = ["install"]


def install() -> None:
    """Prepare this process. Imports and initializes nothing."""
    dynamo.install()
    cpu_fills.install()
    if _settings.read("without_peers") == "1":
        without_peers.install()
    else:
        with_peers.install()
    recorder.install()
