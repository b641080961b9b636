"""Prepares a process on GPUs that compute nothing."""

from __future__ import annotations

from .._compile.dynamo import hook_trace_rules
from .._compile.import_hook import after_import
from .._compile.refusal import guarded, refuse_graphs
from . import alone, host_memory, recorder

__all__ = ["install"]


def install() -> None:
    """Prepare this process. Imports and initializes nothing."""
    after_import("torch._dynamo.trace_rules", guarded(hook_trace_rules, refuse_graphs))
    host_memory.install()
    alone.install()
    recorder.install()
