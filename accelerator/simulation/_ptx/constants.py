"""Evaluates PTX's constant expressions."""

from __future__ import annotations

import functools
import operator
import re
import struct
from collections.abc import Callable
from typing import Any

from .errors import Refused
from .syntax import Immediate

_INTEGER = re.compile(r"0[xX][0-9a-fA-F]+U?|0[bB][01]+U?|0[0-7]*U?|[1-9]\d*U?")
_FLOAT_BITS = re.compile(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})")
_FLOAT = re.compile(r"(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+")
_CONSTANT = re.compile(r"[-+~!(\s]*(?:[\d.]|WARP_SZ\b)")
_TOKEN = re.compile(
    rf"\s*({_FLOAT_BITS.pattern}|{_FLOAT.pattern}|{_INTEGER.pattern}|WARP_SZ"
    r"|\(\s*\.[su]64\s*\)|\|\||&&|<<|>>|[<>=!]=|[-+*/%&|^~!?:()<>])\s*"
)
_ENDS_OF_NUMBERS = re.compile(r"[\w.$]")
_MASK = (1 << 64) - 1


class _Integer(int):
    """A number of 64 bits, signed or unsigned."""

    is_unsigned = False


def _integer(value: int, is_unsigned: bool) -> _Integer:
    value &= _MASK
    number = _Integer(value if is_unsigned or value >> 63 == 0 else value - (1 << 64))
    number.is_unsigned = is_unsigned
    return number


def _quotient(a: int, b: int) -> int:
    """Divide as C does, toward zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_OPERATORS: tuple[dict[str, Callable[[Any, Any], Any]], ...] = (
    {"||": lambda a, b: bool(a or b)},
    {"&&": lambda a, b: bool(a and b)},
    {"|": operator.or_},
    {"^": operator.xor},
    {"&": operator.and_},
    {"==": operator.eq, "!=": operator.ne},
    {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    {"<<": lambda a, b: a << b % 64, ">>": lambda a, b: a >> b % 64},
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": _quotient, "%": lambda a, b: a - _quotient(a, b) * b},
)
"""From those that bind least to those that bind most."""
_OF_FLOATS = {"+", "-", "*", "/", "==", "!=", "<", "<=", ">", ">="}


def parse_constant(text: str) -> Immediate | None:
    """Return the value of a constant expression; None for other operands.

    Raises:
        Refused: It begins as a constant does, and is none.
    """
    return _parse(text) if _CONSTANT.match(text) else None


@functools.lru_cache(maxsize=4096)
def _parse(text: str) -> Immediate:
    if match := _FLOAT_BITS.fullmatch(text):
        return Immediate(int(match[1] or match[2], 16), 32 if match[1] else 64)
    try:
        value = _Expression(text).value
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise Refused(f"the constant {text}") from error
    if isinstance(value, float):
        return Immediate(int.from_bytes(struct.pack("<d", value), "little"), 64)
    return Immediate(int(value))


class _Expression:
    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None or (match[1][-1].isalnum() and _ENDS_OF_NUMBERS.match(text, match.end(1))):
                raise ValueError
            self._tokens.append(match[1])
            at = match.end()
        self._tokens.append("")
        self._at = 0
        self.value = self._condition()
        if self._next():
            raise ValueError

    def _next(self) -> str:
        return self._tokens[self._at]

    def _take(self, *expected: str) -> str:
        token = self._next()
        if expected and token not in expected:
            raise ValueError
        self._at += 1
        return token

    def _condition(self) -> float | _Integer:
        value = self._binary(0)
        if self._next() != "?":
            return value
        self._take()
        first = self._condition()
        self._take(":")
        second = self._condition()
        return first if value else second

    def _binary(self, level: int) -> float | _Integer:
        if level == len(_OPERATORS):
            return self._unary()
        value = self._binary(level + 1)
        while self._next() in _OPERATORS[level]:
            sign = self._take()
            value = self._apply(sign, _OPERATORS[level][sign], value, self._binary(level + 1))
        return value

    @staticmethod
    def _apply(sign: str, function: Callable[[Any, Any], Any], a: float | _Integer, b: float | _Integer) -> float | _Integer:
        if isinstance(a, float) and isinstance(b, float) and sign in _OF_FLOATS:
            found = a / b if sign == "/" else function(a, b)
            return found if isinstance(found, float) else _integer(found, False)
        if not isinstance(a, _Integer) or not isinstance(b, _Integer):
            raise TypeError
        shifts = sign in ("<<", ">>")
        is_unsigned = a.is_unsigned or (b.is_unsigned and not shifts)
        a = _integer(a, is_unsigned)
        b = _integer(b, is_unsigned or shifts)
        found = function(a, b)
        return _integer(found, is_unsigned and not isinstance(found, bool))

    def _unary(self) -> float | _Integer:
        token = self._take()
        if token == "(":
            value = self._condition()
            self._take(")")
            return value
        if token.startswith("("):
            value = self._unary()
            if not isinstance(value, _Integer):
                raise TypeError
            return _integer(value, "u" in token)
        if token in ("-", "+", "~", "!"):
            value = self._unary()
            if not isinstance(value, _Integer):
                return {"-": -value, "+": value}[token]
            number = {"-": -value, "+": value, "~": ~value, "!": int(not value)}[token]
            return _integer(number, value.is_unsigned and token != "!")
        return self._number(token)

    @staticmethod
    def _number(token: str) -> float | _Integer:
        if token == "WARP_SZ":
            return _integer(32, False)
        if match := _FLOAT_BITS.fullmatch(token):
            data = bytes.fromhex(match[1] or match[2])
            return float(struct.unpack(">f" if match[1] else ">d", data)[0])
        if _FLOAT.fullmatch(token):
            return float(token)
        digits = token.rstrip("U")
        is_octal = len(digits) > 1 and digits.isdigit() and digits[0] == "0"
        value = int(digits, 8 if is_octal else 0)
        if value > _MASK and not digits.startswith("0"):
            raise OverflowError  # of others, ptxas takes the low bits
        return _integer(value, token != digits or value >> 63 != 0)
