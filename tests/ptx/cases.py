"""Describes tests of instructions that compute a register from registers, and runs many of them in one kernel.

A case is one variant with rows of operands and the results that are expected. All cases of a batch are instructions of one
kernel: thread i runs them on their row i.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .harness import Kernel

ROWS = 32
_REGISTERS = {1: "pred", 8: "b16", 16: "b16", 32: "b32", 64: "b64", 128: "b128"}
_HEADER = ".version {version}\n.target {target}\n.address_size 64\n"


@dataclass
class Case:
    """A variant of an instruction.

    Attributes:
        variant: The canonical name of the variant.
        statement: The PTX, with <d>, <a>, <b>, <c>, <e> for the registers. <from> is the address of the operands, 16 bytes
            each; <to> is that of the result, and a statement that has it stores the result itself.
        sizes: Bits of the result and of the operands; 1 for predicates.
        rows: The operands of each row.
        expected: The results, or a function that computes them.
        accepts: Says whether a result is right; None: it must be the expected one.
        target: The oldest architecture that has the variant.
    """

    variant: str
    statement: str
    sizes: tuple[int, ...]
    rows: Sequence[Sequence[int]]
    expected: Sequence[int] | Callable[[], Sequence[int]]
    accepts: Callable[[int, int], bool] | None = None
    target: str = "sm_90"
    registers: dict[str, str] = field(default_factory=dict[str, str])
    group: str = ""
    """Cases of different groups are in different kernels."""


def batches(cases: Iterable[Case], size: int = 120) -> list[list[Case]]:
    """Split cases into kernels: those of one architecture and group together."""
    kinds: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        kinds.setdefault((case.target, case.group), []).append(case)
    return [listed[start : start + size] for listed in kinds.values() for start in range(0, len(listed), size)]


def _bytes(bits: int) -> int:
    return max(bits // 8, 1)


def _load(register: str, bits: int, offset: int) -> list[str]:
    if bits == 1:
        return [f"ld.global.u8 %byte, [%at+{offset}];", f"setp.ne.u16 {register}, %byte, 0;"]
    if bits == 8:
        return [f"ld.global.u8 {register}, [%at+{offset}];"]
    return [f"ld.global.b{bits} {register}, [%at+{offset}];"]


def _store(register: str, bits: int, offset: int) -> list[str]:
    if bits == 1:
        return [f"selp.u16 %byte, 1, 0, {register};", f"st.global.u8 [%to+{offset}], %byte;"]
    if bits == 8:
        return [f"st.global.u8 [%to+{offset}], {register};"]
    return [f"st.global.b{bits} [%to+{offset}], {register};"]


def kernel_text(cases: Sequence[Case]) -> str:
    """Return the PTX of a kernel that runs all cases. A row of a case's operands takes 16 bytes for each."""
    target = cases[0].target
    lines = [
        _HEADER.format(target=target, version="6.3" if target < "sm_70" and len(target) == 5 else "8.8"),
        ".visible .entry cases(.param .u64 inputs, .param .u64 outputs) {",
        ".reg .b32 %thread; .reg .b64 %at, %to, %offset; .reg .b16 %byte;",
        # Each thread has 32 bytes of shared and of local memory.
        f".shared .align 32 .b8 shared_bytes[{32 * ROWS}]; .local .align 32 .b8 local_bytes[32];",
        ".reg .b32 %shared; .reg .b64 %local, %generic_shared, %generic_local;",
        "mov.u32 %thread, %tid.x; mov.u32 %shared, shared_bytes; mad.lo.u32 %shared, %thread, 32, %shared;",
        "cvt.u64.u32 %generic_shared, %shared; cvta.shared.u64 %generic_shared, %generic_shared;",
        "mov.u64 %local, local_bytes; cvta.local.u64 %generic_local, %local;",
        "ld.param.u64 %at, [inputs]; ld.param.u64 %to, [outputs];",
        f"mad.wide.u32 %at, %thread, {16 * _slots(cases)}, %at;",
        f"mad.wide.u32 %to, %thread, {16 * _result_slots(cases)}, %to;",
    ]
    slot = result_slot = 0
    for number, case in enumerate(cases):
        names = dict(zip("dabce", (f"%{letter}{number}" for letter in "dabce"), strict=True))
        places = {"from": ("%at", 16 * slot), "to": ("%to", 16 * result_slot)}
        stores_itself = "<to" in case.statement
        stores = [] if stores_itself else _store(names["d"], case.sizes[0], 16 * result_slot)
        result_slot += _slots_of(case.sizes[0])
        lines.append("{")
        for position, bits in enumerate(case.sizes):
            letter = "dabce"[position] if position < 5 else ""
            if f"<{letter}>" in case.statement:
                lines.append(f".reg .{case.registers.get(letter) or _REGISTERS[bits]} {names[letter]};")
                lines += _load(names[letter], bits, 16 * (slot + position - 1)) if position else []
        slot += len(case.sizes) - 1
        lines += [_fill(case.statement, names, places), *stores, "}"]
    return "\n".join([*lines, "ret;", "}"])


def _fill(statement: str, names: dict[str, str], places: dict[str, tuple[str, int]]) -> str:
    def place(match: re.Match[str]) -> str:
        register, offset = places[match[1]]
        return f"{register}+{offset + int(match[2] or 0)}"

    statement = re.sub(r"<(from|to)>(?:\+(\d+))?", place, statement)
    for letter, name in names.items():
        statement = statement.replace(f"<{letter}>", name)
    return statement


def _slots(cases: Sequence[Case]) -> int:
    return sum(len(case.sizes) - 1 for case in cases)


def _slots_of(bits: int) -> int:
    return -(-bits // 128)


def _result_slots(cases: Sequence[Case]) -> int:
    return sum(_slots_of(case.sizes[0]) for case in cases)


def run(cases: Sequence[Case], kernel: Any = Kernel) -> list[list[int]]:
    """Run the cases in one kernel, and return the results of each."""
    inputs = np.zeros((ROWS, _slots(cases), 16), np.uint8)
    outputs = np.zeros((ROWS, 16 * _result_slots(cases)), np.uint8)
    slot = 0
    for case in cases:
        assert len(case.rows) <= ROWS
        for position, bits in enumerate(case.sizes[1:]):
            for row, operands in enumerate(case.rows):
                data = (operands[position] & ((1 << max(bits, 8)) - 1)).to_bytes(_bytes(bits), "little")
                inputs[row, slot, : len(data)] = np.frombuffer(data, np.uint8)
            slot += 1
    kernel([kernel_text(cases)], "cases").run(1, ROWS, inputs, outputs)
    results: list[list[int]] = []
    start = 0
    for case in cases:
        end = start + _bytes(case.sizes[0])
        results.append([int.from_bytes(outputs[row, start:end].tobytes(), "little") for row in range(len(case.rows))])
        start += 16 * _slots_of(case.sizes[0])
    return results


def failures(cases: Sequence[Case], kernel: Any = Kernel) -> list[str]:
    """Run the cases, translated or by the class of another kernel, and describe each wrong result."""
    found: list[str] = []
    for case, results in zip(cases, run(cases, kernel), strict=True):
        all_expected = case.expected() if callable(case.expected) else case.expected
        for operands, result, expected in zip(case.rows, results, all_expected, strict=True):
            wanted = expected & ((1 << max(case.sizes[0], 8)) - 1) if case.sizes[0] > 1 else expected
            is_right = case.accepts(result, wanted) if case.accepts else result == wanted
            if not is_right:
                shown = ", ".join(f"{operand:#x}" for operand in operands)
                found.append(f"{case.variant} of {shown} is {result:#x}, not {wanted:#x}")
    return found
