"""Numbers whose values are not known: subclasses of float and int.

They are noted once they are compared, rounded to an integer or used as a condition, but not if they are printed or added up.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from typing import Any

from .missing_values import note

# ---- Reads by the host. ----


class _UnknownNumber:
    """What the subclasses of float and int have in common: they remember that their value is not known."""

    is_not_negative = False

    def __reduce__(self) -> Any:
        plain: Any = type(self).__mro__[2]
        return plain, (plain(self),)


def _is_finite_check(first: Any, second: Any) -> bool:
    return first is second or (isinstance(second, float) and math.isinf(second))


_KEEP_SIGN = ("add", "radd", "mul", "rmul", "truediv", "rtruediv", "pos")
_DECIDED_BY_SIGN: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("lt", "ge"), lambda other: other <= 0),
    **dict.fromkeys(("le", "gt", "eq", "ne"), lambda other: other < 0),
}


def is_decided_by_sign(comparison: str, other: Any) -> bool:
    """Return whether all numbers that are not negative give one answer in a comparison, such as ``lt``, with a number."""
    decides = _DECIDED_BY_SIGN.get(comparison)
    return decides is not None and type(other) in (int, float) and decides(other)


def _is_result_not_negative(operator: str, self: Any, others: tuple[Any, ...]) -> bool:
    if operator == "abs":
        return True
    if operator == "pow":
        numbers: tuple[Any, ...] = (self,)
    elif operator == "rpow":
        numbers = others[:1]
    else:
        numbers = (self, *others) if operator in _KEEP_SIGN else ()
    return bool(numbers) and all(n.is_not_negative if isinstance(n, _UnknownNumber) else n >= 0 for n in numbers)


def _unknown_number(plain: type) -> type:
    """Return a subclass of float or int whose arithmetic gives such numbers, and whose comparisons are noted."""

    def arithmetic(name: str) -> Callable[..., Any]:
        compute = getattr(plain, name)

        def run(self: Any, *others: Any) -> Any:
            result = compute(self, *others)
            if result is NotImplemented:
                return result
            return unknown(result, _is_result_not_negative(name.strip("_"), self, others))

        return run

    def comparison(name: str) -> Callable[..., Any]:
        compare = getattr(plain, name)

        def run(self: Any, other: Any) -> Any:
            result = compare(self, other)
            has_one_answer = _is_finite_check(self, other) or (
                self.is_not_negative and is_decided_by_sign(name.strip("_"), other)
            )
            if result is not NotImplemented and not has_one_answer:
                note("aten::item")
            return result

        return run

    def conversion(name: str) -> Callable[..., Any]:
        convert = getattr(plain, name)

        def run(self: Any, *digits: Any) -> Any:
            if digits and digits[0] is not None:
                return unknown(convert(self, *digits))  # round(x, 2) is a float
            note("aten::item")
            return convert(self)

        return run

    operators = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod")
    names = [f"__{prefix}{operator}__" for operator in operators for prefix in ("", "r")]
    methods: dict[str, Any] = {name: arithmetic(name) for name in (*names, "__neg__", "__pos__", "__abs__")}
    methods |= {f"__{name}__": comparison(f"__{name}__") for name in ("lt", "le", "gt", "ge", "eq", "ne")}
    methods |= {f"__{name}__": conversion(f"__{name}__") for name in ("bool", "int", "trunc", "round", "floor", "ceil", "index")
                if hasattr(plain, f"__{name}__")}  # fmt: skip
    methods["__hash__"] = plain.__hash__
    return type(f"Unknown{plain.__name__.title()}", (_UnknownNumber, plain), methods)


_UnknownFloat, _UnknownInt = _unknown_number(float), _unknown_number(int)


def unknown(value: Any, is_not_negative: bool = False) -> Any:
    """Return a number, or a list of them, that remembers that its value is not known."""
    kind = type(value)
    if kind is float or kind is int:
        number: Any = (_UnknownFloat if kind is float else _UnknownInt)(value)
        if is_not_negative:
            number.is_not_negative = True
        return number
    return kind(unknown(item, is_not_negative) for item in value) if kind in (list, tuple) else value


class ObjectPickler(pickle.Pickler):
    """Pickles what ranks of a rehearsal send each other: numbers that are not known stay so. Other pickles make plain ones."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, _UnknownNumber):
            return NotImplemented
        plain: Any = type(obj).__mro__[2]
        return unknown, (plain.__add__(obj, 0),)
