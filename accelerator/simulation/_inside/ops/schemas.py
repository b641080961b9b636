"""Names of ops as the dispatcher has them ("aten::add.Tensor"), their schemas, and the arguments of calls by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import bindings


def split(name: str) -> tuple[str, str]:
    """Return the name of an op without its overload, and the overload, which may be empty."""
    base, _, overload = name.partition(".")
    return base, overload


def short_name(name: str) -> str:
    """Return the name of an op without namespace and overload."""
    return split(name)[0].partition("::")[2]


@functools.cache
def schema_of(name: str) -> Any:
    """Return the schema of an op."""
    return bindings.get_schema(*split(name))


def operator_of(name: str) -> Any:
    """Return the object of an op, one overload, in ``torch.ops``."""
    base, overload = split(name)
    return getattr(functools.reduce(getattr, base.split("::"), torch.ops), overload or "default")


def bind(names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def binder(name: str) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]:
    """Return a function that returns the arguments of an op's calls by name."""
    names = [argument.name for argument in schema_of(name).arguments]
    return lambda args, kwargs: bind(names, args, kwargs)
