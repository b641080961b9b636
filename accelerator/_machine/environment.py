"""The environment variables that decide which devices are visible, read at once and cheap to compare."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing takes longer than all of this module
    from typing import Any

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ACCELERATOR_BACKEND",
)

try:
    # The mapping below os.environ saves an encoding and a decoding per variable, which take longer than the rest of a cached
    # query.
    _raw: Any = getattr(os.environ, "_data")  # noqa: B009, unknown to type checkers
    _keys: tuple[Any, ...] = tuple(os.environ.encodekey(name) for name in VARIABLES)
    if _raw.get(os.environ.encodekey("PATH")) != os.environ.encodevalue(os.environ["PATH"]):
        raise AttributeError
except (AttributeError, KeyError):
    _raw, _keys = os.environ, VARIABLES

_get = _raw.get


def snapshot() -> tuple[Any, ...]:
    """The values of ``VARIABLES``, to compare and for ``as_mapping``."""
    # One call in C: no other thread changes a variable between two reads.
    return tuple(map(_get, _keys))


def as_mapping(values: tuple[Any, ...]) -> dict[str, str]:
    """The variables that are set in a snapshot."""
    decode: Any = str if _raw is os.environ else os.environ.decodevalue
    return {name: decode(value) for name, value in zip(VARIABLES, values, strict=True) if value is not None}
