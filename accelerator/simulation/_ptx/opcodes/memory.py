"""Moves, loads, stores and addresses.

Hints do not change values, so `canonical` takes them out of an opcode: cache operators, eviction priorities, prefetches, and
scopes, because each thread sees what others have written wherever they run.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ..code import Code
from ..operations import Choices, LaneAccess, Table
from ..syntax import Address, Immediate, Instruction, Operand, Register, Special, Vector
from ..types import PREDICATE, TYPES, PtxType, bits_type

TABLE = Table("memory")

_TYPES = "b8 b16 b32 b64 u8 u16 u32 u64 s8 s16 s32 s64 f32 f64"
_LARGEST_ACCESS = 16
_HINTS = re.compile(r"\.(?:L[12]::\w+|level::\w+|unified)")
_CACHE_OPERATORS = re.compile(r"\.(?:ca|cg|cs|lu|cv|wb|wt|nc)(?=\.|$)")
_SCOPES = re.compile(r"\.(?:cta|cluster|gpu|sys)(?=\.|$)")
_SPACE = re.compile(r"\.(global|shared(?:::cta|::cluster)?|local|const|param(?:::entry|::func)?)(?=\.|$)")
_STRENGTH = re.compile(r"\.(weak|volatile|relaxed|acquire|release|acq_rel|mmio)(?=\.|$)")


def canonical(opcode: str) -> str:
    """Return the variant of ld, st, atom or red that does the same, with its modifiers in one order."""
    name, _, rest = opcode.partition(".")
    rest = _SCOPES.sub("", _CACHE_OPERATORS.sub("", _HINTS.sub("", f".{rest}")))
    space = _SPACE.search(rest)
    strengths = [strength for strength in _STRENGTH.findall(rest) if strength != "weak"]
    rest = _STRENGTH.sub("", _SPACE.sub("", rest))
    place = "." + space[1].partition(":")[0] if space else ""
    is_own = place == ".local" and strengths == ["volatile"]  # no other thread sees it
    strong = ".relaxed" if strengths and name in ("ld", "st") and not is_own else ""
    return name + strong + place + rest


def without_subspace(opcode: str) -> str:
    """A block is a cluster of its own: .shared::cta and .shared::cluster are .shared."""
    return re.sub(r"::(?:cta|cluster|entry|func)(?=\.|$)", "", opcode)


def _vector(operand: Operand) -> tuple[Operand, ...]:
    return operand.parts if isinstance(operand, Vector) else (operand,)


def _elements(operand: Operand, choices: Choices) -> tuple[Operand, ...]:
    """Return the operands that a load or store moves, as many as its opcode says."""
    elements = _vector(operand)
    assert len(elements) == (2 if "v2" in choices else 4 if "v4" in choices else 1)
    return elements


def _load(code: Code, instruction: Instruction, choices: Choices) -> str:
    type = TYPES[choices["T"]]
    targets = _elements(instruction.operands[0], choices)
    pointer = code.pointer(instruction.operands[1], choices.get("space", ""), type.bytes * len(targets))
    load = f"LOAD_ATOMIC({type.c}, {type.word}, " if choices.get("strength") else f"LOAD({type.c}, "
    if len(targets) == 1:
        return code.write(targets[0], type, f"{load}{pointer})")
    writes = [code.write(target, type, f"{load}from_ + {type.bytes * index})") for index, target in enumerate(targets)]
    return f"{{ const char *from_ = {pointer}; {' '.join(writes)} }}"


def _store(code: Code, instruction: Instruction, choices: Choices) -> str:
    type = TYPES[choices["T"]]
    values = _elements(instruction.operands[1], choices)
    pointer = code.pointer(instruction.operands[0], choices.get("space", ""), type.bytes * len(values))
    store = f"STORE_ATOMIC({type.c}, {type.word}, " if choices.get("strength") else f"STORE({type.c}, "
    if len(values) == 1:
        return f"{store}{pointer}, {code.read(values[0], type)});"
    writes = [f"{store}to_ + {type.bytes * index}, {code.read(value, type)});" for index, value in enumerate(values)]
    return f"{{ char *to_ = {pointer}; {' '.join(writes)} }}"


def _define_accesses() -> None:
    for vector, types in (
        ("", f"{_TYPES} b128"),
        (".v2", _TYPES),
        (".v4", " ".join(name for name in _TYPES.split() if TYPES[name].bytes * 4 <= _LARGEST_ACCESS)),
    ):
        TABLE.add(f"ld{{.space}}{vector}.T", _load, is_pure=False, space="global shared local const param", T=types)
        TABLE.add(f"st{{.space}}{vector}.T", _store, results=0, is_pure=False, space="global shared local param", T=types)
        strong = {"T": types.removesuffix(" b128"), "strength": "relaxed", "space": "global shared"}
        TABLE.add(f"ld.strength{{.space}}{vector}.T", _load, strong, is_pure=False, polls=True)
        TABLE.add(f"st.strength{{.space}}{vector}.T", _store, strong, results=0, is_pure=False)
        TABLE.add(f"ldu{{.space}}{vector}.T", _load, is_pure=False, space="global", T=types.removesuffix(" b128"))


def lane_access(code: Code, instruction: Instruction, choices: Choices) -> LaneAccess | None:
    """Describe a load or store, if lanes can compute all addresses first: their order does not matter."""
    is_load = not instruction.opcode.startswith("st")
    target, source, *_ = instruction.operands
    address, space = source if is_load else target, choices.get("space", "")
    if choices.get("strength") or space not in ("", "global", "const", "shared") or not isinstance(address, Address):
        return None
    base, type = address.base, TYPES[choices["T"]]
    if not isinstance(base, Register) or base.type.bits != (32 if space == "shared" else 64):
        return None
    elements = _elements(target if is_load else source, choices)
    size = type.bytes * len(elements)

    def body(element: Callable[[int], str]) -> str:
        if is_load:
            return " ".join(code.write(each, type, element(index)) for index, each in enumerate(elements))
        return " ".join(f"{element(index)} = {code.read(each, type)};" for index, each in enumerate(elements))

    values = tuple(each for each in elements if isinstance(each, Register))
    value, place, limits, memory = code.lane_access(address, base, space, size)
    return LaneAccess(
        *(is_load, type, len(elements), base, () if is_load else values, value, place, body, limits, memory),
        *(size.bit_length() - 1, code.kernel.access(instruction)),
    )


def _parts_type(type: PtxType, count: int) -> PtxType:
    return bits_type(type.bits // count)


def _mov(code: Code, instruction: Instruction, choices: Choices) -> str:
    """Copies a value, packs the parts of a vector into a register, or unpacks them; the first part is the lowest."""
    type = TYPES[choices["T"]]
    target, source = instruction.operands
    if isinstance(source, Vector):
        part = _parts_type(type, len(source.parts))
        values = [f"({type.word}){code.read(value, part)} << {part.bits * index}" for index, value in enumerate(source.parts)]
        return code.write(target, type, " | ".join(values))
    if isinstance(target, Vector):
        part = _parts_type(type, len(target.parts))
        writes = [
            code.write(value, part, f"({part.word})(whole_ >> {part.bits * index})") for index, value in enumerate(target.parts)
        ]
        return f"{{ {type.word} whole_ = {code.read(source, type)}; {' '.join(writes)} }}"
    return code.write(target, type, code.read(source, type))


def _mov_vector(code: Code, instruction: Instruction, choices: Choices) -> str:
    """Copies element by element, after all have been read."""
    type, count = TYPES[choices["T"]], int(choices["vector"][1])
    target, source = instruction.operands
    if isinstance(source, Special):
        source = Vector(tuple(Special(f"{source.name}.{axis}") for axis in "xyzw"[:count]))
    targets, values = _vector(target), _vector(source)
    assert len(targets) == len(values) == count
    reads = [f"const {type.c} part_{index} = {code.read(value, type)};" for index, value in enumerate(values)]
    writes = [code.write(part, type, f"part_{index}") for index, part in enumerate(targets)]
    return f"{{ {' '.join((*reads, *writes))} }}"


def _mov_predicate(code: Code, instruction: Instruction, choices: Choices) -> str:
    target, source = instruction.operands
    return code.write(target, PREDICATE, code.read(source, PREDICATE))


def _cvta(code: Code, instruction: Instruction, choices: Choices) -> str:
    """Addresses of shared, local and parameter memory are offsets; all others are those of the host."""
    type = TYPES[choices["T"]]
    value = code.read(instruction.operands[1], TYPES["u64"])
    base = _BASES.get(choices["space"])
    if base is None:
        return code.write(instruction.operands[0], type, value)
    if base == "local_base":
        code.uses.add("local")
    sign = "-" if choices.get("to") else "+"
    return code.write(instruction.operands[0], type, f"{value} {sign} (u64){base}")


_BASES = {"shared": "shared", "local": "local_base", "param": "parameters"}


def _isspacep(code: Code, instruction: Instruction, choices: Choices) -> str:
    value = code.read(instruction.operands[1], TYPES["u64"])
    is_shared = f"{value} - (u64)shared < shared_size"
    is_local = f"{value} - (u64)local_base < local_span"
    is_parameter = f"{value} - (u64)parameters < {code.kernel.parameter_size}"  # those of kernels are in the global window
    is_constant = " || ".join(code.constants(value)) if choices["space"] in ("global", "const") else ""
    is_constant = is_constant or "0"
    others = f"{is_shared} || {is_local} || {is_constant}"
    if choices["space"] in ("global", "local"):
        code.uses.add("local")
    expression = {
        "shared": is_shared,
        "local": is_local,
        "param": is_parameter,
        "const": is_constant,
        "global": f"({is_parameter}) || (!({others}) && services->is_global(k, {value}))",
    }[choices["space"]]
    return code.write(instruction.operands[0], PREDICATE, expression)


def _nothing(code: Code, instruction: Instruction, choices: Choices) -> str:
    return ";"


def _define_addresses() -> None:
    for direction in ("", ".to"):
        TABLE.add(f"cvta{direction}.space.T", _cvta, space="global shared const param", T="u64")
        TABLE.add(f"cvta{direction}.space.T", _cvta, is_pure=False, space="local", T="u64")  # a thread's own memory
    TABLE.add("isspacep.space", _isspacep, space="shared")
    TABLE.add("isspacep.space", _isspacep, is_pure=False, space="global local const param")  # a thread's own local memory
    for hint in ("prefetch{.space}.level", "prefetchu.L1", "discard{.global}.L2", "applypriority{.global}.L2::evict_normal"):
        TABLE.add(hint, _nothing, results=0, is_pure=False, space="global local", level="L1 L2")


def _createpolicy(code: Code, instruction: Instruction, choices: Choices) -> str:
    """A policy is a hint: its value is passed to instructions that do not read it."""
    return code.write(instruction.operands[0], TYPES["b64"], "0")


def _stack(code: Code, instruction: Instruction, choices: Choices) -> str:
    """alloca, stacksave and stackrestore: the stack grows upwards in the thread's local memory."""
    code.uses.update(("local", "call"))
    type = TYPES[choices["T"]]
    if instruction.opcode.startswith("stacksave"):
        return code.write(instruction.operands[0], type, "(u64)t->local_top")
    if instruction.opcode.startswith("stackrestore"):
        return f"t->local_top = (char *){code.read(instruction.operands[0], TYPES['u64'])};"
    size = code.read(instruction.operands[1], TYPES["u64"])
    third = instruction.operands[2:]
    alignment = third[0].value if third and isinstance(third[0], Immediate) else 8
    return code.write(instruction.operands[0], type, f"(u64)(allocate_on_stack(t, {size}, {alignment}) - local_base)")


_define_accesses()
_define_addresses()
TABLE.add("mov.T", _mov, T="b16 b32 b64 b128 u16 u32 u64 s16 s32 s64 f32 f64")
TABLE.add("mov.vector.T", _mov_vector, vector="v2", T="b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64")
TABLE.add("mov.vector.T", _mov_vector, vector="v4", T="b16 b32 u16 u32 s16 s32 f32")
TABLE.add("mov.pred", _mov_predicate)
TABLE.add(
    "createpolicy.fractional.first{.second}.b64",
    _createpolicy,
    first="L2::evict_last L2::evict_normal L2::evict_first L2::evict_unchanged",
    second="L2::evict_first L2::evict_unchanged",
)
TABLE.add("createpolicy.cvt.L2.b64", _createpolicy)
TABLE.add("alloca.T", _stack, is_pure=False, T="u64")
TABLE.add("stacksave.T", _stack, is_pure=False, T="u64")
TABLE.add("stackrestore.T", _stack, results=0, is_pure=False, T="u64")
