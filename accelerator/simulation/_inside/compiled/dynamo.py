"""Hooks Dynamo: it does not trace the code of the simulation."""

from __future__ import annotations

from types import ModuleType

from ..import_hook import after_import
from .refusal import guarded, refuse_graphs


def install() -> None:
    """Hook Dynamo when the program imports it. Imports nothing."""
    after_import("torch._dynamo.trace_rules", guarded(hook_trace_rules, refuse_graphs))


def hook_trace_rules(trace_rules: ModuleType) -> None:
    """Let Dynamo skip the code of the simulation, which the dispatcher calls while the program's code runs."""
    trace_rules.add(__name__.rpartition(".compiled.")[0])
