"""Hooks Dynamo: it does not trace the code of the simulation."""

from __future__ import annotations

from types import ModuleType

__all__ = ["hook_trace_rules"]


def hook_trace_rules(trace_rules: ModuleType) -> None:
    """Let Dynamo skip the code of the simulation, which the dispatcher calls while the program's code runs."""
    package = __name__.split(".")[0]
    for name in ("_kernels", "_compile", "_rehearsal"):
        trace_rules.add(f"{package}.{name}")
