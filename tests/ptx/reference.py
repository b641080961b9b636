"""What PTX's instructions compute, in exact arithmetic: integers and fractions of Python, rounded once.

Nothing here comes from the translator. A float is its bits; a number is decoded, computed as a fraction, and encoded.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import NamedTuple

NAN = "nan"
INFINITY = "infinity"


class Number(NamedTuple):
    """A decoded float: its sign and its size, which is a fraction, NAN or INFINITY."""

    is_negative: bool
    size: Fraction | str

    @property
    def is_nan(self) -> bool:
        return self.size == NAN

    @property
    def is_infinite(self) -> bool:
        return self.size == INFINITY

    @property
    def is_zero(self) -> bool:
        return self.size == 0

    @property
    def value(self) -> Fraction:
        assert isinstance(self.size, Fraction)
        return -self.size if self.is_negative else self.size


class Format(NamedTuple):
    """A format of floats. e4m3 has no infinity, and NaN is all bits set."""

    exponent_bits: int
    mantissa_bits: int
    has_infinity: bool = True
    canonical_nan: int = 0

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def sign_bit(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def infinity(self) -> int:
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def largest(self) -> int:
        """The bits of the largest finite number."""
        return self.infinity - 1 if self.has_infinity else self.sign_bit - 2

    @functools.cache  # noqa: B019 - formats are few and live as long as the process
    def decode(self, bits: int) -> Number:
        is_negative = bool(bits & self.sign_bit)
        size = bits & (self.sign_bit - 1)
        if size > self.largest:
            return Number(is_negative, INFINITY if self.has_infinity and size == self.infinity else NAN)
        exponent, mantissa = size >> self.mantissa_bits, size & ((1 << self.mantissa_bits) - 1)
        units = mantissa | (1 << self.mantissa_bits) if exponent else mantissa
        power = (exponent or 1) - self.bias - self.mantissa_bits
        return Number(is_negative, Fraction(units) * Fraction(2) ** power)

    def encode(self, number: Number, mode: str = "rn") -> int:
        """Round a number.

        Args:
            number: The number.
            mode: rn (to nearest, ties to even), rna (ties away from zero), rz, rm or rp.
        """
        sign = self.sign_bit if number.is_negative else 0
        if number.is_nan:
            return self.canonical_nan
        if number.is_infinite:
            return sign | (self.infinity if self.has_infinity else self.largest)
        assert isinstance(number.size, Fraction)
        size = self._round(number.size, mode, number.is_negative)
        return sign | size

    def _round(self, size: Fraction, mode: str, is_negative: bool) -> int:
        if size == 0:
            return 0
        exponent = size.numerator.bit_length() - size.denominator.bit_length()
        if Fraction(2) ** exponent > size:
            exponent -= 1
        exponent = max(exponent, 1 - self.bias)
        units = size / Fraction(2) ** (exponent - self.mantissa_bits)
        whole = round_fraction(units, mode, is_negative)
        bits = whole + ((exponent - (1 - self.bias)) << self.mantissa_bits)
        if bits <= self.largest:
            return bits
        goes_to_infinity = mode in ("rn", "rna") or (mode == "rp" and not is_negative) or (mode == "rm" and is_negative)
        return self.infinity if goes_to_infinity and self.has_infinity else self.largest

    def flush(self, bits: int) -> int:
        """Replace a subnormal number by a zero of its sign."""
        return bits if bits & self.infinity else bits & self.sign_bit


def round_fraction(value: Fraction, mode: str, is_negative: bool) -> int:
    """Round a positive fraction to an integer; `is_negative` says whose sign the rounding mode concerns."""
    whole, rest = divmod(value.numerator, value.denominator)
    doubled = 2 * rest - value.denominator
    if rest == 0:
        return whole
    if mode == "rn":
        return whole + (doubled > 0 or (doubled == 0 and whole % 2 == 1))
    if mode == "rna":
        return whole + (doubled >= 0)
    if mode == "rm":
        return whole + is_negative
    if mode == "rp":
        return whole + (not is_negative)
    return whole


F16 = Format(5, 10, canonical_nan=0x7FFF)
BF16 = Format(8, 7, canonical_nan=0x7FFF)
F32 = Format(8, 23, canonical_nan=0x7FFFFFFF)
F64 = Format(11, 52, canonical_nan=0x7FFFFFFFFFFFFFFF)
E4M3 = Format(4, 3, has_infinity=False, canonical_nan=0x7F)
E5M2 = Format(5, 2, canonical_nan=0x7F)
TF32 = Format(8, 10, canonical_nan=0x3FFFF)
FORMATS = {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64, "e4m3": E4M3, "e5m2": E5M2}

NOT_A_NUMBER = Number(False, NAN)


def number(value: Fraction, zero_is_negative: bool = False) -> Number:
    return Number(value < 0 or (value == 0 and zero_is_negative), abs(value))


def negate(a: Number) -> Number:
    return Number(not a.is_negative, a.size)


def add(a: Number, b: Number, mode: str = "rn") -> Number:
    if a.is_nan or b.is_nan:
        return NOT_A_NUMBER
    if a.is_infinite or b.is_infinite:
        if a.is_infinite and b.is_infinite and a.is_negative != b.is_negative:
            return NOT_A_NUMBER
        return a if a.is_infinite else b
    total = a.value + b.value
    if total == 0 and a.is_negative == b.is_negative:
        return Number(a.is_negative, Fraction(0))
    return number(total, mode == "rm")


def multiply(a: Number, b: Number) -> Number:
    is_negative = a.is_negative != b.is_negative
    if a.is_nan or b.is_nan:
        return NOT_A_NUMBER
    if a.is_infinite or b.is_infinite:
        return NOT_A_NUMBER if a.is_zero or b.is_zero else Number(is_negative, INFINITY)
    assert isinstance(a.size, Fraction)
    assert isinstance(b.size, Fraction)
    return Number(is_negative, a.size * b.size)


def divide(a: Number, b: Number) -> Number:
    is_negative = a.is_negative != b.is_negative
    if a.is_nan or b.is_nan or (a.is_infinite and b.is_infinite) or (a.is_zero and b.is_zero):
        return NOT_A_NUMBER
    if a.is_infinite or b.is_zero:
        return Number(is_negative, INFINITY)
    if b.is_infinite or a.is_zero:
        return Number(is_negative, Fraction(0))
    assert isinstance(a.size, Fraction)
    assert isinstance(b.size, Fraction)
    return Number(is_negative, a.size / b.size)


def fused(a: Number, b: Number, c: Number, mode: str = "rn") -> Number:
    return add(multiply(a, b), c, mode)


def square_root(a: Number, format: Format, mode: str) -> int:
    """Return the rounded root, as bits."""
    if a.is_nan or (a.is_negative and not a.is_zero):
        return format.canonical_nan
    if a.is_infinite or a.is_zero:
        return format.encode(a)
    assert isinstance(a.size, Fraction)
    # Many more digits than the format has, and one more bit that says whether digits are lost.
    scale = 4 ** (format.mantissa_bits + format.bias + 64)
    scaled = a.size * scale
    root = math.isqrt(scaled.numerator // scaled.denominator)
    is_exact = root * root == scaled
    return format.encode(Number(False, Fraction(2 * root + (not is_exact), 2 * math.isqrt(scale))), mode)


def extreme(name: str, a: Number, b: Number, propagates: bool) -> Number:
    """min or max: +0 is greater than -0, and NaN is missing unless it propagates."""
    if a.is_nan or b.is_nan:
        if propagates or (a.is_nan and b.is_nan):
            return NOT_A_NUMBER
        return b if a.is_nan else a
    first = order(a) < order(b)
    return a if first == (name == "min") else b


def order(a: Number) -> tuple[Fraction | float, bool]:
    value = math.inf if a.is_infinite else float("nan") if a.is_nan else abs(a.value)
    if a.is_negative:
        value = -value
    return value, not a.is_negative


def to_integer(a: Number, mode: str, low: int, high: int) -> int:
    """Round a number to an integer and clamp it. The mode is rni, rzi, rmi or rpi."""
    if a.is_infinite:
        return low if a.is_negative else high
    assert isinstance(a.size, Fraction)
    rounded = round_fraction(a.size, mode[:2], a.is_negative)
    return min(max(-rounded if a.is_negative else rounded, low), high)


def compare(comparison: str, a: Number, b: Number) -> bool:
    """Compare floats; those that end in u hold too if an operand is NaN."""
    is_unordered = a.is_nan or b.is_nan
    if comparison in ("num", "nan"):
        return is_unordered == (comparison == "nan")
    if is_unordered:
        return comparison.endswith("u")
    x, y = order(a)[0], order(b)[0]
    name = comparison.removesuffix("u")
    return {"eq": x == y, "ne": x != y, "lt": x < y, "le": x <= y, "gt": x > y, "ge": x >= y}[name]


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value
