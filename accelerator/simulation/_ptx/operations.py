"""How instructions are described: the variants of an opcode, and the C that each becomes.

A pattern is written as in PTX's documentation: ``add{.rnd}{.ftz}{.sat}.f32`` has three optional modifiers. A name that has
choices stands for one of them; any other name stands for itself.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from .syntax import Instruction, Register
from .types import TYPES, PtxType

if TYPE_CHECKING:
    from .code import Code

Choices: TypeAlias = dict[str, str]
"""The modifiers of one variant, by name; "" for one that it lacks."""


class Together(NamedTuple):
    """What the lanes of a warp do together, if all its threads come to the instruction and take part."""

    text: str
    """The C. The registers are arrays, named ``a_`` and the register, with an element for each lane."""
    registers: tuple[Register, ...]


class LaneAccess(NamedTuple):
    """A load or store of which the lanes of a warp first compute all addresses."""

    is_load: bool
    type: PtxType
    elements: int
    """Of each lane."""
    base: Register
    values: tuple[Register, ...]
    """The registers that a store reads."""
    address: str
    """The C of a lane's address."""
    place: Callable[[str], str]
    """Returns the pointer of C to the memory at an address."""
    body: Callable[[Callable[[int], str]], str]
    """Returns the statements for a lane. They access the elements that are named by their numbers."""
    limits: str
    """The arguments of ``are_adjacent`` that say which addresses are known to be right."""
    memory: str
    """The arguments of ``locate_lanes`` that name the memory."""
    log2: int
    number: int
    """Of the instruction, for reports."""


class Waiting(NamedTuple):
    """What an instruction at which lanes wait becomes."""

    before: str
    """Puts the operands where those who do the operation find them."""
    after: str
    """Takes the results."""
    wait: str
    """Why the lane waits: the name of an ``enum wait``."""
    operation: str
    """The name of an ``enum operation``."""
    detail: str = ""
    """A struct of C that describes the operation further: its type and initializer."""
    condition: str = ""
    """If given, the lane waits only if this holds."""
    together: Together | None = None
    """If given, the same in one piece of C."""


Translate: TypeAlias = "Callable[[Code, Instruction, Choices], str | Waiting]"


class Operation(NamedTuple):
    """A variant of an opcode."""

    variant: str
    family: str
    translate: Translate
    choices: Choices
    results: int
    """The number of leading operands that it writes."""
    is_pure: bool
    """Whether its results depend on its operands alone."""
    waits: str
    """"" for most; else ``uniform`` (all threads of a block can do it together) or ``lanes``."""
    polls: bool
    """Whether it reads what other threads write, so that a loop may wait with it."""


_MODIFIER = re.compile(r"\{\.([\w:]+)\}|\.([\w:]+)")


def expand(pattern: str, choices: Mapping[str, str]) -> Iterator[tuple[str, Choices]]:
    """Yield the variants of a pattern, with the modifiers that each has."""
    opcode = pattern[: re.search(r"[.{]|$", pattern).start()]  # type: ignore[union-attr]
    names: list[str] = []
    alternatives: list[list[str]] = []
    for match in _MODIFIER.finditer(pattern):
        name = match[1] or match[2]
        words = choices[name].split() if name in choices else [name]
        names.append(name)
        alternatives.append(["", *words] if match[1] else words)
    for chosen in itertools.product(*alternatives):
        variant = opcode + "".join(f".{word}" for word in chosen if word)
        yield variant, dict(zip(names, chosen, strict=True))


class Table(dict[str, Operation]):
    """The accepted variants of one family of opcodes."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.family = family

    def add(
        self,
        pattern: str,
        translate: Translate,
        choices: Mapping[str, str] = MappingProxyType({}),
        *,
        results: int = 1,
        is_pure: bool = True,
        waits: str = "",
        polls: bool = False,
        **more_choices: str,
    ) -> None:
        """Accept the variants of a pattern."""
        for variant, chosen in expand(pattern, {**choices, **more_choices}):
            if variant in self:
                raise ValueError(f"{variant} is described twice")
            self[variant] = Operation(variant, self.family, translate, chosen, results, is_pure, waits, polls)


_OPERAND = re.compile(r"\b([abce])\b")
_POSITIONS = {"a": 1, "b": 2, "c": 3, "e": 4}


def typed(spec: str, type: PtxType) -> PtxType:
    """Return the type that a rule names: T is the instruction's, U its unsigned one, W one of twice the size."""
    if spec == "T":
        return type
    if spec == "U":
        return TYPES[f"u{type.bits}"]
    if spec == "B":
        return TYPES[f"b{type.bits}"]
    if spec == "W":
        return TYPES[f"{type.name[0]}{type.bits * 2}"]
    return TYPES[spec]


def rule(table: Table, pattern: str, semantics: str, *, types: str = "", operands: str = "T T T T T") -> None:
    """Accept the variants of a pattern whose result is an expression of C.

    Args:
        table: The family's table.
        pattern: The pattern, in which T is the instruction's type.
        semantics: The expression. a, b, c and e are the operands; {T}, {U} and {W} are names of types as in `typed`, {N} is
            the number of bits; other names in braces are modifiers.
        types: The types that T stands for.
        operands: The types of the result and the operands; the last one repeats.
    """
    specs = operands.split()

    def translate(code: Code, instruction: Instruction, chosen: Choices) -> str:
        type = TYPES[chosen["T"]] if "T" in chosen else TYPES["b32"]

        def operand(match: re.Match[str]) -> str:
            position = _POSITIONS[match[1]]
            return code.read(instruction.operands[position], typed(specs[min(position, len(specs) - 1)], type))

        wide = f"{type.name[0]}{type.bits * 2}"
        filled = semantics.format(**{**chosen, "T": type.name, "U": f"u{type.bits}", "W": wide, "N": type.bits})
        return code.write(instruction.operands[0], typed(specs[0], type), _OPERAND.sub(operand, filled))

    table.add(pattern, translate, {"T": types})
