"""Prepares a process on GPUs that compute nothing."""

from __future__ import annotations

from ... import _settings
from ..compiled import dynamo, library_ops, other_runtimes
from . import collectives, cpu_fills, distributions, recorder, with_peers, without_peers
from .overrides import override_library_op

__all__ = ["install"]


def install() -> None:
    """Prepare this process. Imports and initializes nothing."""
    library_ops.install(override_library_op)
    other_runtimes.install()
    dynamo.install()
    cpu_fills.install()
    distributions.install()
    collectives.install()
    if _settings.read("without_peers") == "1":
        without_peers.install()
    else:
        with_peers.install()
    recorder.install()
