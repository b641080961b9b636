"""Which comparisons of a rehearsal have one answer for all values: a rehearsal knows it although it does not know the values.

All numbers are taken to be finite, so questions whether they are have an answer. Norms, and what is made of them, are not
negative, so their comparisons with zero or less may have one.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..ops import runtime
from ..ops.aliases import cpu_alias
from .known_values import KNOWN, NOT_NEGATIVE, UNKNOWN, state_of
from .unknown_numbers import is_decided_by_sign

_FINITE_CHECKS = frozenset(("isfinite", "isinf", "isnan", "isneginf", "isposinf"))

NEVER_NEGATIVE = frozenset(
    (
        *("linalg_vector_norm", "norm", "_foreach_norm", "linalg__powsum", "_foreach_powsum", "dist", "_cdist_forward", "abs"),
        *("sqrt", "square", "exp", "exp2", "sigmoid", "softmax", "_softmax", "relu", "std", "var", "mse_loss", "huber_loss"),
        "smooth_l1_loss",
    )
)
"""Ops whose results of floating point are never negative."""

KEEP_SIGN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("sum", "mean", "prod", "cumsum", "amax", "amin", "max", "min", "clone", "reciprocal"), ("self",)),
    **dict.fromkeys(("index_select", "gather", "repeat", "clamp_min"), ("self",)),
    **dict.fromkeys(("cat", "stack"), ("tensors",)),
    **dict.fromkeys(("mul", "div", "maximum", "minimum", "fmax", "fmin"), ("self", "other")),
    "add": ("self", "other", "alpha"),
    "clamp": ("self", "max"),
    "pow": ("self",),
    "where": ("self", "other"),
    "masked_fill": ("self", "value"),
}
"""Ops whose results are not negative if none of these arguments is. Ops in place have the same names without an underscore."""


def is_result_not_negative(short_name: str, arguments: dict[str, Any]) -> bool:
    """Return whether the result of an op of `KEEP_SIGN` is not negative: the arguments that decide it are not.

    Args:
        short_name: The op's name without its overload and the underscore of an op in place.
        arguments: The op's arguments by name.
    """
    deciding = [arguments.get(name) for name in KEEP_SIGN[short_name]]
    if short_name == "pow" and isinstance(arguments["exponent"], (int, float)) and arguments["exponent"] in (2, 4):
        return True
    if short_name in ("where", "masked_fill"):
        mask = arguments["condition" if short_name == "where" else "mask"]
        if state_of((mask,)) == KNOWN:
            selected, others = deciding if short_name == "where" else reversed(deciding)
            values = _on_host(mask)
            deciding = [*([selected] if bool(values.any()) else []), *([] if bool(values.all()) else [others])]
    return all(map(_is_not_negative, deciding))


def has_one_answer(short_name: str, args: tuple[Any, ...]) -> bool:
    """Return whether an op finds numbers that are not finite, or compares what is not negative with zero or less.

    Numbers that are not finite are found by an op of that name, or by a comparison with themselves or infinity.
    """
    if short_name in _FINITE_CHECKS:
        return True
    if len(args) != 2:
        return False
    first, second = args
    if short_name in ("eq", "ne") and (first is second or (isinstance(second, float) and math.isinf(second))):
        return True
    return is_decided_by_sign(short_name, second) and bool(first.is_floating_point()) and state_of((first,)) == NOT_NEGATIVE


def _is_not_negative(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_not_negative, value))
    if not isinstance(value, torch.Tensor):
        return value is None or (isinstance(value, (int, float)) and value >= 0)
    state = state_of((value,))
    if state != KNOWN:
        return state != UNKNOWN
    return not value.is_complex() and bool((_on_host(value) >= 0).all())


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose values are known as one that the host can read."""
    if not tensor.is_cuda:
        return tensor
    if runtime.streams_need_checks.value:
        runtime.wait_for_pending(tensor.device)
    return cpu_alias(tensor)
