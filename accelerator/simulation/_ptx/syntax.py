"""What a PTX module consists of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from .types import PtxType


class Register(NamedTuple):
    """A virtual register of a function; its name is that of a C variable."""

    name: str
    type: PtxType


class Immediate(NamedTuple):
    """A constant. Floating-point constants are bits: `bits` is their number, 0 for integers."""

    value: int
    bits: int = 0


class Special(NamedTuple):
    """A read-only register such as ``%tid.x``."""

    name: str


class Symbol(NamedTuple):
    """The address of a variable or function, plus an offset; or a label."""

    name: str
    offset: int = 0


class Negated(NamedTuple):
    """A predicate whose complement is read."""

    operand: Register


class Sink(NamedTuple):
    """``_``: a result that nobody needs."""


class Vector(NamedTuple):
    parts: tuple[Operand, ...]


class Pair(NamedTuple):
    """Two results: ``p|q``."""

    first: Operand
    second: Operand


class Address(NamedTuple):
    """``[base + offset]``; the base of an absolute address is an Immediate."""

    base: Operand
    offset: int


Operand: TypeAlias = "Register | Immediate | Special | Symbol | Negated | Sink | Vector | Pair | Address"


class Label(NamedTuple):
    name: str


class Directive(NamedTuple):
    """The targets of an indirect branch, at the label that names them."""

    label: str
    targets: tuple[str, ...]


@dataclass(slots=True)
class Instruction:
    opcode: str
    operands: tuple[Operand, ...]
    text: str
    guard: Register | None = None
    is_guard_negated: bool = False
    file: str = ""
    line: int = 0
    # Of a call:
    results: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()


Statement: TypeAlias = "Instruction | Label | Directive"


@dataclass(slots=True)
class Variable:
    """A variable of a state space. Its name is unique in its function or module."""

    name: str
    space: str
    type: PtxType
    count: int
    """Of elements; 0 for shared memory whose size the launch gives."""
    alignment: int
    initializer: str = ""
    vector: int = 1
    """Elements of which each value consists."""
    linkage: str = ""
    """How other modules see it: "", "extern", "visible", "weak" or "common"."""
    is_managed: bool = False

    @property
    def is_external(self) -> bool:
        return self.linkage == "extern"

    @property
    def size(self) -> int:
        return self.type.bytes * self.count


@dataclass(slots=True)
class Function:
    name: str
    is_entry: bool
    parameters: list[Variable]
    results: list[Variable]
    body: list[Statement] = field(default_factory=list[Statement])
    variables: dict[str, Variable] = field(default_factory=dict[str, Variable])
    """Those declared in its body, by their unique names."""
    thread_limit: int = 0
    required_block: tuple[int, ...] = ()
    uses_clusters: bool = False
