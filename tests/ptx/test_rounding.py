"""Directed rounding beside other arithmetic: random programs, against exact fractions that are rounded once.

The operands of each instruction are results of others, so that a compiler has arithmetic to move.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest

from tests.ptx.float_cases import computations, same_or_nan
from tests.ptx.harness import Kernel
from tests.ptx.programs import HEAD
from tests.ptx.reference import FORMATS, number, signed
from tests.support.simulation import linux_only

pytestmark = [linux_only, pytest.mark.torch_free, pytest.mark.xdist_group("ptx")]

INPUTS, THREADS = 4, 8
MODES = ("rn", "rz", "rm", "rp", "rz", "rm", "rp")


class _UnspecifiedError(Exception):
    pass


@dataclass
class RoundingProgram:
    """A random program: each step computes a register from earlier ones.

    Attributes:
        seed: What it is made from.
        lines: Its PTX.
        types: The type of each register.
        used: The registers that later ones are computed from. The others are stored.
        steps: For each register that is no input, what computes its bits from those of all before.
    """

    seed: str
    lines: list[str] = field(default_factory=list[str])
    types: list[str] = field(default_factory=list[str])
    used: set[int] = field(default_factory=set[int])
    steps: list[Callable[[list[int]], int]] = field(default_factory=list[Callable[[list[int]], int]])

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.types = ["f32", "f64"] * INPUTS
        for _ in range(24):
            self._random.choice((self._arithmetic, self._arithmetic, self._arithmetic, self._conversion, self._integer))()

    def _pick(self, type: str) -> int:
        """Choose an operand, most often one that has no use yet: a compiler moves arithmetic whose result has one use."""
        found = [place for place, each in enumerate(self.types) if each == type]
        unused = [place for place in found if place not in self.used]
        chosen = self._random.choice(unused if unused and self._random.random() < 0.7 else found)
        self.used.add(chosen)
        return chosen

    def _add(self, type: str, line: str, step: Callable[[list[int]], int]) -> None:
        self.lines.append(line.replace("<d>", f"%v{len(self.types)}"))
        self.types.append(type)
        self.steps.append(step)

    def _arithmetic(self) -> None:
        type, mode = self._random.choice(("f32", "f32", "f64")), self._random.choice(MODES)
        format, name = FORMATS[type], self._random.choice(("add", "sub", "mul", "fma", "div", "rcp", "sqrt"))
        count, compute = computations(format)[name]
        operands = [self._pick(type) for _ in range(count)]

        def step(bits: list[int]) -> int:
            return compute([format.decode(bits[operand]) for operand in operands], mode)

        names = ", ".join(f"%v{operand}" for operand in operands)
        self._add(type, f"{name}.{mode}.{type} <d>, {names};", step)

    def _conversion(self) -> None:
        """To a narrower type and back."""
        source, narrow = self._random.choice((("f64", "f32"), ("f32", "f16"), ("f32", "bf16"), ("f64", "f16")))
        mode, operand = self._random.choice(MODES), self._pick(source)

        def step(bits: list[int]) -> int:
            rounded = FORMATS[narrow].encode(FORMATS[source].decode(bits[operand]), mode)
            return rounded if narrow == "f32" else FORMATS["f32"].encode(FORMATS[narrow].decode(rounded))

        convert = f"cvt.{mode}.{narrow}.{source}"
        line = f"{convert} <d>, %v{operand};"
        if narrow != "f32":
            line = f"{{ .reg .b16 %half; {convert} %half, %v{operand}; cvt.f32.{narrow} <d>, %half; }}"
        self._add("f32", line, step)

    def _integer(self) -> None:
        """Of the bits of a double, as an integer with or without a sign."""
        type, sign, mode = self._random.choice(("f32", "f64")), self._random.choice("su"), self._random.choice(MODES)
        operand, format = self._pick("f64"), FORMATS[type]

        def step(bits: list[int]) -> int:
            if FORMATS["f64"].decode(bits[operand]).is_nan:
                raise _UnspecifiedError
            return format.encode(number(Fraction(signed(bits[operand], 64) if sign == "s" else bits[operand])), mode)

        line = f"{{ .reg .b64 %bits; mov.b64 %bits, %v{operand}; cvt.{mode}.{type}.{sign}64 <d>, %bits; }}"
        self._add(type, line, step)

    def _stored(self) -> list[int]:
        return [place for place in range(2 * INPUTS, len(self.types)) if place not in self.used]

    def text(self) -> str:
        """Return the kernel: a thread has 8 bytes for each register, and fills those of its results."""
        size = 8 * len(self.types)
        declarations = [f".reg .{type} %v{place};" for place, type in enumerate(self.types)]
        loads = [f"ld.global.{type} %v{place}, [%at+{8 * place}];" for place, type in enumerate(self.types[: 2 * INPUTS])]
        stores = [f"st.global.{self.types[place]} [%at+{8 * place}], %v{place};" for place in self._stored()]
        body = "\n".join((*loads, *self.lines, *stores))
        return f"""{HEAD}.visible .entry main(.param .u64 memory) {{
            .reg .b64 %at; .reg .b32 %thread; {" ".join(declarations)}
            ld.param.u64 %at, [memory]; mov.u32 %thread, %tid.x; mad.wide.u32 %at, %thread, {size}, %at;
            {body}
            ret; }}"""

    @functools.cached_property
    def expected(self) -> list[list[int]]:
        """The bits of all registers of each thread, or of those before an integer that is made from a NaN."""
        rows: list[list[int]] = []
        for thread in range(THREADS):
            generator = np.random.default_rng([thread, len(self.seed), self.types.count("f32")])
            values = generator.uniform(0.2, 2, 2 * INPUTS) * generator.choice((-1, 1), 2 * INPUTS)
            row = [
                int(np.float32(value).view(np.uint32)) if type == "f32" else int(np.float64(value).view(np.uint64))
                for value, type in zip(values, self.types, strict=False)
            ]
            with contextlib.suppress(_UnspecifiedError):
                for step in self.steps:
                    row.append(step(row))
            rows.append(row)
        return rows

    def failures(self, *flags: str) -> list[str]:
        """Run the program, compiled with these flags, and describe each wrong result."""
        memory = np.zeros((THREADS, len(self.types)), np.uint64)
        memory[:, : 2 * INPUTS] = [row[: 2 * INPUTS] for row in self.expected]
        Kernel([self.text()], "main", flags).run(1, THREADS, memory)
        return [
            f"{self.seed} {flags}, thread {thread}: {self.lines[place - 2 * INPUTS]} {results[place]:#x}, not {row[place]:#x}"
            for thread, (row, results) in enumerate(zip(self.expected, memory.tolist(), strict=True))
            for place in self._stored()
            if place < len(row) and not same_or_nan(FORMATS[self.types[place]])(results[place], row[place])
        ]


@pytest.mark.parametrize("seed", [6, 11])
def test_directed_rounding_is_that_of_one_instruction(seed: int) -> None:
    assert RoundingProgram(f"program {seed}").failures() == []


@pytest.mark.parametrize("flags", [("-O2",), ("-O3", "-mno-fma"), ("-O1",), ("-O0",), ("-O2", "-mno-avx")])
@pytest.mark.parametrize("seed", range(6, 14))
@pytest.mark.slow
def test_directed_rounding_however_it_is_compiled(seed: int, flags: tuple[str, ...]) -> None:
    assert RoundingProgram(f"program {seed}").failures(*flags) == []
