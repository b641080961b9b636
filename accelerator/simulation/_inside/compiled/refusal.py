"""What happens if a hook does not fit the installed torch or Triton: the feature is refused when a program uses it.

A hook runs inside the program's import of a module. An error there would break the import, and with it programs that do not use
the feature: ``torch.optim`` imports Dynamo, and Dynamo imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

_Refuse = Callable[[ModuleType, str], None]

graph_problems: list[str] = []
"""Why graphs of simulated GPUs cannot be compiled in this process."""


def guarded(hook: Callable[[ModuleType], None], refuse: _Refuse) -> Callable[[ModuleType], None]:
    """Return a hook that refuses its feature if it fails."""

    def apply(module: ModuleType) -> None:
        try:
            hook(module)
        except Exception as error:
            refuse(module, f"not simulated with this {module.__name__}: {type(error).__name__}: {error}")

    return apply


def refuse_calls(*paths: str) -> _Refuse:
    """Return a function that lets functions of a module raise, if they exist: ``name`` or ``Class.name``."""

    def refuse(module: ModuleType, problem: str) -> None:
        for path in paths:
            owner_name, _, name = path.rpartition(".")
            owner: Any = getattr(module, owner_name, None) if owner_name else module
            if owner is not None and hasattr(owner, name):
                setattr(owner, name, _raising(f"{path} is {problem}"))

    return refuse


def refuse_functions(module: ModuleType, problem: str) -> None:
    """Let all public functions that a module defines raise."""
    for name, value in list(vars(module).items()):
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == module.__name__:
            setattr(module, name, _raising(f"{name} is {problem}"))


def refuse_graphs(module: ModuleType, problem: str) -> None:
    """Let torch.compile's default backend raise for graphs that use a GPU."""
    graph_problems.append(f"compiled code is {problem}")


def _raising(message: str) -> Callable[..., Any]:
    def raise_not_simulated(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(message)

    return raise_not_simulated
