"""The environment variables that decide which devices are visible, read in one call and cheap to compare."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing takes longer than all of this module
    from collections.abc import Iterable, Mapping
    from typing import Any

VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ACCELERATOR_BACKEND")

try:
    # os.environ encodes and decodes each variable, which takes longer than the rest of a cached query. The mapping that it
    # wraps does neither.
    _raw: Any = getattr(os.environ, "_data")  # noqa: B009, unknown to type checkers
    _keys: tuple[Any, ...] = tuple(os.environ.encodekey(name) for name in VARIABLES)
    if _raw.get(os.environ.encodekey("PATH")) != os.environ.encodevalue(os.environ["PATH"]):
        raise AttributeError
except (AttributeError, KeyError):
    _raw, _keys = os.environ, VARIABLES

_environ, _get = os.environ, _raw.get


def snapshot() -> list[Any]:
    """The values of ``VARIABLES``, to compare and for ``as_mapping``."""
    # One call in C: no other thread changes a variable between two reads. A test may have replaced os.environ. A list display
    # takes less time than tuple() and list().
    return [*map(_get, _keys)] if os.environ is _environ else [*map(os.environ.get, VARIABLES)]


def variables() -> dict[str, str]:
    """All variables of this process, for a child process."""
    # dict(os.environ) raises KeyError if another thread removes a variable meanwhile; list() takes the names at once.
    pairs = [(name, os.environ.get(name)) for name in list(os.environ)]
    return {name: value for name, value in pairs if value is not None}


def check(env: Mapping[str, object], names: Iterable[str] = VARIABLES) -> None:
    """Raise TypeError if a variable of an environment is not a string."""
    for name in names:
        value = env.get(name)
        if not (value is None or isinstance(value, str)):
            raise TypeError(f"The variable {name} must be a str, not {type(value).__name__} ({value!r})")


def as_mapping(values: list[Any]) -> dict[str, str]:
    """The variables that are set in a snapshot."""
    pairs = zip(VARIABLES, values, strict=True)
    return {name: os.fsdecode(value) for name, value in pairs if value is not None}
