"""What a function of a vendor's module takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def takes(function: Callable[..., Any], parameter: str) -> bool:
    """Return whether a function has a parameter of this name; False for functions in C, whose parameters are unknown."""
    try:
        return parameter in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
