"""Cases of loads, stores and atomic operations in each state space."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from . import reference
from .cases import ROWS, Case
from .float_cases import edges
from .reference import FORMATS, signed

TYPES = ("b8", "b16", "b32", "b64", "u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "f32", "f64")
# The address of a thread's bytes in each space. A generic address may mean any of them.
PLACES = {
    "": ("%generic_shared", "%generic_local"),
    "shared": ("%shared",),
    "local": ("%local",),
}
_MASK = (1 << 128) - 1


def _bits(type: str) -> int:
    return int(type[1:])


def _random(count: int, seed: str) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.getrandbits(128) for _ in range(count)] for _ in range(ROWS)]


def _register(type: str) -> str:
    """Registers may be wider than what is loaded."""
    return type if type in ("f32", "f64") else "b128" if type == "b128" else "b64" if _bits(type) == 64 else "b32"


def _register_bits(type: str) -> int:
    return 128 if type == "b128" else 64 if _bits(type) == 64 else 32


def _loaded(data: int, type: str, count: int) -> int:
    """The registers after a load: each is extended as the type says."""
    n, width = _bits(type), _register_bits(type)
    result = 0
    for index in range(count):
        part = data >> n * index & ((1 << n) - 1)
        part = signed(part, n) if type[0] == "s" else part
        result |= (part & ((1 << width) - 1)) << width * index
    return result


def _names(count: int) -> str:
    names = [f"%v{index}" for index in range(count)]
    return names[0] if count == 1 else "{" + ", ".join(names) + "}"


def _declare(type: str, count: int) -> str:
    return f".reg .{_register(type)} {', '.join(f'%v{index}' for index in range(count))};"


def _put_registers(type: str, count: int) -> str:
    """Store the registers of a vector as the result."""
    size = _register_bits(type) // 8
    suffix = _register(type) if type in ("f32", "f64") else f"b{8 * size}"
    return " ".join(f"st.global.{suffix} [<to>+{size * index}], %v{index};" for index in range(count))


def vectors(type: str) -> Iterator[tuple[str, int]]:
    yield "", 1
    if type == "b128":
        return
    yield ".v2", 2
    if _bits(type) <= 32:
        yield ".v4", 4


def loads() -> Iterator[Case]:
    for type in (*TYPES, "b128"):
        for vector, count in vectors(type):
            for strength, space in _places():
                if type == "b128" and strength:
                    continue
                variant = f"ld{strength}{space}{vector}.{type}"
                text = f"ld{strength}{'.gpu' if strength else ''}{space}{vector}.{type}"
                for place in PLACES.get(space.removeprefix("."), ()):
                    fill = _fill(place, space)
                    yield _load_case(variant, f"{fill} {text} {_names(count)}, [{place}];", type, count)
                if space in (".global", ""):
                    yield _load_case(variant, f"{text} {_names(count)}, [<from>];", type, count)
            if type != "b128":
                for space in ("", ".global"):
                    text = f"ldu{space}{vector}.{type}"
                    yield _load_case(text, f"{text} {_names(count)}, [<from>];", type, count)


def _places() -> Iterator[tuple[str, str]]:
    for space in ("", ".global", ".shared", ".local"):
        yield "", space
    for space in ("", ".global", ".shared"):
        yield ".relaxed", space


def _fill(place: str, space: str) -> str:
    """Copy the operand into a place."""
    return (
        f"{{ .reg .b64 %x, %y; ld.global.v2.b64 {{%x, %y}}, [<from>];"
        f" st{space}.b64 [{place}], %x; st{space}.b64 [{place}+8], %y; }}"
    )


def _load_case(variant: str, text: str, type: str, count: int) -> Case:
    inputs = _random(1, variant)
    expected = [_loaded(row[0], type, count) for row in inputs]
    statement = f"{{ {_declare(type, count)} {text} {_put_registers(type, count)} }}"
    return Case(variant, statement, (_register_bits(type) * count, 128), inputs, expected)


def stores() -> Iterator[Case]:
    for type in (*TYPES, "b128"):
        for vector, count in vectors(type):
            for strength, space in _places():
                if type == "b128" and strength:
                    continue
                variant = f"st{strength}{space}{vector}.{type}"
                text = f"st{strength}{'.gpu' if strength else ''}{space}{vector}.{type}"
                for place in PLACES.get(space.removeprefix("."), ()):
                    yield _store_case(variant, f"{text} [{place}], {_names(count)};", type, count, place, space)
                if space in (".global", ""):
                    yield _store_case(variant, f"{text} [<to>], {_names(count)};", type, count, "<to>", "")


def _store_case(variant: str, text: str, type: str, count: int, place: str, space: str) -> Case:
    """The place holds the second operand; then the registers, whose high bits must not be written, are those of the first."""
    inputs = _random(2, variant)
    n, width = _bits(type), _register_bits(type)
    expected: list[int] = []
    for registers, before in inputs:
        result = before
        for index in range(count):
            part = registers >> width * index & ((1 << n) - 1)
            mask = ((1 << n) - 1) << n * index
            result = (result & ~mask) | part << n * index
        expected.append(result & _MASK)
    size = width // 8
    suffix = _register(type) if type in ("f32", "f64") else f"b{width}"
    take = " ".join(f"ld.global.{suffix} %v{index}, [<from>+{size * index}];" for index in range(count))
    fill = (
        f"{{ .reg .b64 %x, %y; ld.global.v2.b64 {{%x, %y}}, [<from>+16];"
        f" st{space}.b64 [{place}], %x; st{space}.b64 [{place}+8], %y; }}"
    )
    show = (
        f"{{ .reg .b64 %x, %y; ld{space}.b64 %x, [{place}]; ld{space}.b64 %y, [{place}+8];"
        " st.global.b64 [<to>], %x; st.global.b64 [<to>+8], %y; }"
    )
    statement = f"{{ {_declare(type, count)} {take} {fill} {text} {show} }}"
    return Case(variant, statement, (128, 128, 128), inputs, expected)


# Atomic operations

_HALVES = ("f16", "bf16", "f16x2", "bf16x2")


def _float_sum(type: str, *, flushes: bool) -> Callable[[int, int], int]:
    format = FORMATS[type]

    def total(a: int, b: int) -> int:
        if flushes:
            a, b = format.flush(a), format.flush(b)
        result = format.encode(reference.add(format.decode(a), format.decode(b)))
        return format.flush(result) if flushes else result

    return total


def _half_sum(type: str) -> Callable[[int, int], int]:
    one = _float_sum(type.removesuffix("x2"), flushes=False)
    if not type.endswith("x2"):
        return one
    return lambda a, b: one(a & 0xFFFF, b & 0xFFFF) | one(a >> 16, b >> 16) << 16


def _operations() -> Iterator[tuple[str, str, int, Callable[..., int]]]:
    """Operation with modifiers, type, bits, and what is stored: a function of the old value and the operands."""
    for n in (32, 64):
        mask = (1 << n) - 1
        yield "and", f"b{n}", n, lambda old, b: old & b
        yield "or", f"b{n}", n, lambda old, b: old | b
        yield "xor", f"b{n}", n, lambda old, b: old ^ b
        yield "min", f"u{n}", n, min
        yield "max", f"u{n}", n, max
        yield "min", f"s{n}", n, lambda old, b, n=n: min(signed(old, n), signed(b, n)) & ((1 << n) - 1)
        yield "max", f"s{n}", n, lambda old, b, n=n: max(signed(old, n), signed(b, n)) & ((1 << n) - 1)
        yield "add", f"u{n}", n, lambda old, b, mask=mask: (old + b) & mask
    yield "add", "s32", 32, lambda old, b: (old + b) & 0xFFFFFFFF
    yield "inc", "u32", 32, lambda old, b: 0 if old >= b else old + 1
    yield "dec", "u32", 32, lambda old, b: b if old == 0 or old > b else old - 1
    for n in (32, 64, 128):
        yield "exch", f"b{n}", n, lambda old, b: b
    for n in (16, 32, 64, 128):
        yield "cas", f"b{n}", n, lambda old, b, c: c if old == b else old
    yield "add", "f64", 64, _float_sum("f64", flushes=False)
    for type in _HALVES:
        yield "add.noftz", type, 32 if type.endswith("x2") else 16, _half_sum(type)


def atomics() -> Iterator[Case]:
    for operation, type, n, function in _operations():
        for space in ("", ".global", ".shared"):
            yield from _atomic_cases(operation, type, n, function, space)
    # Single precision is flushed on global memory alone.
    for space in ("", ".global", ".shared"):
        for place, suffix in _atomic_places(space):
            function = _float_sum("f32", flushes=suffix == ".global")
            yield from _atomic_case("add", "f32", 32, function, space, place, suffix)
    yield from _vector_atomics()


def _atomic_places(space: str) -> Iterator[tuple[str, str]]:
    """The addresses to which an operation may apply, and the space to look at them."""
    if space in ("", ".global"):
        yield "<to>+8", ".global"
    if space == "":
        yield "%generic_shared", ""
    if space == ".shared":
        yield "%shared", ".shared"


def _atomic_cases(operation: str, type: str, n: int, function: Callable[..., int], space: str) -> Iterator[Case]:
    for place, suffix in _atomic_places(space):
        yield from _atomic_case(operation, type, n, function, space, place, suffix)


def _atomic_inputs(operation: str, type: str, n: int, count: int) -> list[list[int]]:
    generator = random.Random(f"{operation} {type}")
    mask = (1 << n) - 1
    found: list[list[int]] = []
    for row in range(ROWS):
        values = [generator.getrandbits(n) for _ in range(count)]
        if type in FORMATS or type.removesuffix("x2") in FORMATS:
            format = FORMATS[type.removesuffix("x2")]
            listed = edges(format)
            values = [generator.choice(listed) if row % 2 else value for value in values]
            if type.endswith("x2"):
                values = [value & 0xFFFF | generator.choice(listed) << 16 for value in values]
        elif row % 3 == 0:
            values = [generator.choice((0, 1, 2, 3, mask, mask >> 1, (mask >> 1) + 1)) for _ in range(count)]
        if operation == "cas" and row % 2:
            values[1] = values[0]
        found.append(values)
    return found


def _is_nan(bits: int, type: str) -> bool:
    name = type.removesuffix("x2")
    if name not in FORMATS:
        return False
    format = FORMATS[name]
    parts = [bits & ((1 << format.bits) - 1), bits >> format.bits] if type.endswith("x2") else [bits]
    return any(format.decode(part).is_nan for part in parts)


def _atomic_case(
    operation: str, type: str, n: int, function: Callable[..., int], space: str, place: str, look: str
) -> Iterator[Case]:
    """The result is the old value in the low half and the new one in the high half; of 128 bits, both combined."""
    count = 3 if operation == "cas" else 2
    inputs = _atomic_inputs(operation, type, n, count)
    inputs = [row for row in inputs if not _is_nan(function(*row), type)]
    head, _, modifiers = operation.partition(".")
    suffix = f".{head}{f'.{modifiers}' if modifiers else ''}.{type}"
    register = type if type in ("f32", "f64") else f"b{n}"
    take = " ".join(f"ld.global.b{n} %{'xyz'[index]}, [<from>+{16 * index}];" for index in range(count))
    declare = f".reg .{register} %x, %y, %z, %old, %new;"
    operands = ", ".join(f"%{letter}" for letter in "yz"[: count - 1])
    wide = n == 128
    place = "<to>" if wide and place == "<to>+8" else place
    for name in ("atom", "red") if operation not in ("cas", "exch") else ("atom",):
        text = f"{name}{space}{suffix}"
        result = "%old, " if name == "atom" else ""
        if wide:
            show = (
                f"ld{look}.b128 %new, [{place}]; {{ .reg .b64 %p, %q, %r, %s;"
                " mov.b128 {%p, %q}, %old; mov.b128 {%r, %s}, %new;"
                " xor.b64 %p, %p, %r; xor.b64 %q, %q, %s; st.global.v2.b64 [<to>], {%p, %q}; }"
            )
            expected = [row[0] ^ function(*row) for row in inputs]
        else:
            zero = " ".join(f"st.global.b64 [<to>+{8 * index}], 0;" for index in range(2 if place != "<to>+8" else 1))
            old = f"st.global.b{n} [<to>], %old;" if name == "atom" else ""
            show = f"ld{look}.b{n} %new, [{place}]; {zero} {old} st.global.b{n} [<to>+8], %new;"
            expected = [(row[0] if name == "atom" else 0) | function(*row) << 64 for row in inputs]
        clear = "st.global.b64 [<to>+8], 0;" if place == "<to>+8" else ""
        statement = f"{{ {declare} {take} {clear} st{look}.b{n} [{place}], %x; {text} {result}[{place}], {operands}; {show} }}"
        sizes = (128, *[128] * count)
        yield Case(text, statement, sizes, inputs, expected)


def _vector_atomics() -> Iterator[Case]:
    """Each element is added alone."""
    for type, modifiers in (("f32", ""), *((half, ".noftz") for half in _HALVES)):
        n = 32 if type in ("f32", "f16x2", "bf16x2") else 16
        one = _float_sum("f32", flushes=True) if type == "f32" else _half_sum(type)
        for count in (2, 4, 8):
            if n * count > 128:
                continue
            yield from _vector_case(type, modifiers, n, count, one)


def _vector_case(type: str, modifiers: str, n: int, count: int, one: Callable[[int, int], int]) -> Iterator[Case]:
    rows = [_atomic_inputs(f"vector {index}", type, n, 2) for index in range(count)]
    inputs: list[list[int]] = []
    expected_new: list[int] = []
    for row in range(ROWS):
        parts = [rows[index][row] for index in range(count)]
        if any(_is_nan(one(*part), type) for part in parts):
            continue
        inputs.append([sum(part[side] << n * index for index, part in enumerate(parts)) for side in (0, 1)])
        expected_new.append(sum(one(*part) << n * index for index, part in enumerate(parts)))
    register = "f32" if type == "f32" else f"b{n}"
    olds = ", ".join(f"%o{index}" for index in range(count))
    adds = ", ".join(f"%v{index}" for index in range(count))
    take = " ".join(f"ld.global.{register} %v{index}, [<from>+{16 + n // 8 * index}];" for index in range(count))
    fill = "{ .reg .b64 %x, %y; ld.global.v2.b64 {%x, %y}, [<from>]; st.global.v2.b64 [<to>], {%x, %y}; }"
    declare = f".reg .{register} {olds}; .reg .{register} {adds};"
    for name in ("atom", "red"):
        variant = f"{name}.global.add{modifiers}.v{count}.{type}"
        result = f"{{{olds}}}, " if name == "atom" else ""
        # atom: the old values are stored over the new ones, which the case of red looks at.
        show = " ".join(f"st.global.{register} [<to>+{n // 8 * index}], %o{index};" for index in range(count))
        statement = f"{{ {declare} {take} {fill} {variant} {result}[<to>], {{{adds}}}; {show if name == 'atom' else ''} }}"
        expected = [row[0] for row in inputs] if name == "atom" else expected_new
        mask = (1 << n * count) - 1
        made = Case(variant, statement, (128, 128, 128), inputs, [each & mask for each in expected])
        made.sizes = (n * count, 128, 128)
        yield made


def all_cases() -> Iterator[Case]:
    for source in (loads, stores, atomics):
        yield from source()
