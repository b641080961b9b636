"""Cases of integer arithmetic, logic, shifts, comparisons and moves, with Python's integers as reference."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

from .cases import ROWS, Case
from .reference import signed

ALL = ("u16", "u32", "u64", "s16", "s32", "s64")
_EDGES = (0, 1, 2, 3, 7, 31, 32, 63, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
_WIDE_EDGES = (0x7FFFFFFFFFFFFFFF, 0x8000000000000000, 0xFFFFFFFFFFFFFFFF, 0x100000000, 0x123456789ABCDEF0)


def bits(type: str) -> int:
    return 32 if type.endswith("x2") else int(type[1:])


def value(raw: int, type: str) -> int:
    """Read bits as a type."""
    return signed(raw, bits(type)) if type[0] == "s" else raw & ((1 << bits(type)) - 1)


def rows(widths: Sequence[int], seed: str, count: int = ROWS) -> list[list[int]]:
    """Return operands: edges and random numbers, in combinations that depend on the seed alone."""
    generator = random.Random(seed)
    found: list[list[int]] = []
    for _ in range(count):
        row: list[int] = []
        for width in widths:
            edges = [edge for edge in (*_EDGES, *_WIDE_EDGES) if edge < 1 << width]
            pick = generator.random() if width > 8 else 0
            if pick < 0.5:
                row.append(generator.choice(edges))
            elif pick < 0.6:
                row.append(generator.choice(edges) ^ ((1 << width) - 1))
            else:
                row.append(generator.getrandbits(width) >> generator.choice((0, 0, width // 2, width - 5)))
        found.append(row)
    return found


def case(
    variant: str,
    function: Callable[..., int],
    types: Sequence[str],
    *,
    small: Sequence[int] = (),
    target: str = "sm_90",
) -> Case:
    """Make a case.

    Args:
        variant: The variant, which is also its opcode.
        function: Computes the result from operands that are read as their types.
        types: The types of the result and the operands.
        small: Positions of operands that are small numbers, such as counts of bits.
        target: The oldest architecture that has the variant.
    """
    sizes = tuple(1 if type == "pred" else bits(type) for type in types)
    generated = rows([size for size in sizes[1:]], variant)
    generator = random.Random(variant + "small")
    for row in generated:
        for position in small:
            row[position] = generator.choice((0, 1, 3, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 200, 255, 256, 1000))
    expected = [
        function(*(raw if type == "pred" else value(raw, type) for raw, type in zip(row, types[1:], strict=True)))
        for row in generated
    ]
    text = ", ".join(f"<{letter}>" for letter in "dabce"[: len(types)])
    return Case(variant, f"{variant} {text};", sizes, generated, expected, target=target)


def _clamp(number: int, low: int, high: int) -> int:
    return min(max(number, low), high)


def _s32(number: int) -> int:
    return _clamp(number, -(2**31), 2**31 - 1)


def _quotient(a: int, b: int) -> int:
    """Truncate toward zero; division by zero gives all ones."""
    if b == 0:
        return -1
    size = abs(a) // abs(b)
    return size if (a < 0) == (b < 0) else -size


def _remainder(a: int, b: int) -> int:
    """Division by zero gives all ones."""
    return -1 if b == 0 else a - b * _quotient(a, b)


def _halves(function: Callable[[int, int], int], type: str) -> Callable[[int, int], int]:
    def both(a: int, b: int) -> int:
        result = 0
        for shift in (0, 16):
            x, y = (value(operand >> shift, f"{type}16") for operand in (a, b))
            result |= (function(x, y) & 0xFFFF) << shift
        return result

    return both


def arithmetic() -> Iterator[Case]:
    for type in ALL:
        n = bits(type)
        wide = f"{type[0]}{2 * n}"
        same = (type, type, type)
        yield case(f"add.{type}", lambda a, b: a + b, same)
        yield case(f"sub.{type}", lambda a, b: a - b, same)
        yield case(f"mul.lo.{type}", lambda a, b: a * b, same)
        yield case(f"mul.hi.{type}", lambda a, b, n=n: a * b >> n, same)
        yield case(f"mad.lo.{type}", lambda a, b, c: a * b + c, (*same, type))
        yield case(f"mad.hi.{type}", lambda a, b, c, n=n: (a * b >> n) + c, (*same, type))
        yield case(f"sad.{type}", lambda a, b, c: abs(a - b) + c, (*same, type))
        yield case(f"div.{type}", _quotient, same)
        yield case(f"rem.{type}", _remainder, same)
        yield case(f"min.{type}", min, same)
        yield case(f"max.{type}", max, same)
        if n < 64:
            yield case(f"mul.wide.{type}", lambda a, b: a * b, (wide, type, type))
            yield case(f"mad.wide.{type}", lambda a, b, c: a * b + c, (wide, type, type, wide))
        if type[0] == "s":
            yield case(f"abs.{type}", abs, (type, type))
            yield case(f"neg.{type}", lambda a: -a, (type, type))
    yield case("add.sat.s32", lambda a, b: _s32(a + b), ("s32",) * 3)
    yield case("sub.sat.s32", lambda a, b: _s32(a - b), ("s32",) * 3)
    yield case("mad.hi.sat.s32", lambda a, b, c: _s32((a * b >> 32) + c), ("s32",) * 4)
    yield case("min.relu.s32", lambda a, b: max(min(a, b), 0), ("s32",) * 3)
    yield case("max.relu.s32", lambda a, b: max(a, b, 0), ("s32",) * 3)
    for type in ("u", "s"):
        same = ("b32",) * 3
        yield case(f"add.{type}16x2", _halves(lambda a, b: a + b, type), same)
        yield case(f"min.{type}16x2", _halves(min, type), same)
        yield case(f"max.{type}16x2", _halves(max, type), same)
    yield case("min.relu.s16x2", _halves(lambda a, b: max(min(a, b), 0), "s"), ("b32",) * 3)
    yield case("max.relu.s16x2", _halves(lambda a, b: max(a, b, 0), "s"), ("b32",) * 3)
    yield from _products_of_24_bits()
    yield from _dot_products()
    yield from _carries()


def _products_of_24_bits() -> Iterator[Case]:
    for type in ("u32", "s32"):

        def low(a: int, type: str = type) -> int:
            return signed(a, 24) if type == "s32" else a & 0xFFFFFF

        yield case(f"mul24.lo.{type}", lambda a, b, low=low: low(a) * low(b), (type,) * 3)
        yield case(f"mul24.hi.{type}", lambda a, b, low=low: low(a) * low(b) >> 16, (type,) * 3)
        yield case(f"mad24.lo.{type}", lambda a, b, c, low=low: low(a) * low(b) + c, (type,) * 4)
        yield case(f"mad24.hi.{type}", lambda a, b, c, low=low: (low(a) * low(b) >> 16) + c, (type,) * 4)
    yield case("mad24.hi.sat.s32", lambda a, b, c: _s32((signed(a, 24) * signed(b, 24) >> 16) + c), ("s32",) * 4)


def _parts(word: int, size: int, type: str) -> list[int]:
    return [value(word >> shift, f"{type[0]}{size}") for shift in range(0, 32, size)]


def _dot_products() -> Iterator[Case]:
    for x, y in itertools.product(("u32", "s32"), repeat=2):
        c = "s32" if "s32" in (x, y) else "u32"

        def four(a: int, b: int, c: int, x: str = x, y: str = y) -> int:
            return c + sum(p * q for p, q in zip(_parts(a, 8, x), _parts(b, 8, y), strict=True))

        yield case(f"dp4a.{x}.{y}", four, ("b32", "b32", "b32", c))
        for half, first in (("lo", 0), ("hi", 2)):

            def two(a: int, b: int, c: int, x: str = x, y: str = y, first: int = first) -> int:
                return c + sum(p * q for p, q in zip(_parts(a, 16, x), _parts(b, 8, y)[first:], strict=False))

            yield case(f"dp2a.{half}.{x}.{y}", two, ("b32", "b32", "b32", c))


def _carries() -> Iterator[Case]:
    """The carry is read by what follows: where an instruction sets it, the result is combined with it."""
    for type in ("u32", "s32", "u64", "s64"):
        n = bits(type)
        mask = (1 << n) - 1

        def seen(total: int, suffix: str, inverts: bool = False, n: int = n) -> int:
            return total ^ (total >> n & 1 ^ inverts) if suffix else total

        for name, sign in (("add", 1), ("sub", -1)):

            def total(a: int, b: int, carry: int = 0, sign: int = sign) -> int:
                return a + sign * (b + carry)

            first = functools.partial(seen, suffix=".cc", inverts=name == "sub")  # addc sees the complement of the borrow
            yield _carry_case(type, f"{name}.cc.{type} <d>, <a>, <b>;", lambda a, b, f=total, g=first: g(f(a, b)), 2)
            for suffix in ("", ".cc"):

                def chained(a: int, b: int, c: int, total=total, suffix: str = suffix, n: int = n, first=first) -> int:
                    result = total(b, c, total(a, b) >> n & 1)
                    return first(result) if suffix else result

                text = f"{name}.cc.{type} %rest, <a>, <b>; {name}c{suffix}.{type} <d>, <b>, <c>;"
                yield _carry_case(type, text, chained, 3)
        for half in ("lo", "hi"):

            def product(a: int, b: int, half: str = half, type: str = type, n: int = n, mask: int = mask) -> int:
                whole = value(a, type) * value(b, type)
                return (whole >> n if half == "hi" else whole) & mask

            yield _carry_case(
                type, f"mad.{half}.cc.{type} <d>, <a>, <b>, <c>;", lambda a, b, c, f=product: seen(f(a, b) + c, ".cc"), 3
            )
            for suffix in ("", ".cc"):

                def carried(a: int, b: int, c: int, product=product, suffix: str = suffix, n: int = n) -> int:
                    return seen(product(a, b) + c + (b + c >> n & 1), suffix)

                text = f"add.cc.u{n} %rest, <b>, <c>; madc.{half}{suffix}.{type} <d>, <a>, <b>, <c>;"
                yield _carry_case(type, text, carried, 3)


def _carry_case(type: str, text: str, function: Callable[..., int], count: int) -> Case:
    """Make a case of the last instruction of a text; if it sets the carry, this is combined with the result."""
    n = bits(type)
    variant = text.rstrip(";").split("; ")[-1].split()[0]
    made = case(variant, function, (f"b{n}",) * (count + 1))
    if ".cc" in variant:
        text += f" addc.u32 %carry, 0, 0; cvt.u{n}.u32 %rest, %carry; xor.b{n} <d>, <d>, %rest;"
    made.statement = f"{{ .reg .b{n} %rest; .reg .u32 %carry; {text} }}"
    return made


def _highest(a: int, width: int, is_signed: bool, counts_shifts: bool) -> int:
    if is_signed and a < 0:
        a = ~a
    a &= (1 << width) - 1
    if a == 0:
        return 0xFFFFFFFF
    return width - a.bit_length() if counts_shifts else a.bit_length() - 1


def _field(a: int, position: int, length: int, width: int, is_signed: bool) -> int:
    """bfe as PTX's documentation computes it, bit by bit."""
    last = width - 1
    position, length = _place(position, width), _place(length, width)
    sign = a >> min(position + length - 1, last) & 1 if is_signed and length else 0
    result = 0
    for i in range(width):
        bit = a >> (position + i) & 1 if i < length and position + i <= last else sign
        result |= bit << i
    return result


def _place(number: int, width: int) -> int:
    """Restrict a position or a length to 8 bits: a GPU takes the low ones, but clamps those of 64-bit fields."""
    return number & 255 if width == 32 else min(number, 255)


def _inserted(a: int, b: int, position: int, length: int, width: int) -> int:
    position, length = _place(position, width), _place(length, width)
    for i in range(length):
        if position + i < width:
            b = (b & ~(1 << (position + i))) | ((a >> i & 1) << (position + i))
    return b


def _nth_set(mask: int, base: int, offset: int) -> int:
    if offset == 0:
        return base if mask >> base & 1 else 0xFFFFFFFF
    count, step = abs(offset) - 1, 1 if offset > 0 else -1
    position = base
    while 0 <= position < 32:
        if mask >> position & 1:
            if count == 0:
                return position
            count -= 1
        position += step
    return 0xFFFFFFFF


def _extended(a: int, b: int, is_signed: bool, clamps: bool) -> int:
    low, too_large = b & 31, clamps and b >= 32
    mask = 0 if too_large else 0xFFFFFFFF << low
    sign = 0 if low == 0 or too_large or not is_signed else a >> (low - 1) & 1
    return (a & ~mask) | (mask if sign else 0)


def _mask(a: int, b: int, clamps: bool) -> int:
    first, count = a & 31, b & 31
    mask0, total = 0xFFFFFFFF << first, first + count
    mask1 = 0xFFFFFFFF << total
    if clamps and a >= 32:
        mask0 = 0
    if total >= 32 or (clamps and (a >= 32 or b >= 32)):
        mask1 = 0
    elif count == 0:
        mask1 = 0xFFFFFFFF
    return mask0 & ~mask1 & 0xFFFFFFFF


def _permuted(a: int, b: int, selectors: Sequence[int]) -> int:
    source = (a | b << 32).to_bytes(8, "little")
    result = 0
    for position, selector in enumerate(selectors):
        byte = source[selector & 7]
        if selector & 8:
            byte = 0xFF if byte & 0x80 else 0
        result |= byte << 8 * position
    return result


_MODES = {  # for each control, the selectors of the bytes 3, 2, 1 and 0
    "f4e": ((3, 2, 1, 0), (4, 3, 2, 1), (5, 4, 3, 2), (6, 5, 4, 3)),
    "b4e": ((5, 6, 7, 0), (6, 7, 0, 1), (7, 0, 1, 2), (0, 1, 2, 3)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((3, 2, 1, 0), (3, 2, 1, 1), (3, 2, 2, 2), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (1, 1, 1, 0), (2, 2, 1, 0), (3, 2, 1, 0)),
    "rc16": ((1, 0, 1, 0), (3, 2, 3, 2), (1, 0, 1, 0), (3, 2, 3, 2)),
}


def bit_operations() -> Iterator[Case]:
    for n in (32, 64):
        word = f"b{n}"
        yield case(f"popc.{word}", lambda a: a.bit_count(), ("u32", word))
        yield case(f"clz.{word}", lambda a, n=n: n - a.bit_length(), ("u32", word))
        yield case(f"brev.{word}", lambda a, n=n: int(f"{a:0{n}b}"[::-1], 2), (word, word))
        for kind in "us":
            is_signed = kind == "s"
            for suffix in ("", ".shiftamt"):
                yield case(
                    f"bfind{suffix}.{kind}{n}",
                    lambda a, n=n, s=is_signed, shifts=bool(suffix): _highest(a, n, s, shifts),
                    ("u32", f"{kind}{n}"),
                )
            yield case(
                f"bfe.{kind}{n}",
                lambda a, b, c, n=n, s=is_signed: _field(a, b, c, n, s),
                (word, word, "u32", "u32"),
                small=(1, 2),
            )
        yield case(
            f"bfi.{word}", lambda a, b, c, e, n=n: _inserted(a, b, c, e, n), (word, word, word, "u32", "u32"), small=(2, 3)
        )
    yield _case_of_fns()
    for clamps, mode in ((True, "clamp"), (False, "wrap")):
        for kind in "us":
            yield case(
                f"szext.{mode}.{kind}32", lambda a, b, s=kind == "s", c=clamps: _extended(a, b, s, c), ("b32",) * 3, small=(1,)
            )
        yield case(f"bmsk.{mode}.b32", lambda a, b, c=clamps: _mask(a, b, c), ("b32",) * 3, small=(0, 1))

        def count(c: int, clamps: bool = clamps) -> int:
            return min(c, 32) if clamps else c & 31

        yield case(
            f"shf.l.{mode}.b32", lambda a, b, c, count=count: ((b << 32 | a) << count(c)) >> 32, ("b32",) * 4, small=(2,)
        )
        yield case(f"shf.r.{mode}.b32", lambda a, b, c, count=count: (b << 32 | a) >> count(c), ("b32",) * 4, small=(2,))
    yield from _logic()
    yield from _permutations()


def _case_of_fns() -> Case:
    made = case("fns.b32", _nth_set, ("b32", "b32", "u32", "s32"))
    generator = random.Random("fns")
    made.rows = [[generator.getrandbits(32), generator.randrange(32), generator.randrange(-6, 7)] for _ in range(ROWS)]
    made.expected = [_nth_set(*row) for row in made.rows]
    return made


def _logic() -> Iterator[Case]:
    for type in ("pred", "b16", "b32", "b64"):
        yield case(f"and.{type}", lambda a, b: a & b, (type,) * 3)
        yield case(f"or.{type}", lambda a, b: a | b, (type,) * 3)
        yield case(f"xor.{type}", lambda a, b: a ^ b, (type,) * 3)
        yield case(f"not.{type}", (lambda a: 1 - a) if type == "pred" else (lambda a: ~a), (type,) * 2)
        if type != "pred":
            yield case(f"cnot.{type}", lambda a: int(a == 0), (type,) * 2)
            yield case(f"shl.{type}", lambda a, b: a << b if b < 64 else 0, (type, type, "u32"), small=(1,))
    for kind, n in itertools.product("bus", (16, 32, 64)):
        yield case(f"shr.{kind}{n}", lambda a, b: a >> b, (f"{kind}{n}", f"{kind}{n}", "u32"), small=(1,))


def _table(a: int, b: int, c: int, table: int) -> int:
    result = 0
    for i in range(32):
        entry = (a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)
        result |= (table >> entry & 1) << i
    return result


def _permutations() -> Iterator[Case]:
    yield case("prmt.b32", lambda a, b, c: _permuted(a, b, [c >> 4 * i & 15 for i in range(4)]), ("b32",) * 4)
    for mode, selectors in _MODES.items():
        yield case(f"prmt.b32.{mode}", lambda a, b, c, s=selectors: _permuted(a, b, s[c & 3][::-1]), ("b32",) * 4)
    for table in (0x96, 0xE8, 0x1B):
        made = case("lop3.b32", lambda a, b, c, t=table: _table(a, b, c, t), ("b32",) * 4)
        made.statement = f"lop3.b32 <d>, <a>, <b>, <c>, {table:#x};"
        yield made
    for name in ("and", "or"):

        def with_predicate(a: int, b: int, c: int, e: int, name: str = name) -> int:
            result = _table(a, b, c, 0x80)
            flag = (result != 0) & e if name == "and" else (result != 0) | e
            return result ^ flag

        made = case(f"lop3.{name}.b32", with_predicate, ("b32", "b32", "b32", "b32", "pred"))
        made.statement = (
            f"{{ .reg .pred %p; .reg .b32 %flag; lop3.{name}.b32 <d>|%p, <a>, <b>, <c>, 0x80, <e>;"
            " selp.b32 %flag, 1, 0, %p; xor.b32 <d>, <d>, %flag; }"
        )
        yield made


_ORDERS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lo": lambda a, b: a < b,
    "ls": lambda a, b: a <= b,
    "hi": lambda a, b: a > b,
    "hs": lambda a, b: a >= b,
}
LOGIC: dict[str, Callable[[bool, bool], bool]] = {
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "xor": lambda a, b: a != b,
}


def comparisons() -> Iterator[Case]:
    for kind, n in itertools.product("bus", (16, 32, 64)):
        type = f"{kind}{n}"
        orders = {"b": ("eq", "ne"), "s": ("eq", "ne", "lt", "le", "gt", "ge"), "u": tuple(_ORDERS)}[kind]
        for order in orders:
            compare = _ORDERS[order]
            yield from _comparisons(type, order, compare)


def _comparisons(type: str, order: str, compare: Callable[[int, int], bool]) -> Iterator[Case]:
    yield case(f"setp.{order}.{type}", lambda a, b: int(compare(a, b)), ("pred", type, type))
    for target, one in (("u32", 0xFFFFFFFF), ("s32", 0xFFFFFFFF), ("f32", 0x3F800000)):
        yield case(f"set.{order}.{target}.{type}", lambda a, b, one=one: one if compare(a, b) else 0, ("b32", type, type))
    for name, logic in LOGIC.items():

        def both(a: int, b: int, c: int, logic=logic) -> int:
            found = compare(a, b)
            return int(logic(found, bool(c))) | int(logic(not found, bool(c))) << 1

        made = case(f"setp.{order}.{name}.{type}", both, ("b32", type, type, "pred"))
        made.statement = (
            f"{{ .reg .pred %p, %q; .reg .b32 %r; setp.{order}.{name}.{type} %p|%q, <a>, <b>, <c>;"
            " selp.b32 <d>, 1, 0, %p; selp.b32 %r, 2, 0, %q; or.b32 <d>, <d>, %r; }"
        )
        yield made
        for target, one in (("u32", 0xFFFFFFFF), ("s32", 0xFFFFFFFF), ("f32", 0x3F800000)):
            yield case(
                f"set.{order}.{name}.{target}.{type}",
                lambda a, b, c, one=one, logic=logic: one if logic(compare(a, b), bool(c)) else 0,
                ("b32", type, type, "pred"),
            )


def selections() -> Iterator[Case]:
    for kind, n in itertools.product("bus", (16, 32, 64)):
        type = f"{kind}{n}"
        yield case(f"selp.{type}", lambda a, b, c: a if c else b, (type, type, type, "pred"))
        yield case(f"slct.{type}.s32", lambda a, b, c: a if c >= 0 else b, (type, type, type, "s32"))
    for n in (32, 64):
        float_type, word = f"f{n}", f"b{n}"
        for made in (
            case(f"selp.{float_type}", lambda a, b, c: a if c else b, (word, word, word, "pred")),
            case(f"slct.{float_type}.s32", lambda a, b, c: a if c >= 0 else b, (word, word, word, "s32")),
            case(f"mov.{float_type}", lambda a: a, (word, word)),
        ):
            made.registers = {letter: float_type for letter in "dab"}
            yield made
    for type in ("b16", "b32", "b64", "b128", "u16", "u32", "u64", "s16", "s32", "s64"):
        yield case(f"mov.{type}", lambda a: a, (type, type))
    yield case("mov.pred", lambda a: a, ("pred", "pred"))
    yield from _packings()


def _packings() -> Iterator[Case]:
    """mov with vectors: d is made of parts of a, in another order."""
    for whole, count in ((32, 2), (32, 4), (64, 2), (64, 4), (128, 2)):
        part = whole // count

        def rotated(a: int, whole: int = whole, part: int = part) -> int:
            return (a >> part | a << (whole - part)) & ((1 << whole) - 1)

        register = f"b{part}"
        names = [f"%part{index}" for index in range(count)]
        made = case(f"mov.b{whole}", rotated, (f"b{whole}",) * 2)
        made.statement = (
            f"{{ .reg .{register} {', '.join(names)}; mov.b{whole} {{{', '.join(names)}}}, <a>;"
            f" mov.b{whole} <d>, {{{', '.join([*names[1:], names[0]])}}}; }}"
        )
        yield made
