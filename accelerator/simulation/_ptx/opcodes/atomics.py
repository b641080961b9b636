"""atom and red: atomic operations."""

from __future__ import annotations

from ..code import Code
from ..operations import Choices, Table
from ..syntax import Instruction, Operand, Sink, Vector
from ..types import TYPES, PtxType

TABLE = Table("atomics")

# What each operation puts in the place of `old`.
_EXPRESSIONS = {
    "and": "old & {value}",
    "or": "old | {value}",
    "xor": "old ^ {value}",
    "add": "old + {value}",
    "exch": "{value}",
    "min": "old < {value} ? old : {value}",
    "max": "old > {value} ? old : {value}",
    "inc": "old >= {value} ? 0 : old + 1",
    "dec": "old == 0 || old > {value} ? {value} : old - 1",
}
_HALVES = ("f16", "bf16", "f16x2", "bf16x2")
_BUILTINS = ("and", "or", "xor", "add")


def _operation(code: Code, instruction: Instruction, choices: Choices) -> str:
    has_result = instruction.opcode.startswith("atom")
    operands = instruction.operands if has_result else (Sink(), *instruction.operands)
    type = TYPES[choices["T"]]
    target, address = operands[:2]
    space = choices.get("space", "")
    if isinstance(operands[2], Vector):
        return _vector(code, choices, target, address, operands[2], type)
    pointer = code.pointer(address, space, type.bytes)
    values = [code.read(operand, type) for operand in operands[2 : 4 if choices["operation"] == "cas" else 3]]
    return code.write(target, type, _expression(choices, type, pointer, values))


def _expression(choices: Choices, type: PtxType, pointer: str, values: list[str]) -> str:
    """Return the expression of the operation, whose value is the old one."""
    operation = choices["operation"]
    is_alone = choices.get("space") == "shared"
    if operation == "cas":
        if type.bits == 128:
            return f"EXCHANGE_IF_EQUAL_128({pointer}, {values[0]}, {values[1]})"
        return f"EXCHANGE_IF_EQUAL({type.word}, {pointer}, {values[0]}, {values[1]})"
    if operation == "exch" and type.bits == 128:
        return f"EXCHANGE_128({pointer}, {values[0]})"
    if operation in _BUILTINS and type.name[0] in "bus" and type.name not in _HALVES and not is_alone:
        return f"__atomic_fetch_{operation}(({type.word} *)({pointer}), ({type.word}){values[0]}, __ATOMIC_SEQ_CST)"
    macro = "UPDATE_ALONE" if is_alone else "UPDATE_ATOMIC"
    update = _update(
        operation, type, is_global=choices.get("space") == "global", is_generic="space" not in choices or not choices["space"]
    )
    return f"({{ {type.c} value_ = {values[0]}; {macro}({type.c}, {type.word}, {pointer}, {update}); }})"


def _update(operation: str, type: PtxType, *, is_global: bool, is_generic: bool) -> str:
    if type.name in _HALVES:
        return f"add_{type.name}(old, value_)"
    if type.is_float and operation == "add" and type.bits == 32:
        # On global memory, atom.add.f32 flushes subnormal numbers.
        flushed, plain = "canonical_f32(flush(flush(old) + flush(value_)))", "canonical_f32(old + value_)"
        if is_global:
            return flushed
        if is_generic:
            return f"(u64)at_ - (u64)shared < shared_size ? {plain} : {flushed}"
        return plain
    return _EXPRESSIONS[operation].format(value="value_")


def _vector(code: Code, choices: Choices, target: Operand, address: Operand, vector: Vector, type: PtxType) -> str:
    """Each element is updated alone."""
    assert len(vector.parts) == int(choices.get("vector", "v1")[1])
    targets = target.parts if isinstance(target, Vector) else tuple(Sink() for _ in vector.parts)
    pointer = code.pointer(address, choices.get("space", ""), type.bytes * len(vector.parts))
    values: list[str] = []
    updates: list[str] = []
    for index, (part, value) in enumerate(zip(targets, vector.parts, strict=True)):
        # A register may be a result and a later value.
        values.append(f"const {type.c} new_{index} = {code.read(value, type)};")
        updates.append(code.write(part, type, _expression(choices, type, f"to_ + {type.bytes * index}", [f"new_{index}"])))
    return f"{{ char *to_ = {pointer}; {' '.join((*values, *updates))} }}"


def _define(pattern: str, operation: str, types: str, *, only_atom: bool = False) -> None:
    for name, results in (("atom", 1), ("red", 0)):
        if name == "red" and only_atom:
            continue
        TABLE.add(
            pattern.format(name=name),
            _operation,
            results=results,
            is_pure=False,
            polls=name == "atom",
            space="global shared",
            operation=operation,
            T=types,
        )


for _logic in ("and", "or", "xor"):
    _define("{name}{{.space}}.operation.T", _logic, "b32 b64")
_define("{name}{{.space}}.operation.T", "cas", "b16 b32 b64 b128", only_atom=True)
_define("{name}{{.space}}.operation.T", "exch", "b32 b64 b128", only_atom=True)
_define("{name}{{.space}}.operation.T", "add", "u32 s32 u64 f32 f64")
_define("{name}{{.space}}.operation.noftz.T", "add", " ".join(_HALVES))
_define("{name}{{.space}}.operation.T", "inc", "u32")
_define("{name}{{.space}}.operation.T", "dec", "u32")
for _extreme in ("min", "max"):
    _define("{name}{{.space}}.operation.T", _extreme, "u32 s32 u64 s64")
for _name, _results in (("atom", 1), ("red", 0)):
    for _vector_pattern, _types in ((".vector.T", "f32"), (".noftz.vector.T", "f16 bf16 f16x2 bf16x2")):
        for _size in ("v2", "v4", "v8"):
            _allowed = " ".join(name for name in _types.split() if TYPES[name].bytes * int(_size[1]) <= 16)
            if _allowed:
                TABLE.add(
                    f"{_name}.space.operation{_vector_pattern}",
                    _operation,
                    results=_results,
                    is_pure=False,
                    polls=_name == "atom",
                    space="global",
                    operation="add",
                    vector=_size,
                    T=_allowed,
                )
