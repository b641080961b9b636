"""Hooks Dynamo: it neither traces the code of the simulation nor compiles Triton kernels that the interpreter runs."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

__all__ = ["hook_builder", "hook_trace_rules"]


def hook_trace_rules(trace_rules: ModuleType) -> None:
    """Let Dynamo skip the code of the simulation, which the dispatcher calls while the program's code runs."""
    package = __name__.split(".")[0]
    for name in ("_kernels", "_compile"):
        trace_rules.add(f"{package}.{name}")


def hook_builder(builder: ModuleType) -> None:
    """Let Dynamo treat an autotuned kernel as a user-defined object, because it would compile the kernel's code otherwise."""
    variable_builder: Any = builder.VariableBuilder
    original = variable_builder._wrap

    def wrap(self: Any, value: Any) -> Any:
        autotuner = sys.modules.get("triton.runtime.autotuner")
        if autotuner is not None and isinstance(value, autotuner.Autotuner):
            return self.wrap_user_defined(value)
        return original(self, value)

    variable_builder._wrap = wrap
