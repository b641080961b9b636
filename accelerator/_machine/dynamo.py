"""Marks for ``torch.compile`` on functions that it cannot trace; needs no torch."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import ParamSpec, TypeVar

    _P = ParamSpec("_P")
    _R = TypeVar("_R")


def assume_constant(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have ``torch.compile`` call the function while it traces, and use the result as a constant of the graph."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
    return function
