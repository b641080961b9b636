"""Cases of cvt."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from fractions import Fraction

from . import reference
from .cases import ROWS, Case
from .float_cases import clamp, edges, operands
from .integer_cases import bits, rows, value
from .reference import FORMATS, TF32, Format

INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
FLOATS = ("f16", "bf16", "f32", "f64")
ROUNDINGS = ("rn", "rz", "rm", "rp")
TO_INTEGER = ("rni", "rzi", "rmi", "rpi")


def _limits(type: str) -> tuple[int, int]:
    n = int(type[1:])
    return (0, (1 << n) - 1) if type[0] == "u" else (-(1 << (n - 1)), (1 << (n - 1)) - 1)


def _case(
    variant: str, result: str, source: str, inputs: list[list[int]], function: Callable[..., int], **options: object
) -> Case:
    registers = {
        letter: type
        for letter, type in zip("dabc", (result, *[source] * len(inputs[0])), strict=False)
        if type in ("f32", "f64")
    }
    if source == "bf16" and result in ("u8", "s8"):
        registers["d"] = "b8"  # ptxas takes no wider one
    sizes = (_size(result), *[_size(source)] * len(inputs[0]))
    text = ", ".join(f"<{letter}>" for letter in "dabce"[: len(sizes)])
    expected = [function(*row) for row in inputs]
    return Case(variant, f"{variant} {text};", sizes, inputs, expected, registers=registers, **options)  # type: ignore[arg-type]


def _size(type: str) -> int:
    known = {"bf16": 16, "tf32": 32, "f16x2": 32, "bf16x2": 32, "e4m3x2": 16, "e5m2x2": 16}
    return known.get(type) or bits(type)


def _float_inputs(source: str, seed: str) -> list[list[int]]:
    return operands(FORMATS[source], 1, seed)


def _any_nan(format: Format) -> Callable[[int, int], bool]:
    def accepts(result: int, expected: int) -> bool:
        return result == expected or (format.decode(expected).is_nan and format.decode(result).is_nan)

    return accepts


def between_integers() -> Iterator[Case]:
    for target, source, sat in itertools.product(INTEGERS, INTEGERS, ("", ".sat")):
        low, high = _limits(target)
        if sat and low <= _limits(source)[0] and high >= _limits(source)[1]:
            continue

        def convert(a: int, source: str = source, sat: str = sat, low: int = low, high: int = high) -> int:
            number = value(a, source)
            return min(max(number, low), high) if sat else number

        yield _case(f"cvt{sat}.{target}.{source}", target, source, rows([bits(source)], f"{target}{source}"), convert)


def from_integers() -> Iterator[Case]:
    for target, source, rounding in itertools.product(FLOATS, INTEGERS, ROUNDINGS):
        format = FORMATS[target]
        if target == "bf16" and source in ("u8", "s8"):
            continue
        for sat in ("",) if target == "bf16" else ("", ".sat"):

            def convert(a: int, source: str = source, format: Format = format, rounding: str = rounding, sat: str = sat) -> int:
                return clamp(format, format.encode(reference.number(Fraction(value(a, source))), rounding), sat=bool(sat))

            inputs = rows([bits(source)], f"{target}{source}{rounding}")
            yield _case(f"cvt.{rounding}{sat}.{target}.{source}", target, source, inputs, convert)


def to_integers() -> Iterator[Case]:
    for target, source, rounding in itertools.product(INTEGERS, FLOATS, TO_INTEGER):
        low, high = _limits(target)
        format = FORMATS[source]
        modifiers = {"f32": ("", ".ftz", ".sat", ".ftz.sat"), "bf16": ("",)}.get(source, ("", ".sat"))
        for modifier in modifiers:

            def convert(
                a: int,
                format: Format = format,
                rounding: str = rounding,
                modifier: str = modifier,
                low: int = low,
                high: int = high,
                of_nan: int = _integer_of_nan(target, source),
            ) -> int:
                number = format.decode(format.flush(a) if ".ftz" in modifier else a)
                return of_nan if number.is_nan else reference.to_integer(number, rounding, low, high)

            yield _case(f"cvt.{rounding}{modifier}.{target}.{source}", target, source, _near_integers(source, target), convert)


def _integer_of_nan(target: str, source: str) -> int:
    """NaN gives 0, or the highest bit alone if it is of double precision or the result has 64 bits."""
    return 1 << (int(target[1:]) - 1) if source == "f64" or target.endswith("64") else 0


def _near_integers(source: str, target: str) -> list[list[int]]:
    """Floats near the limits of an integer type, and halves between integers."""
    format = FORMATS[source]
    low, high = _limits(target)
    generator = random.Random(f"{source} {target}")
    numbers = [
        Fraction(low),
        Fraction(high),
        Fraction(low) - 1,
        Fraction(high) + 1,
        Fraction(1, 2),
        Fraction(3, 2),
        Fraction(-5, 2),
    ]
    numbers += [Fraction(generator.randrange(-400, 400), 4) for _ in range(10)]
    inputs = [[format.encode(reference.number(number))] for number in numbers]
    inputs += [[bits] for bits in edges(format)[:6]] + [
        [format.infinity],
        [format.infinity | format.sign_bit],
        [format.canonical_nan],
    ]
    return inputs + [[generator.getrandbits(format.bits)] for _ in range(ROWS - len(inputs))]


def between_floats() -> Iterator[Case]:
    for target, source in itertools.product(FLOATS, FLOATS):
        for prefix, ftz, sat in _modifiers(target, source):
            variant = f"cvt{prefix}{ftz}{sat}.{target}.{source}"
            function = _float_conversion(target, source, prefix.removeprefix("."), ftz=bool(ftz), sat=bool(sat))
            has_one_nan = target != "f64" and source != "bf16"
            accepts = None if has_one_nan else _any_nan(FORMATS[target])
            yield _case(variant, target, source, _float_inputs(source, variant), function, accepts=accepts)
    for target, rounding, modifier in itertools.product(
        ("f16", "bf16"), ("rn", "rz"), (".relu", ".satfinite", ".relu.satfinite")
    ):
        variant = f"cvt.{rounding}{modifier}.{target}.f32"
        function = _with_limits(FORMATS[target], rounding, modifier)
        yield _case(variant, target, "f32", _float_inputs("f32", variant), function)


def _modifiers(target: str, source: str) -> Iterator[tuple[str, str, str]]:
    """The modifiers that each pair of types has: rounding, .ftz and .sat."""
    single = "f32" in (target, source)
    if target == source:
        roundings = ("", *(f".{mode}" for mode in TO_INTEGER))
        if target == "bf16":
            roundings = roundings[1:]
    elif FLOATS.index(target) > FLOATS.index(source) and not (target == "bf16" and source == "f16"):
        roundings = ("",)
    else:
        roundings = tuple(f".{mode}" for mode in ROUNDINGS)
    if target == "bf16" and source == "f16":
        roundings = tuple(f".{mode}" for mode in ROUNDINGS)
    if target == "f16" and source == "bf16":
        roundings = tuple(f".{mode}" for mode in ROUNDINGS)
    has_sat = "bf16" not in (target, source)
    flushes = ("", ".ftz") if single and has_sat else ("",)
    yield from itertools.product(roundings, flushes, ("", ".sat") if has_sat else ("",))


def _float_conversion(target: str, source: str, rounding: str, *, ftz: bool, sat: bool) -> Callable[[int], int]:
    to, of = FORMATS[target], FORMATS[source]

    def convert(a: int) -> int:
        # A GPU does not flush the operands of conversions to half precision.
        number = of.decode(of.flush(a) if ftz and source == "f32" and target != "f16" else a)
        if rounding in TO_INTEGER and not number.is_nan and not number.is_infinite:
            assert isinstance(number.size, Fraction)
            whole = reference.round_fraction(number.size, rounding[:2], number.is_negative)
            number = reference.Number(number.is_negative, Fraction(whole))
        result = to.encode(number, rounding if rounding in ROUNDINGS else "rn")
        result = to.flush(result) if ftz and target == "f32" else result
        return clamp(to, result, sat=sat)

    return convert


def _with_limits(format: Format, rounding: str, modifier: str) -> Callable[[int], int]:
    def convert(a: int) -> int:
        result = clamp(format, format.encode(FORMATS["f32"].decode(a), rounding), relu="relu" in modifier)
        if "satfinite" in modifier and format.decode(result).is_infinite:
            return result - 1
        return result

    return convert


def packed() -> Iterator[Case]:
    for target, rounding, relu, satfinite in itertools.product(
        ("f16", "bf16"), ("rn", "rz"), ("", ".relu"), ("", ".satfinite")
    ):
        convert = _with_limits(FORMATS[target], rounding, relu + satfinite)
        variant = f"cvt.{rounding}{relu}{satfinite}.{target}x2.f32"
        inputs = operands(FORMATS["f32"], 2, variant)
        yield _case(variant, f"{target}x2", "f32", inputs, lambda a, b, convert=convert: convert(a) << 16 | convert(b))
    yield from _tf32()
    yield from _narrow()
    yield from _packed_integers()


def _tf32() -> Iterator[Case]:
    f32 = FORMATS["f32"]
    for rounding in ("rna", "rn", "rz"):
        for satfinite, relu in itertools.product(("", ".satfinite"), ("",) if rounding == "rna" else ("", ".relu")):

            def convert(a: int, rounding: str = rounding, satfinite: str = satfinite, relu: str = relu) -> int:
                number = f32.decode(a)
                if number.is_nan and rounding == "rna":
                    # ptxas makes integer instructions of it, which treat NaN like infinity.
                    return (a & ~0x1FFF) - (0x2000 if satfinite else 0)
                if number.is_nan:
                    return f32.canonical_nan
                result = clamp(TF32, TF32.encode(number, rounding), relu=bool(relu))
                if satfinite and TF32.decode(result).is_infinite:
                    result -= 1
                return result << 13

            variant = f"cvt.{rounding}{satfinite}{relu}.tf32.f32"
            target = "sm_100" if satfinite and rounding != "rna" else "sm_90"
            accepts = None if rounding == "rna" else _any_nan(f32)
            yield _case(variant, "tf32", "f32", _float_inputs("f32", variant), convert, target=target, accepts=accepts)


def _narrow() -> Iterator[Case]:
    f32, f16 = FORMATS["f32"], FORMATS["f16"]
    for name, relu in itertools.product(("e4m3", "e5m2"), ("", ".relu")):
        format = FORMATS[name]

        def narrow(number: reference.Number, format: Format = format, relu: str = relu) -> int:
            result = format.encode(number)
            if format.decode(result).is_infinite:
                result -= 1
            return clamp(format, result, relu=bool(relu))

        def widen(bits: int, format: Format = format, relu: str = relu) -> int:
            return clamp(f16, f16.encode(format.decode(bits)), relu=bool(relu))

        variant = f"cvt.rn.satfinite{relu}.{name}x2.f32"
        inputs = _small_floats(f32, 2, variant)
        yield _case(
            variant,
            f"{name}x2",
            "f32",
            inputs,
            lambda a, b, f=narrow: f(FORMATS["f32"].decode(a)) << 8 | f(FORMATS["f32"].decode(b)),
        )
        variant = f"cvt.rn.satfinite{relu}.{name}x2.f16x2"
        halves = _small_floats(f16, 2, variant)
        pairs = [[high << 16 | low] for high, low in halves]
        yield _case(
            variant, f"{name}x2", "f16x2", pairs, lambda a, f=narrow: f(f16.decode(a >> 16)) << 8 | f(f16.decode(a & 0xFFFF))
        )
        variant = f"cvt.rn{relu}.f16x2.{name}x2"
        # All patterns of bits, over the rows and the two bytes, as far as rows go.
        generator = random.Random(variant)
        bytes_ = [generator.randrange(256) for _ in range(2 * ROWS - 8)] + [0x7E, 0x7F, 0xFE, 0xFF, 0x7C, 0x7D, 0, 0x80]
        inputs = [[bytes_[2 * row] << 8 | bytes_[2 * row + 1]] for row in range(ROWS)]
        yield _case(variant, "f16x2", f"{name}x2", inputs, lambda a, f=widen: f(a >> 8) << 16 | f(a & 0xFF))


def _small_floats(format: Format, count: int, seed: str) -> list[list[int]]:
    """Numbers of the sizes that 8 bits can hold, many of them half way between two."""
    generator = random.Random(seed)
    found: list[list[int]] = []
    for _ in range(ROWS - 8):
        row: list[int] = []
        for _ in range(count):
            number = Fraction(generator.randrange(-64, 65), 1) * Fraction(2) ** generator.randrange(-18, 14)
            row.append(format.encode(reference.number(number, zero_is_negative=generator.random() < 0.5)))
        found.append(row)
    return found + operands(format, count, seed)[:8]


def _packed_integers() -> Iterator[Case]:
    def pack(type: str, a: int, b: int, c: int) -> int:
        low, high = _limits(type)
        n = int(type[1:])
        x, y = (min(max(value(operand, "s32"), low), high) & ((1 << n) - 1) for operand in (a, b))
        return (c << 2 * n | x << n | y) & 0xFFFFFFFF

    for type in ("u16", "s16"):
        inputs = _small_integers(2, type)
        yield _case(f"cvt.pack.sat.{type}.s32", "u32", "s32", inputs, lambda a, b, type=type: pack(type, a, b, 0))
    for type in ("u8", "s8", "u4", "s4", "u2", "s2"):
        inputs = _small_integers(3, type)
        yield _case(f"cvt.pack.sat.{type}.s32.b32", "u32", "s32", inputs, lambda a, b, c, type=type: pack(type, a, b, c))


def _small_integers(count: int, type: str) -> list[list[int]]:
    generator = random.Random(f"pack {type}")
    size = 1 << int(type[1:])
    return [[generator.randrange(-size, size) & 0xFFFFFFFF for _ in range(count)] for _ in range(ROWS)]


def all_cases() -> Iterator[Case]:
    for source in (between_integers, from_integers, to_integers, between_floats, packed):
        yield from source()
