"""Cases of tensor cores: where each lane's elements lie in the matrices is written as in PTX's documentation.

The rows of a case are the 32 lanes of one warp.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from . import reference
from .cases import Case
from .harness import Kernel
from .reference import FORMATS, Format, signed

LANES = 32
Place = Callable[[int, int], tuple[int, int]]
"""Row and column of an element, from the lane and the element's number."""

_TF32 = Format(8, 23)
_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "f64": 64, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8}
_BITS |= {"s4": 4, "u4": 4, "b1": 1, "s32": 32}


def _decode(bits: int, type: str) -> Fraction:
    if type in ("s8", "s4", "s32"):
        return Fraction(signed(bits, _BITS[type]))
    if type in ("u8", "u4", "b1"):
        return Fraction(bits)
    format = _TF32 if type == "tf32" else FORMATS[type]
    return format.decode(bits).value


def _random(generator: random.Random, type: str) -> int:
    if type in ("s8", "u8", "s4", "u4", "b1"):
        return generator.getrandbits(_BITS[type])
    if type == "s32":
        return generator.randrange(-1000, 1000) & 0xFFFFFFFF
    number = Fraction(generator.randrange(-64, 65), 16)
    if type == "tf32":
        # The low 13 bits of the register are not part of the number.
        return FORMATS["f32"].encode(reference.number(number)) | generator.getrandbits(13)
    return FORMATS[type].encode(reference.number(number))


def _value(bits: int, type: str) -> Fraction:
    return _decode(bits & ~0x1FFF if type == "tf32" else bits, type)


# Layouts of mma.sync, by the documentation: groupID is lane / 4, threadID_in_group is lane % 4.


def _place_a(m: int, k: int, type: str) -> Place:
    bits = _BITS[type]

    def place(lane: int, i: int) -> tuple[int, int]:
        group, thread = lane >> 2, lane % 4
        if bits == 64:
            row = group if m == 8 or i % 2 == 0 else group + 8
            return row, thread + 4 * (i // 2 if m == 16 else i)
        if bits == 32:
            return group + (8 if i in (1, 3) else 0), thread + (4 if i >= 2 else 0)
        per = 32 // bits  # elements of a register
        if m == 8:
            return group, thread * per + i % per
        row = group + 8 * (i // per % 2)
        return row, thread * per + i % per + (4 * per if i >= 2 * per else 0)

    return place


def _place_b(k: int, type: str) -> Place:
    bits = _BITS[type]

    def place(lane: int, i: int) -> tuple[int, int]:
        group, thread = lane >> 2, lane % 4
        if bits >= 32:
            return thread + 4 * i, group
        per = 32 // bits
        return thread * per + i % per + (4 * per if i >= per else 0), group

    return place


def _place_c(lane: int, i: int) -> tuple[int, int]:
    group, thread = lane >> 2, lane % 4
    return group + (8 if i >= 2 else 0), thread * 2 + (i & 1)


def _quad_a(layout: str) -> Place:
    def place(lane: int, i: int) -> tuple[int, int]:
        upper = 0 if lane < 16 else 4
        return (lane % 4 + upper, i) if layout == "row" else (i % 4 + upper, lane % 4)

    return place


def _quad_b(layout: str) -> Place:
    def place(lane: int, i: int) -> tuple[int, int]:
        upper = 0 if lane < 16 else 4
        return (lane % 4, i + upper) if layout == "row" else (i, lane % 4 + upper)

    return place


def _quad_c(type: str) -> Place:
    def place(lane: int, i: int) -> tuple[int, int]:
        upper = 0 if lane < 16 else 4
        if type == "f16":
            return lane % 4 + upper, i
        return (lane & 1) + (i & 2) + upper, (i & 4) + (lane & 2) + (i & 1)

    return place


class Matrices:
    """The elements of a warp's fragments, and the products of the matrices."""

    def __init__(self, types: dict[str, str], counts: dict[str, int], places: dict[str, Place], seed: str) -> None:
        generator = random.Random(seed)
        self.types = types
        self.places = places
        self.bits = {
            name: [[_random(generator, types[name]) for _ in range(counts[name])] for _ in range(LANES)] for name in "abc"
        }

    def words(self, name: str, lane: int) -> int:
        """The registers of a lane, one after the other."""
        size = _BITS[self.types[name]]
        return sum(bits << size * index for index, bits in enumerate(self.bits[name][lane]))

    def matrix(self, name: str, lanes: Sequence[int]) -> dict[tuple[int, int], Fraction]:
        found: dict[tuple[int, int], Fraction] = {}
        for lane in lanes:
            for index, bits in enumerate(self.bits[name][lane]):
                place = self.places[name](lane, index)
                assert place not in found
                found[place] = _value(bits, self.types[name])
        return found

    def expected(
        self, lanes: Sequence[int], count: int, k: int, combine: Callable[[Fraction, Fraction], Fraction]
    ) -> dict[int, list[Fraction]]:
        """The elements of d that each lane holds."""
        a, b, c = (self.matrix(name, lanes) for name in "abc")
        return {
            lane: [
                c[place] + sum(combine(a[place[0], step], b[step, place[1]]) for step in range(k))
                for place in (self.places["d"](lane, index) for index in range(count))
            ]
            for lane in lanes
        }


def _product(a: Fraction, b: Fraction) -> Fraction:
    return a * b


def _accepts(type: str, count: int) -> Callable[[int, int], bool]:
    """Accept results that are within two units in the last place of the exact ones; integers must be exact."""
    size = _BITS[type]

    def accepts(result: int, expected: int) -> bool:
        if type == "s32":
            return result == expected
        format = FORMATS[type]
        for index in range(count):
            got, wanted = (bits >> size * index & ((1 << size) - 1) for bits in (result, expected))
            if abs(signed_order(got, size) - signed_order(wanted, size)) > 2:
                return False
            assert not format.decode(got).is_nan
        return True

    return accepts


def signed_order(bits: int, size: int) -> int:
    """Number the floats of a format in the order of their values."""
    sign = 1 << (size - 1)
    return -(bits & (sign - 1)) if bits & sign else bits


def _encode(value: Fraction, type: str, *, saturates: bool) -> int:
    if type == "s32":
        integer = int(value)
        if saturates:
            integer = min(max(integer, -(2**31)), 2**31 - 1)
        return integer & 0xFFFFFFFF
    return FORMATS[type].encode(reference.number(value))


def _registers(name: str, words: int, is_double: bool) -> tuple[str, str]:
    """Declare the registers of a fragment; return the declaration and the vector."""
    count = words // 2 if is_double else words
    names = [f"%{name}{index}" for index in range(count)]
    type = "f64" if is_double else "b32"
    return f".reg .{type} {', '.join(names)};", "{" + ", ".join(names) + "}"


def _statement(variant: str, words: dict[str, int], types: dict[str, str]) -> str:
    """Load the fragments, do the instruction and store the result. The fragments follow each other in slots of 16 bytes."""
    lines: list[str] = []
    vectors: dict[str, str] = {}
    offset = 0
    for name in "abcd":
        is_double = types[name] == "f64"
        register = "f32" if types[name] == "f32" else "f64" if is_double else "b32"
        declare, vectors[name] = _registers(name, words[name], is_double)
        lines.append(declare.replace(".b32", f".{register}"))
        size = 8 if is_double else 4
        if name != "d":
            for index, each in enumerate(vectors[name].strip("{}").split(", ")):
                lines.append(f"ld.global.{register} {each}, [<from>+{offset + size * index}];")
            offset += -(-4 * words[name] // 16) * 16
    lines.append(f"{variant} {vectors['d']}, {vectors['a']}, {vectors['b']}, {vectors['c']};")
    size = 8 if types["d"] == "f64" else 4
    register = "f32" if types["d"] == "f32" else "f64" if types["d"] == "f64" else "b32"
    for index, each in enumerate(vectors["d"].strip("{}").split(", ")):
        lines.append(f"st.global.{register} [<to>+{size * index}], {each};")
    return "{ " + " ".join(lines) + " }"


def _rows(matrices: Matrices, words: dict[str, int]) -> tuple[list[list[int]], int]:
    """The operands of each lane, in slots of 128 bits."""
    rows: list[list[int]] = []
    for lane in range(LANES):
        row: list[int] = []
        for name in "abc":
            whole = matrices.words(name, lane)
            row += [whole >> 128 * slot & ((1 << 128) - 1) for slot in range(-(-words[name] // 4))]
        rows.append(row)
    return rows, len(rows[0])


def mma(
    variant: str,
    shape: tuple[int, int, int],
    types: dict[str, str],
    *,
    target: str = "sm_90",
    saturates: bool = False,
    layouts: tuple[str, str] = ("row", "col"),
    combine: Callable[[Fraction, Fraction], Fraction] = _product,
) -> Case:
    m, n, k = shape
    is_quad = shape == (8, 8, 4) and types["a"] == "f16"
    products = 4 if is_quad else 1
    counts = {
        "a": m * k * products // 32,
        "b": k * n * products // 32,
        "c": m * n * products // 32,
        "d": m * n * products // 32,
    }
    words = {name: max(counts[name] * _BITS[types[name]] // 32, 1) for name in "abcd"}
    if is_quad:
        places = {"a": _quad_a(layouts[0]), "b": _quad_b(layouts[1]), "c": _quad_c(types["c"]), "d": _quad_c(types["d"])}
    else:
        places = {"a": _place_a(m, k, types["a"]), "b": _place_b(k, types["b"]), "c": _place_c, "d": _place_c}
    matrices = Matrices(types, counts, places, variant)
    groups = (
        [[lane for lane in range(LANES) if lane % 16 // 4 == quad] for quad in range(4)] if is_quad else [list(range(LANES))]
    )
    size = _BITS[types["d"]]

    def expected() -> list[int]:
        results: dict[int, list[Fraction]] = {}
        for lanes in groups:
            results |= matrices.expected(lanes, counts["d"], k, combine)
        return [
            sum(_encode(value, types["d"], saturates=saturates) << size * index for index, value in enumerate(results[lane]))
            for lane in range(LANES)
        ]

    rows, slots = _rows(matrices, words)
    sizes = (32 * words["d"], *[128] * slots)
    accepts = _accepts(types["d"], counts["d"])
    return Case(variant, _statement(variant, words, types), sizes, rows, expected, accepts, target)


def _types(a: str, c: str, *, b: str = "", d: str = "") -> dict[str, str]:
    return {"a": a, "b": b or a, "c": c, "d": d or c}


def _parse(shape: str) -> tuple[int, int, int]:
    m, rest = shape[1:].split("n")
    n, k = rest.split("k")
    return int(m), int(n), int(k)


def products() -> Iterator[Case]:
    plain = "mma.sync.aligned.{shape}.row.col.{d}.{a}.{b}.{c}"

    def made(shape: str, types: dict[str, str], pattern: str = plain, **options: object) -> Case:
        return mma(pattern.format(shape=shape, **types), _parse(shape), types, **options)  # type: ignore[arg-type]

    for shape in ("m16n8k8", "m16n8k16"):
        for c in ("f16", "f32"):
            yield made(shape, _types("f16", c))
        yield made(shape, _types("bf16", "f32"))
    for shape in ("m16n8k4", "m16n8k8"):
        yield made(shape, _types("tf32", "f32"))
    for shape in ("m8n8k4", "m16n8k4", "m16n8k8", "m16n8k16"):
        yield made(shape, _types("f64", "f64"))
    for shape, a, b, c in itertools.product(("m16n8k16", "m16n8k32"), ("e4m3", "e5m2"), ("e4m3", "e5m2"), ("f16", "f32")):
        yield made(shape, _types(a, c, b=b), target="sm_100")
    integers = "mma.sync.aligned.{shape}.row.col{satfinite}.{d}.{a}.{b}.{c}"
    for shapes, kinds in (
        (("m8n8k16", "m16n8k16", "m16n8k32"), ("s8", "u8")),
        (("m8n8k32", "m16n8k32", "m16n8k64"), ("s4", "u4")),
    ):
        for shape, a, b, satfinite in itertools.product(shapes, kinds, kinds, ("", ".satfinite")):
            pattern = integers.replace("{satfinite}", satfinite)
            yield made(shape, _types(a, "s32", b=b), pattern, saturates=bool(satfinite))
    for shape, name in itertools.product(("m8n8k128", "m16n8k128", "m16n8k256"), ("xor", "and")):
        combine: Callable[[Fraction, Fraction], Fraction] = (
            (lambda a, b: Fraction(int(a) ^ int(b))) if name == "xor" else (lambda a, b: Fraction(int(a) & int(b)))
        )
        yield made(shape, _types("b1", "s32"), plain + f".{name}.popc", combine=combine)
    quads = "mma.sync.aligned.m8n8k4.{alayout}.{blayout}.{d}.f16.f16.{c}"
    for alayout, blayout, (c, d) in itertools.product(
        ("row", "col"), ("row", "col"), (("f16", "f16"), ("f16", "f32"), ("f32", "f32"))
    ):
        variant = quads.format(alayout=alayout, blayout=blayout, c=c, d=d)
        yield mma(variant, (8, 8, 4), _types("f16", c, d=d), layouts=(alayout, blayout))


def saturations() -> Iterator[Case]:
    """Integer accumulators near the limits: with .satfinite they stay there, without they wrap around."""
    for satfinite in ("", ".satfinite"):
        variant = f"mma.sync.aligned.m16n8k16.row.col{satfinite}.s32.s8.s8.s32"
        case = mma(variant, (16, 8, 16), _types("s8", "s32"), saturates=bool(satfinite))
        rows: list[list[int]] = []
        for lane, row in enumerate(case.rows):
            sign = 0x7F if lane // 4 % 2 else 0x80
            a = int.from_bytes(bytes([sign] * 8), "little")
            limit = 0x7FFFFFFF if sign == 0x7F else 0x80000001
            rows.append([a, int.from_bytes(bytes([0x7F] * 4), "little"), sum(limit << 32 * i for i in range(4))])
            assert len(row) == 3
        expected: list[int] = []
        for lane in range(LANES):
            sign = 127 if lane // 4 % 2 else -128
            total = (0x7FFFFFFF if sign > 0 else -0x7FFFFFFF) + 16 * sign * 127
            expected.append(sum(_encode(Fraction(total), "s32", saturates=bool(satfinite)) << 32 * i for i in range(4)))
        case.rows, case.expected = rows, expected
        yield case


# wmma: PTX does not say which lane has which element, so a program loads, multiplies and stores whole matrices.


@dataclass(frozen=True)
class Wmma:
    """A shape and the types of the matrices."""

    shape: tuple[int, int, int]
    types: tuple[str, str, str, str]
    satfinite: str = ""

    @property
    def name(self) -> str:
        m, n, k = self.shape
        return f"m{m}n{n}k{k}"

    def size(self, matrix: str) -> tuple[int, int]:
        m, n, k = self.shape
        return {"a": (m, k), "b": (k, n)}.get(matrix, (m, n))

    def type(self, matrix: str) -> str:
        return self.types["abcd".index(matrix)]

    def registers(self, matrix: str) -> int:
        """The number of registers of a fragment, as PTX's documentation lists them."""
        rows, columns = self.size(matrix)
        type = self.type(matrix)
        if type == "f16":
            return 4 if matrix in "cd" else 8
        if type == "f64":
            return 2 if matrix in "cd" else 1
        return rows * columns * _BITS[type] // 32 // 32

    def product(self, alayout: str, blayout: str) -> str:
        a, b, c, d = self.types
        types = f"{d}.{c}" if a == "f16" else f"{d}.{a}.{b}.{c}"
        return f"wmma.mma.sync.aligned.{alayout}.{blayout}.{self.name}.{types}{self.satfinite}"

    def move(self, matrix: str, layout: str, space: str) -> str:
        verb = "store" if matrix == "d" else "load"
        place = f".{space}" if space else ""
        return f"wmma.{verb}.{matrix}.sync.aligned.{layout}.{self.name}{place}.{self.type(matrix)}"


LAYOUTS = ("row", "col")
SPACES = ("global", "shared", "")
ROW_ALIGNMENT = 32
"""Bytes. Each row or column of a matrix must be aligned to the size of a fragment, which has at most so many."""


def wmmas() -> list[Wmma]:
    shapes = ((16, 16, 16), (8, 32, 16), (32, 8, 16))
    found = [Wmma(shape, ("f16", "f16", c, d)) for shape in shapes for c in ("f16", "f32") for d in ("f16", "f32")]
    found += [Wmma(shape, ("bf16", "bf16", "f32", "f32")) for shape in shapes]
    found += [
        Wmma(shape, (a, a, "s32", "s32"), satfinite)
        for shape in shapes
        for a in ("s8", "u8")
        for satfinite in ("", ".satfinite")
    ]
    return [*found, Wmma((16, 16, 8), ("tf32", "tf32", "f32", "f32")), Wmma((8, 8, 4), ("f64",) * 4)]


class WmmaProgram:
    """A kernel that does a product in all layouts, with matrices in each space.

    Attributes:
        text: The PTX. Its parameters are the addresses of the matrices and of the results.
        variants: The variants in it.
        memory: The matrices.
    """

    def __init__(self, wmma: Wmma) -> None:
        self.variants: set[str] = set()
        self._wmma = wmma
        generator = random.Random(str(wmma))
        self._bits = {
            name: [[_random(generator, wmma.type(name)) for _ in range(wmma.size(name)[1])] for _ in range(wmma.size(name)[0])]
            for name in "abc"
        }
        self.memory = bytearray()
        self._places = {(name, layout): self._lay_out(name, layout) for name in "abc" for layout in LAYOUTS}
        self.text = self._write()

    def _lead(self, name: str, layout: str) -> int:
        """Return the distance of rows or columns in elements, which is more than their length."""
        rows, columns = self._wmma.size(name)
        per_line = ROW_ALIGNMENT * 8 // _BITS[self._wmma.type(name)]
        return ((columns if layout == "row" else rows) // per_line + 1) * per_line

    def _lay_out(self, name: str, layout: str) -> int:
        """Append a matrix; return where it begins."""
        start = len(self.memory)
        byte = _BITS[self._wmma.type(name)] // 8
        rows, columns = self._wmma.size(name)
        lead = self._lead(name, layout)
        lines = rows if layout == "row" else columns
        part = bytearray(-(-lead * lines * byte // 32) * 32)
        for row, column in itertools.product(range(rows), range(columns)):
            index = row * lead + column if layout == "row" else column * lead + row
            part[index * byte : (index + 1) * byte] = self._bits[name][row][column].to_bytes(byte, "little")
        self.memory += part
        return start

    def _multiply(self) -> list[list[Fraction]]:
        """Return the exact product, the same in all layouts."""
        m, n, k = self._wmma.shape
        value = {name: [[_value(bits, self._wmma.type(name)) for bits in row] for row in self._bits[name]] for name in "abc"}
        return [
            [value["c"][row][column] + sum(value["a"][row][i] * value["b"][i][column] for i in range(k)) for column in range(n)]
            for row in range(m)
        ]

    def _fragment(self, name: str) -> str:
        return "{" + ", ".join(f"%{name}{index}" for index in range(self._wmma.registers(name))) + "}"

    def _write(self) -> str:
        wmma = self._wmma
        lines = [
            ".version 8.8\n.target sm_90\n.address_size 64",
            ".extern .shared .align 32 .b8 matrices[];",
            ".visible .entry product(.param .u64 inputs, .param .u64 outputs) {",
            ".reg .b64 %in, %out, %at, %generic; .reg .b32 %shared, %thread, %word, %end; .reg .pred %more;",
        ]
        for name in "abcd":
            type = wmma.type(name)
            register = type if type in ("f32", "f64") else "b32"
            lines.append(f".reg .{register} {self._fragment(name).strip('{}')};")
        lines += [
            "ld.param.u64 %in, [inputs]; ld.param.u64 %out, [outputs]; mov.u32 %shared, matrices; mov.u32 %thread, %tid.x;",
            "cvt.u64.u32 %generic, %shared; cvta.shared.u64 %generic, %generic; shl.b32 %word, %thread, 2;",
            "copy: cvt.u64.u32 %at, %word; add.u64 %at, %at, %in; ld.global.b32 %end, [%at];",
            "{ .reg .b32 %to; add.u32 %to, %shared, %word; st.shared.b32 [%to], %end; }",
            f"add.u32 %word, %word, 128; setp.lt.u32 %more, %word, {len(self.memory)}; @%more bra copy; bar.sync 0;",
        ]
        for number, (alayout, blayout, layout, space) in enumerate(itertools.product(LAYOUTS, LAYOUTS, LAYOUTS, SPACES)):
            lines += self._one_product(number, alayout, blayout, layout, space)
        return "\n".join([*lines, "ret; }"])

    def _one_product(self, number: int, alayout: str, blayout: str, layout: str, space: str) -> list[str]:
        wmma = self._wmma
        base = {"global": "%in", "shared": "%shared", "": "%generic"}[space]
        lines: list[str] = []
        for name, chosen in (("a", alayout), ("b", blayout), ("c", layout)):
            opcode = wmma.move(name, chosen, space)
            self.variants.add(opcode)
            place = self._places[name, chosen]
            lines.append(f"{opcode} {self._fragment(name)}, [{base}+{place}], {self._lead(name, chosen)};")
        product = wmma.product(alayout, blayout)
        lines.append(f"{product} {self._fragment('d')}, {self._fragment('a')}, {self._fragment('b')}, {self._fragment('c')};")
        self.variants.add(product)
        store = wmma.move("d", layout, space)
        self.variants.add(store)
        m, n, _ = wmma.shape
        size = m * n * _BITS[wmma.type("d")] // 8
        if space == "global":
            return [*lines, f"{store} [%out+{number * size}], {self._fragment('d')};"]
        # The result overwrites the beginning of shared memory, from which it is copied; then the matrices are there again.
        target = "%shared" if space == "shared" else "%generic"
        lines.append(f"{store} [{target}+{len(self.memory)}], {self._fragment('d')}; bar.warp.sync 0xffffffff;")
        lines += [
            f"{{ .reg .b32 %from; .reg .b64 %to; .reg .b32 %value; shl.b32 %word, %thread, 2; again{number}:",
            f"add.u32 %from, %shared, %word; ld.shared.b32 %value, [%from+{len(self.memory)}];",
            "cvt.u64.u32 %to, %word; add.u64 %to, %to, %out;",
            f"st.global.b32 [%to+{number * size}], %value; add.u32 %word, %word, 128;",
            f"setp.lt.u32 %more, %word, {size}; @%more bra again{number}; }} bar.warp.sync 0xffffffff;",
        ]
        return lines

    def run(self, kernel: Any = Kernel) -> list[str]:
        """Run the kernel, and describe each wrong element."""
        wmma = self._wmma
        m, n, _ = wmma.shape
        type = wmma.type("d")
        byte = _BITS[type] // 8
        inputs = np.frombuffer(bytes(self.memory) + bytes(256), np.uint8).copy()
        count = len(LAYOUTS) ** 3 * len(SPACES)
        outputs = np.zeros(m * n * byte * count + 256, np.uint8)
        kernel([self.text], "product").run(1, LANES, inputs, outputs, shared=len(self.memory) + m * n * byte + 256)
        found: list[str] = []
        expected = self._multiply()
        saturates = bool(wmma.satfinite)
        for number, (_, _, layout, _) in enumerate(itertools.product(LAYOUTS, LAYOUTS, LAYOUTS, SPACES)):
            for row, column in itertools.product(range(m), range(n)):
                index = number * m * n + (row * n + column if layout == "row" else column * m + row)
                bits = int.from_bytes(outputs[index * byte : (index + 1) * byte].tobytes(), "little")
                wanted = _encode(expected[row][column], type, saturates=saturates)
                if not _accepts(type, 1)(bits, wanted):
                    found.append(f"{wmma} product {number}, element {row}, {column}: {bits:#x}, not {wanted:#x}")
        return found


# Moves of matrices of 8 x 8 halves


def moves() -> Iterator[Case]:
    """ldmatrix, stmatrix and movmatrix."""
    generator = random.Random("moves")
    for count, trans, space in itertools.product((1, 2, 4), ("", ".trans"), ("", ".shared")):
        rows = [[generator.getrandbits(128)] for _ in range(LANES)]

        def half(row: int, column: int, rows: list[list[int]] = rows) -> int:
            return rows[row][0] >> 16 * column & 0xFFFF

        expected: list[int] = []
        for lane in range(LANES):
            result = 0
            for matrix in range(count):
                row, column = lane // 4, lane % 4 * 2
                first, second = (
                    ((8 * matrix + column, row), (8 * matrix + column + 1, row))
                    if trans
                    else ((8 * matrix + row, column), (8 * matrix + row, column + 1))
                )
                result |= (half(*first) | half(*second) << 16) << 32 * matrix
            expected.append(result)
        names = ", ".join(f"%m{index}" for index in range(count))
        address = "%shared" if space else "%generic_shared"
        variant = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}{space}.b16"
        put = " ".join(f"st.global.b32 [<to>+{4 * index}], %m{index};" for index in range(count))
        text = (
            f"{{ .reg .b32 {names}; .reg .b64 %x, %y; ld.global.v2.b64 {{%x, %y}}, [<from>];"
            f" st.shared.v2.b64 [%shared], {{%x, %y}}; bar.warp.sync 0xffffffff; {variant} {{{names}}}, [{address}];"
            f" bar.warp.sync 0xffffffff; {put} }}"
        )
        yield Case(variant, text, (32 * count, 128), rows, expected)
        yield _store_of_matrices(count, trans, space, generator)
    yield _transposition(generator)


def _store_of_matrices(count: int, trans: str, space: str, generator: random.Random) -> Case:
    rows = [[generator.getrandbits(128)] for _ in range(LANES)]
    memory = [[0] * 8 for _ in range(LANES)]
    for lane in range(LANES):
        for matrix in range(count):
            word = rows[lane][0] >> 32 * matrix & 0xFFFFFFFF
            row, column = lane // 4, lane % 4 * 2
            for i in (0, 1):
                value = word >> 16 * i & 0xFFFF
                if trans:
                    memory[8 * matrix + column + i][row] = value
                else:
                    memory[8 * matrix + row][column + i] = value
    expected = [sum(value << 16 * index for index, value in enumerate(line)) for line in memory]
    names = ", ".join(f"%m{index}" for index in range(count))
    address = "%shared" if space else "%generic_shared"
    variant = f"stmatrix.sync.aligned.m8n8.x{count}{trans}{space}.b16"
    take = " ".join(f"ld.global.b32 %m{index}, [<from>+{4 * index}];" for index in range(count))
    text = (
        f"{{ .reg .b32 {names}; .reg .b64 %x, %y; {take} st.shared.v2.b64 [%shared], {{0, 0}}; bar.warp.sync 0xffffffff;"
        f" {variant} [{address}], {{{names}}}; bar.warp.sync 0xffffffff; ld.shared.v2.b64 {{%x, %y}}, [%shared];"
        " st.global.v2.b64 [<to>], {%x, %y}; }"
    )
    return Case(variant, text, (128, 128), rows, expected)


def _transposition(generator: random.Random) -> Case:
    rows = [[generator.getrandbits(32)] for _ in range(LANES)]

    def half(row: int, column: int) -> int:
        return rows[row * 4 + column // 2][0] >> 16 * (column % 2) & 0xFFFF

    expected = [half(lane % 4 * 2, lane // 4) | half(lane % 4 * 2 + 1, lane // 4) << 16 for lane in range(LANES)]
    variant = "movmatrix.sync.aligned.m8n8.trans.b16"
    return Case(variant, f"{variant} <d>, <a>;", (32, 32), rows, expected)


def all_cases() -> Iterator[Case]:
    for source in (products, saturations, moves):
        yield from source()
