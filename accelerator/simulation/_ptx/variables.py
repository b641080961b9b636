"""Writes the table of a program's global and constant variables, with their initial values."""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from .constants import parse_constant
from .errors import Refused
from .program import Program
from .syntax import Variable

VARIABLES = "accelerator_variables"
"""The symbol of the table."""

# "generic(name)+8", and "0xFF00(generic(name))" for one of its bytes.
_ADDRESS = re.compile(r"(?:(0x[0-9A-Fa-f]+|\d+)\()?(?:(generic)\()?([A-Za-z_$][\w$]*)\)?\s*(?:\+\s*(\d+))?\)?$")


class _Relocation(NamedTuple):
    """Bytes of a variable that are part of another one's address."""

    offset: int
    target: int
    addend: int
    shift: int
    size: int


def generate_variables(program: Program) -> str:
    """Return the C of the table.

    Raises:
        Refused: An initial value is not understood.
    """
    found = [
        (number, variable)
        for number, module in enumerate(program.modules)
        for variable in module.variables.values()
        if variable.space in ("global", "const") and program.find_variable(number, variable.name) == (number, variable)
    ]
    numbers = {(module, variable.name): index for index, (module, variable) in enumerate(found)}
    lines = ['#include "interface/kernel_runs.h"', ""]
    rows: list[str] = []
    for index, (module, variable) in enumerate(found):
        data, relocations = _evaluate(program, module, variable, numbers)
        data = data.rstrip(b"\0")
        initial = relocated = "0"
        if data:
            lines.append(f"static const uint8_t initial_{index}[] = {{{','.join(map(str, data))}}};")
            initial = f"initial_{index}"
        if relocations:
            items = ", ".join(f"{{{', '.join(map(str, relocation))}}}" for relocation in relocations)
            lines.append(f"static const struct sim_relocation relocations_{index}[] = {{{items}}};")
            relocated = f"relocations_{index}"
        label = program.variable_label(module, variable, "")
        flags = f"{int(variable.space == 'const')}, {int(variable.is_managed)}"
        rows.append(f'{{"{label}", {variable.size}, {initial}, {len(data)}, {relocated}, {len(relocations)}, {flags}}}')
    table = ", ".join([*rows, "{0}"])
    lines.append(f'__attribute__((visibility("default"))) const struct sim_program_variable {VARIABLES}[] = {{{table}}};')
    return "\n".join(lines) + "\n"


def _evaluate(
    program: Program, module: int, variable: Variable, numbers: dict[tuple[int, str], int]
) -> tuple[bytes, list[_Relocation]]:
    """Return a variable's initial bytes, and what must be added to them when the addresses are known."""
    data = bytearray()
    relocations: list[_Relocation] = []
    items = [item.strip() for item in re.sub(r"[{}]", " ", variable.initializer).split(",")]
    items = [item for item in items if item]
    if variable.initializer.count("{") > 1 and len(items) != variable.count:
        raise Refused(f"the initial value of {variable.name}, which leaves elements out")
    for item in items:
        if parse_constant(item) is not None:
            data += _constant_bytes(variable, item)
            continue
        match = _ADDRESS.match(item)
        if match is None:
            raise Refused(f"the initial value {item} of {variable.name}")
        mask, _, name, offset = match.groups()
        shift = _shift_of(int(mask, 0)) if mask else 0
        size = variable.type.bytes
        target = program.find_variable(module, name)
        value = 0
        if target is not None and target[1].space != "shared":
            key = (target[0], target[1].name)
            relocations.append(_Relocation(len(data), numbers[key], int(offset or 0), shift, size))
        elif (function := program.find_function(module, name)) is not None:
            value = program.function_number(*function) >> shift
        else:
            raise Refused(f"the initial value {item} of {variable.name}: no module defines {name}")
        data += (value & (1 << 8 * size) - 1).to_bytes(size, "little")
    if len(data) > variable.size:
        raise Refused(f"the initial value of {variable.name}, which is longer than it")
    return bytes(data), relocations


def _constant_bytes(variable: Variable, item: str) -> bytes:
    constant = parse_constant(item)
    assert constant is not None
    type = variable.type
    value = constant.value
    if constant.bits and constant.bits != type.bits:
        if not (constant.bits == 64 and type.bits == 32):
            raise Refused(f"the initial value {item} of {variable.name}")
        number: float = struct.unpack("<d", struct.pack("<Q", value))[0]
        return struct.pack("<f", number)
    return (value & (1 << type.bits) - 1).to_bytes(type.bytes, "little")


def _shift_of(mask: int) -> int:
    """Return the place of the bits that a mask selects."""
    if mask == 0:
        raise Refused("a mask of no bits")
    return (mask & -mask).bit_length() - 1
