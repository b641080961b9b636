"""Prepares a process on GPUs that compute nothing."""

from __future__ import annotations

from ... import _settings
from .. import ops
from ..compiled import dynamo, library_ops, other_runtimes
from . import (
    collectives,
    compiled_code,
    copies,
    cpu_fills,
    distributions,
    host_reads,
    host_values,
    memory_growth,
    new_memory,
    overrides,
    recorder,
    with_peers,
    without_peers,
)


def install() -> None:
    """Replace torch's kernels, and prepare this process. Imports and initializes nothing."""
    host_reads.install()
    host_values.install()
    new_memory.zero_memory_of_compiled_code()
    extensions = (memory_growth.watched,) if _settings.read("rehearse") else ()
    ops.install(ops.Overrides(overrides.rehearsal_override, copies.copy_override, new_memory.empty_overrides(), extensions))
    library_ops.install(overrides.override_library_op)
    other_runtimes.install()
    dynamo.install()
    compiled_code.install()
    cpu_fills.install()
    distributions.install()
    collectives.install()
    if _settings.read("without_peers") == "1":
        without_peers.install()
    else:
        with_peers.install()
    recorder.install()
