"""Cases of arithmetic on floats of all sizes, with exact fractions as reference, rounded once.

Approximations are compared with the functions of C on double precision, within the errors that CUDA documents.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

from . import reference
from .cases import ROWS, Case
from .reference import FORMATS, Format, Number

ROUNDINGS = ("", ".rn", ".rz", ".rm", ".rp")


def edges(format: Format) -> list[int]:
    """Return the bits of numbers at which something changes."""
    one = format.bias << format.mantissa_bits
    sizes = [
        *(0, 1, 2, (1 << format.mantissa_bits) - 1, 1 << format.mantissa_bits, (1 << format.mantissa_bits) + 1),
        *(one, one - 1, one + 1, one + (1 << format.mantissa_bits), format.largest, format.largest - 1, format.infinity),
        *(format.canonical_nan, format.infinity + 1, one + (3 << (format.mantissa_bits - 1))),
    ]
    return [size | sign for size in sizes for sign in (0, format.sign_bit)]


def operands(format: Format, count: int, seed: str) -> list[list[int]]:
    """Return rows of bits: edges, random numbers of like sizes, and random bits."""
    return [list(row) for row in _operands(format, count, seed)]


@functools.cache
def _operands(format: Format, count: int, seed: str) -> list[list[int]]:
    generator = random.Random(f"{seed} {format}")
    all_edges = edges(format)
    found: list[list[int]] = []
    for number in range(ROWS):
        row: list[int] = []
        base = generator.randrange(1 << format.exponent_bits)
        for _ in range(count):
            pick = generator.random()
            if number < 12 or pick < 0.25:
                row.append(generator.choice(all_edges))
            elif pick < 0.4:
                row.append(generator.getrandbits(format.bits))
            else:
                exponent = min(max(base + generator.randrange(-3, 4), 0), (1 << format.exponent_bits) - 2)
                mantissa = generator.getrandbits(format.mantissa_bits)
                if generator.random() < 0.3:
                    mantissa &= -1 << (format.mantissa_bits // 2)
                row.append(generator.getrandbits(1) * format.sign_bit | exponent << format.mantissa_bits | mantissa)
        found.append(row)
    return found


def same_or_nan(format: Format) -> Callable[[int, int], bool]:
    """Accept the expected bits, or any NaN for NaN: double precision has payloads, and others have signs that change."""

    def accepts(result: int, expected: int) -> bool:
        if format.decode(expected).is_nan:
            return format.decode(result).is_nan
        return result == expected

    return accepts


def both_halves(accepts: Callable[[int, int], bool], bits: int) -> Callable[[int, int], bool]:
    mask = (1 << bits) - 1

    def accepts_both(result: int, expected: int) -> bool:
        return accepts(result & mask, expected & mask) and accepts(result >> bits, expected >> bits)

    return accepts_both


def float_case(
    variant: str,
    type: str,
    count: int,
    function: Callable[..., int],
    *,
    exact: bool = False,
    accepts: Callable[[int, int], bool] | None = None,
    target: str = "sm_90",
    seed: str = "",
) -> Case:
    """Make a case of one float type, or of pairs of it.

    Args:
        variant: The variant.
        type: f16, bf16, f32, f64, or one of them with x2.
        count: The number of operands.
        function: Computes the bits of one result from the bits of the operands.
        exact: Whether NaN of double precision must be the expected one, as that of other types.
        accepts: Says whether the bits of one result are right.
        target: The oldest architecture that has the variant.
        seed: Chooses the operands; "" for the variant.
    """
    name = type.removesuffix("x2")
    format = FORMATS[name]
    seed = seed or variant
    rows = operands(format, count, seed)
    accepts = accepts or (same_or_nan(format) if type == "f64" and not exact else None)
    expected = [function(*row) for row in rows]
    width = format.bits
    if type.endswith("x2"):
        # Each row has the operands of two computations.
        width = 2 * format.bits
        second = operands(format, count, seed + " high")
        expected = [low | function(*high) << format.bits for low, high in zip(expected, second, strict=True)]
        rows = [[x | y << format.bits for x, y in zip(low, high, strict=True)] for low, high in zip(rows, second, strict=True)]
        accepts = both_halves(accepts, format.bits) if accepts else None
    text = ", ".join(f"<{letter}>" for letter in "dabce"[: count + 1])
    registers = {letter: type for letter in "dabce"[: count + 1]} if type in ("f32", "f64") else {}
    return Case(variant, f"{variant} {text};", (width,) * (count + 1), rows, expected, accepts, target, registers)


def _with_modifiers(
    format: Format, compute: Callable[[list[Number], str], int], mode: str, *, ftz: bool, sat: bool, relu: bool = False
) -> Callable[..., int]:
    def function(*bits: int) -> int:
        flushed = [format.flush(each) for each in bits] if ftz else list(bits)
        result = compute([format.decode(each) for each in flushed], mode)
        if ftz:
            result = format.flush(result)
        return clamp(format, result, sat=sat, relu=relu)

    return function


def clamp(format: Format, result: int, *, sat: bool = False, relu: bool = False) -> int:
    number = format.decode(result)
    one = format.bias << format.mantissa_bits
    if sat:
        if number.is_nan or number.is_negative:
            return 0
        return min(result, one)
    if relu:
        return format.canonical_nan if number.is_nan else 0 if number.is_negative else result
    return result


def computations(format: Format) -> dict[str, tuple[int, Callable[[list[Number], str], int]]]:
    """The number of operands of each operation, and its rounded result."""

    def encode(number: Number, mode: str) -> int:
        return format.encode(number, mode)

    return {
        "add": (2, lambda n, m: encode(reference.add(n[0], n[1], m), m)),
        "sub": (2, lambda n, m: encode(reference.add(n[0], reference.negate(n[1]), m), m)),
        "mul": (2, lambda n, m: encode(reference.multiply(n[0], n[1]), m)),
        "fma": (3, lambda n, m: encode(reference.fused(n[0], n[1], n[2], m), m)),
        "mad": (3, lambda n, m: encode(reference.fused(n[0], n[1], n[2], m), m)),
        "div": (2, lambda n, m: encode(reference.divide(n[0], n[1]), m)),
        "rcp": (1, lambda n, m: encode(reference.divide(Number(False, Fraction(1)), n[0]), m)),
        "sqrt": (1, lambda n, m: reference.square_root(n[0], format, m)),
    }


def _mode(rounding: str) -> str:
    return rounding.removeprefix(".") or "rn"


def arithmetic() -> Iterator[Case]:
    """add to sqrt of single and double precision."""
    for type in ("f32", "f64"):
        format = FORMATS[type]
        for name, (count, compute) in computations(format).items():
            is_simple = name in ("add", "sub", "mul")
            has_sat = is_simple or name in ("fma", "mad")
            for rounding in ROUNDINGS if is_simple else ROUNDINGS[1:]:
                flushes = ("", ".ftz") if type == "f32" else ("",)
                clamps = ("", ".sat") if type == "f32" and has_sat else ("",)
                for ftz, sat in itertools.product(flushes, clamps):
                    function = _with_modifiers(format, compute, _mode(rounding), ftz=bool(ftz), sat=bool(sat))
                    yield float_case(f"{name}{rounding}{ftz}{sat}.{type}", type, count, function)
                if type == "f32" and (is_simple or name == "fma"):
                    for ftz in ("", ".ftz"):
                        function = _with_modifiers(format, compute, _mode(rounding), ftz=bool(ftz), sat=False)
                        yield float_case(f"{name}{rounding}{ftz}.f32x2", "f32x2", count, function, target="sm_100")


def halves() -> Iterator[Case]:
    """add, sub, mul and fma of half precision and bfloat16."""
    for type in ("f16", "f16x2", "bf16", "bf16x2"):
        name = type.removesuffix("x2")
        format = FORMATS[name]
        operations = computations(format)
        is_half = name == "f16"
        for operation in ("add", "sub", "mul"):
            count, compute = operations[operation]
            modifiers = itertools.product(("", ".ftz"), ("", ".sat")) if is_half else [("", "")]
            for ftz, sat in modifiers:
                for rounding in ("", ".rn"):
                    function = _with_modifiers(format, compute, "rn", ftz=bool(ftz), sat=bool(sat))
                    yield float_case(f"{operation}{rounding}{ftz}{sat}.{type}", type, count, function)
        count, compute = operations["fma"]
        for ftz, last in itertools.product(
            ("", ".ftz") if is_half else ("",), ("", ".sat", ".relu") if is_half else ("", ".relu")
        ):
            function = _with_modifiers(format, compute, "rn", ftz=bool(ftz), sat=last == ".sat", relu=last == ".relu")
            yield float_case(f"fma.rn{ftz}{last}.{type}", type, count, function)


def signs() -> Iterator[Case]:
    """abs, neg, copysign and testp."""
    for type in ("f16", "f16x2", "bf16", "bf16x2", "f32", "f64"):
        format = FORMATS[type.removesuffix("x2")]
        flushes = ("", ".ftz") if type in ("f16", "f16x2", "f32") else ("",)
        for ftz in flushes:

            def flush(bits: int, format: Format = format, ftz: str = ftz) -> int:
                return format.flush(bits) if ftz else bits

            any_nan = same_or_nan(format)
            absolute, negative = (lambda a, f=format: flush(a) & (f.sign_bit - 1)), (lambda a, f=format: flush(a) ^ f.sign_bit)
            yield float_case(f"abs{ftz}.{type}", type, 1, absolute, accepts=any_nan)
            yield float_case(f"neg{ftz}.{type}", type, 1, negative, accepts=any_nan)
    for type in ("f32", "f64"):
        format = FORMATS[type]
        yield float_case(
            f"copysign.{type}", type, 2, lambda a, b, f=format: (b & (f.sign_bit - 1)) | (a & f.sign_bit), exact=True
        )
        classes: dict[str, Callable[[int], bool]] = {
            "finite": lambda a, f=format: not f.decode(a).is_nan and not f.decode(a).is_infinite,
            "infinite": lambda a, f=format: f.decode(a).is_infinite,
            "number": lambda a, f=format: not f.decode(a).is_nan,
            "notanumber": lambda a, f=format: f.decode(a).is_nan,
            "normal": lambda a, f=format: 0 < (a & f.infinity) < f.infinity,
            "subnormal": lambda a, f=format: not a & f.infinity and bool(a & (f.sign_bit - 1)),
        }
        for name, is_class in classes.items():
            made = float_case(f"testp.{name}.{type}", type, 1, lambda a, test=is_class: int(test(a)), exact=True)
            made.sizes = (1, *made.sizes[1:])
            made.registers = {"a": type}
            yield made


def extremes() -> Iterator[Case]:
    for name in ("min", "max"):
        for type in ("f16", "f16x2", "bf16", "bf16x2", "f32"):
            flushes = ("",) if type.startswith("bf16") else ("", ".ftz")
            last = ("", ".xorsign.abs") if type != "f32" else ("", ".abs", ".xorsign.abs")
            for ftz, nan, sign in itertools.product(flushes, ("", ".NaN"), last):
                format = FORMATS[type.removesuffix("x2")]
                function = _extreme(name, format, ftz=bool(ftz), nan=bool(nan), sign=sign)
                variant = f"{name}{ftz}{nan}{sign}.{type}"
                if sign == ".abs":  # only with three operands
                    three = _extreme_of_three(function, format, ftz=bool(ftz))
                    yield float_case(variant, type, 3, three, exact=True, target="sm_100")
                    continue
                yield float_case(variant, type, 2, function, exact=True)
                if type == "f32" and not sign:
                    three = _extreme_of_three(function, format, ftz=bool(ftz))
                    yield float_case(variant, type, 3, three, exact=True, target="sm_100")
        yield float_case(f"{name}.f64", "f64", 2, _extreme(name, FORMATS["f64"]))  # a GPU may return a NaN with its payload


def _extreme(name: str, format: Format, *, ftz: bool = False, nan: bool = False, sign: str = "") -> Callable[..., int]:
    def function(a: int, b: int) -> int:
        if ftz:
            a, b = format.flush(a), format.flush(b)
        xor = (a ^ b) & format.sign_bit
        if "abs" in sign:
            a, b = a & (format.sign_bit - 1), b & (format.sign_bit - 1)
        number = reference.extreme(name, format.decode(a), format.decode(b), nan)
        result = format.encode(number)
        return result | xor if sign == ".xorsign.abs" and not number.is_nan else result

    return function


def _extreme_of_three(two: Callable[..., int], format: Format, *, ftz: bool) -> Callable[..., int]:
    def function(a: int, b: int, c: int) -> int:
        return two(two(a, b), c)

    return function


def comparisons() -> Iterator[Case]:
    orders = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
    for type in ("f16", "bf16", "f32", "f64"):
        format = FORMATS[type]
        for order, ftz in itertools.product(orders, ("", ".ftz") if type in ("f16", "f32") else ("",)):

            @functools.cache
            def compare(a: int, b: int, order: str = order, format: Format = format, ftz: str = ftz) -> bool:
                x, y = (format.flush(bits) if ftz else bits for bits in (a, b))
                return reference.compare(order, format.decode(x), format.decode(y))

            yield from _setp(type, order, ftz, compare)
            yield from _set(type, order, ftz, compare)
            if type in ("f16", "bf16"):
                yield from _pairs(type, order, ftz, compare)


_LOGIC = {"and": int.__and__, "or": int.__or__, "xor": int.__xor__}


def _with_predicate(case: Case) -> list[int]:
    """Give the rows of a case a predicate as third operand; return the predicates."""
    generator = random.Random(case.variant)
    predicates = [generator.getrandbits(1) for _ in case.rows]
    case.rows = [[*row, predicate] for row, predicate in zip(case.rows, predicates, strict=True)]
    return predicates


def _setp(type: str, order: str, ftz: str, compare: Callable[[int, int], bool]) -> Iterator[Case]:
    base = float_case(f"setp.{order}{ftz}.{type}", type, 2, lambda a, b: int(compare(a, b)), exact=True, seed="compare")
    base.sizes = (1, *base.sizes[1:])
    base.registers = {letter: type for letter in "ab"} if type in ("f32", "f64") else {}
    yield base
    for name, logic in _LOGIC.items():
        made = float_case(
            f"setp.{order}.{name}{ftz}.{type}", type, 2, lambda a, b: int(compare(a, b)), exact=True, seed="compare"
        )
        predicates = _with_predicate(made)
        made.registers = base.registers
        if type in ("f16", "bf16"):  # without a second result
            made.expected = [logic(found, p) for found, p in zip(made.expected, predicates, strict=True)]
            made.sizes = (1, *made.sizes[1:], 1)
            made.statement = f"{made.variant} <d>, <a>, <b>, <c>;"
            yield made
            continue
        made.expected = [logic(found, p) | logic(1 - found, p) << 1 for found, p in zip(made.expected, predicates, strict=True)]
        made.sizes = (32, *made.sizes[1:], 1)
        made.statement = (
            f"{{ .reg .pred %p, %q; .reg .b32 %r; {made.variant} %p|%q, <a>, <b>, <c>;"
            " selp.b32 <d>, 1, 0, %p; selp.b32 %r, 2, 0, %q; or.b32 <d>, <d>, %r; }"
        )
        yield made


def _ones(target: str) -> int:
    return {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80, "u16": 0xFFFF, "s16": 0xFFFF}.get(target, 0xFFFFFFFF)


def _set(type: str, order: str, ftz: str, compare: Callable[[int, int], bool]) -> Iterator[Case]:
    targets = ("u32", "s32", "f32") if type in ("f32", "f64") else (type, "u16", "s16", "u32", "s32")
    for target in targets:
        one = _ones(target)
        bits = 16 if target.endswith("16") else 32
        registers = {letter: type for letter in "ab"} if type in ("f32", "f64") else {}
        for name in ("", *_LOGIC):
            variant = f"set.{order}{f'.{name}' if name else ''}{ftz}.{target}.{type}"
            made = float_case(variant, type, 2, lambda a, b: int(compare(a, b)), exact=True, seed="compare")
            if name:
                predicates = _with_predicate(made)
                made.expected = [_LOGIC[name](found, p) for found, p in zip(made.expected, predicates, strict=True)]
            made.expected = [one if found else 0 for found in made.expected]
            made.sizes = (bits, *made.sizes[1:], *((1,) if name else ()))
            made.registers = registers
            made.statement = f"{variant} <d>, <a>, <b>{', <c>' if name else ''};"
            yield made


def _pairs(type: str, order: str, ftz: str, compare: Callable[[int, int], bool]) -> Iterator[Case]:
    """setp and set of pairs: the low halves give p, the high ones q."""
    for name in ("", *_LOGIC):
        suffix = f".{name}" if name else ""
        for target in ("", f"{type}x2", "u32", "s32"):
            is_set = bool(target)
            variant = f"set.{order}{suffix}{ftz}.{target}.{type}x2" if is_set else f"setp.{order}{suffix}{ftz}.{type}x2"
            made = float_case(variant, f"{type}x2", 2, lambda a, b: int(compare(a, b)), exact=True, seed="compare")
            found = [(both & 1, both >> 16 & 1) for both in made.expected]
            if name:
                predicates = _with_predicate(made)
                found = [tuple(_LOGIC[name](each, p) for each in pair) for pair, p in zip(found, predicates, strict=True)]  # type: ignore[misc]
            last = ", <c>" if name else ""
            one = _ones(type if target.endswith("x2") else "u16")
            if is_set:
                made.expected = [low * one | high * one << 16 for low, high in found]
                made.statement = f"{variant} <d>, <a>, <b>{last};"
            else:
                made.expected = [low | high << 1 for low, high in found]
                made.statement = (
                    f"{{ .reg .pred %p, %q; .reg .b32 %r; {variant} %p|%q, <a>, <b>{last};"
                    " selp.b32 <d>, 1, 0, %p; selp.b32 %r, 2, 0, %q; or.b32 <d>, <d>, %r; }"
                )
            made.sizes = (32, 32, 32, *((1,) if name else ()))
            yield made


def selections() -> Iterator[Case]:
    """slct by a float: d = c >= 0 ? a : b."""
    f32 = FORMATS["f32"]
    for bits in (16, 32, 64):
        types = (f"b{bits}", f"u{bits}", f"s{bits}", *((f"f{bits}",) if bits > 16 else ()))
        for type, ftz in itertools.product(types, ("", ".ftz")):
            generator = random.Random(f"slct {type} {ftz}")
            rows = [
                [generator.getrandbits(bits), generator.getrandbits(bits), row[0]] for row in operands(f32, 1, f"{type}{ftz}")
            ]
            chosen = [f32.decode(f32.flush(row[2]) if ftz else row[2]) for row in rows]
            expected = [
                a if reference.compare("ge", number, f32.decode(0)) else b
                for (a, b, _), number in zip(rows, chosen, strict=True)
            ]
            registers = {"c": "f32", **({letter: type for letter in "dab"} if type[0] == "f" else {})}
            variant = f"slct{ftz}.{type}.f32"
            yield Case(variant, f"{variant} <d>, <a>, <b>, <c>;", (bits, bits, bits, 32), rows, expected, registers=registers)


# Approximations


def double_of(bits: int, format: Format) -> float:
    number = format.decode(bits)
    if number.is_nan:
        return math.nan
    if number.is_infinite:
        return -math.inf if number.is_negative else math.inf
    return math.copysign(float(number.value), -1 if number.is_negative else 1)


def _bits_of_double(value: float) -> int:
    return struct.unpack("<Q", struct.pack("<d", value))[0]


def nearest(value: float, format: Format) -> int:
    return format.encode(FORMATS["f64"].decode(_bits_of_double(value)))


def within(format: Format, *, ulps: float = 0, relative: float = 0, absolute: float = 0) -> Callable[[int, int], bool]:
    """Accept results near the expected one; zeros, infinities and NaN must be right."""

    def accepts(result: int, expected: int) -> bool:
        got, wanted = format.decode(result), format.decode(expected)
        if wanted.is_nan:
            return got.is_nan
        if wanted.is_infinite or got.is_infinite or got.is_nan:
            return result == expected
        if wanted.is_zero and not absolute:
            return result == expected
        error = abs(got.value - wanted.value)
        unit = Fraction(2) ** (
            max(((expected & format.infinity) >> format.mantissa_bits), 1) - format.bias - format.mantissa_bits
        )
        return error <= max(Fraction(ulps) * unit, abs(wanted.value) * Fraction(relative), Fraction(absolute))

    return accepts


def _real(function: Callable[..., float], format: Format, *, ftz: bool) -> Callable[..., int]:
    """The function on double precision, of flushed operands."""

    def compute(*bits: int) -> int:
        values = [double_of(format.flush(each) if ftz else each, format) for each in bits]
        try:
            value = function(*values)
        except (ValueError, OverflowError, ZeroDivisionError):
            value = math.nan
        result = nearest(value, format)
        return format.flush(result) if ftz else result

    return compute


def _reciprocal(x: float) -> float:
    return math.copysign(math.inf, x) if x == 0 else 1 / x


def _reciprocal_root(x: float) -> float:
    if x == 0:
        return math.copysign(math.inf, x)
    return math.nan if x < 0 else 1 / math.sqrt(x)


def _root(x: float) -> float:
    return x if x == 0 else math.nan if x < 0 else math.sqrt(x)


def _logarithm(x: float) -> float:
    if x == 0:
        return -math.inf
    return math.nan if x < 0 else math.log2(x)


def _power(x: float) -> float:
    if math.isinf(x):
        return 0.0 if x < 0 else math.inf
    return math.inf if x > 2000 else 0.0 if x < -2000 else 2.0**x


def _quotient(a: float, b: float) -> float:
    """div.approx: of divisors beyond 2**126 it gives 0, and NaN of infinite dividends."""
    size = abs(b)
    if 2.0**126 < size < 2.0**128:
        return math.nan if math.isinf(a) or math.isnan(a) else math.copysign(0.0, a) * math.copysign(1.0, b)
    return _full_quotient(a, b)


def _full_quotient(a: float, b: float) -> float:
    if b == 0 and not math.isnan(a):
        return math.nan if a == 0 else math.copysign(math.inf, a) * math.copysign(1.0, b)
    return a / b


_APPROXIMATIONS: tuple[tuple[str, int, Callable[..., float], dict[str, float]], ...] = (
    ("div.approx", 2, _quotient, {"ulps": 2}),
    ("div.full", 2, _full_quotient, {"ulps": 2}),
    ("rcp.approx", 1, _reciprocal, {"ulps": 1}),
    ("sqrt.approx", 1, _root, {"ulps": 1}),
    ("rsqrt.approx", 1, _reciprocal_root, {"relative": 2**-22.9}),
    ("sin.approx", 1, math.sin, {"absolute": 2**-20.5}),
    ("cos.approx", 1, math.cos, {"absolute": 2**-20.5}),
    ("lg2.approx", 1, _logarithm, {"absolute": 2**-22, "relative": 2**-22}),
    ("ex2.approx", 1, _power, {"relative": 2**-22, "ulps": 2}),
)


def approximations() -> Iterator[Case]:
    f32, f64 = FORMATS["f32"], FORMATS["f64"]
    for name, count, function, errors in _APPROXIMATIONS:
        for ftz in ("", ".ftz"):
            made = float_case(
                f"{name}{ftz}.f32", "f32", count, _real(function, f32, ftz=bool(ftz)), accepts=within(f32, **errors)
            )
            if name in ("sin.approx", "cos.approx"):
                # The error is documented for [-pi, pi].
                made = _restricted(made, f32, function, errors, math.pi, ftz=bool(ftz))
            yield made
    yield float_case("tanh.approx.f32", "f32", 1, _real(math.tanh, f32, ftz=False), accepts=within(f32, relative=2**-11))
    yield float_case("rsqrt.approx.f64", "f64", 1, _real(_reciprocal_root, f64, ftz=False), accepts=within(f64, ulps=2))
    for name, function in (("rcp", _reciprocal), ("rsqrt", _reciprocal_root)):
        # The low 32 bits are ignored and written as zeros, so 20 bits of mantissa are left.
        of_high_word = _of_high_word(_real(function, f64, ftz=True))
        accepts = _high_word(within(f64, relative=2**-20))
        yield float_case(f"{name}.approx.ftz.f64", "f64", 1, of_high_word, accepts=accepts)
    yield from _half_approximations()


def _of_high_word(function: Callable[..., int]) -> Callable[[int], int]:
    return lambda a: function(a & ~0xFFFFFFFF)


def _high_word(accepts: Callable[[int, int], bool]) -> Callable[[int, int], bool]:
    return lambda result, expected: accepts(result, expected) and not result & 0xFFFFFFFF


def _restricted(
    case: Case, format: Format, function: Callable[..., float], errors: dict[str, float], limit: float, *, ftz: bool
) -> Case:
    rows = [[nearest(limit * (2 * i / (ROWS - 1) - 1), format)] for i in range(ROWS - 4)]
    rows += [[format.infinity], [format.infinity | format.sign_bit], [format.canonical_nan], [1]]
    compute = _real(function, format, ftz=ftz)
    case.rows = rows
    case.expected = [compute(*row) for row in rows]
    return case


def _half_approximations() -> Iterator[Case]:
    for type in ("f16", "f16x2", "bf16", "bf16x2"):
        name = type.removesuffix("x2")
        format = FORMATS[name]
        error = {"f16": 2**-9.9, "bf16": 2**-7}[name]
        variant = f"ex2.approx{'.ftz' if name == 'bf16' else ''}.{type}"
        yield float_case(variant, type, 1, _real(_power, format, ftz=False), accepts=within(format, relative=error, ulps=1))
        tanh_error = {"f16": 2**-10.987, "bf16": 2**-8}[name]
        yield float_case(
            f"tanh.approx.{type}",
            type,
            1,
            _real(math.tanh, format, ftz=False),
            accepts=within(format, absolute=tanh_error, ulps=1),
        )


def all_cases() -> Iterator[Case]:
    sources: Sequence[Callable[[], Iterator[Case]]] = (
        *(arithmetic, halves, signs, extremes, comparisons, selections, approximations),
    )
    for source in sources:
        yield from source()
