"""The instructions that are translated, one module for each family, and why others are refused."""

from __future__ import annotations

import functools
import re

from ..errors import Refused
from ..operations import Operation
from ..syntax import Instruction, Special
from . import (
    asynchronous,
    atomics,
    barriers,
    comparisons,
    control,
    conversions,
    floats,
    halves,
    integers,
    matrices,
    memory,
    video,
    warps,
)

_MODULES = (
    *(integers, floats, halves, comparisons, conversions, memory, atomics),
    *(control, barriers, warps, matrices, asynchronous, video),
)
_CANONICAL = {
    **dict.fromkeys(("ld", "ldu", "st", "atom", "red"), memory.canonical),
    **dict.fromkeys(("bar", "barrier"), barriers.canonical),
    **dict.fromkeys(("cp", "mbarrier"), asynchronous.canonical),
    **dict.fromkeys(("cvta", "isspacep", "ldmatrix", "stmatrix", "wmma"), memory.without_subspace),
}
# Instructions of which no form is translated, with what they need.
_REFUSED = {
    "wgmma": "wgmma is for one architecture alone",
    "tcgen05": "tcgen05 is for one architecture alone",
    **dict.fromkeys(("tex", "tld4", "txq", "istypep"), "textures are not simulated"),
    **dict.fromkeys(("suld", "sust", "sured", "suq"), "surfaces are not simulated"),
    **dict.fromkeys(("mapa", "getctarank", "clusterlaunchcontrol"), "clusters of blocks are not simulated"),
    **dict.fromkeys(("tensormap",), "tensor maps are not simulated"),
    **dict.fromkeys(("multimem",), "multicast memory is not simulated"),
}


def _merge() -> dict[str, Operation]:
    merged: dict[str, Operation] = {}
    for module in _MODULES:
        for variant, operation in module.TABLE.items():
            if variant in merged:
                raise ValueError(f"{variant} is described twice")
            merged[variant] = operation
    return merged


OPERATIONS = _merge()
"""The accepted variants, by their canonical names."""


def canonical(opcode: str) -> str:
    """Return the name of the variant that does the same, without modifiers that change nothing here."""
    name = opcode.split(".", 1)[0]
    if name == "bar" and opcode.startswith("bar.warp"):
        return opcode
    return _CANONICAL[name](opcode) if name in _CANONICAL else opcode


_IGNORE_NAN = re.compile(
    r"(add|sub|mul|fma|mad|div|rcp|r?sqrt|sin|cos|lg2|ex2|tanh|setp?|testp|min(?!.*xorsign)|max(?!.*xorsign)|cvt(?!.*\.(f64|tf32)\.))"
    r"\..*f32"
)


def ignores_nan(opcode: str) -> bool:
    """Return whether an instruction does the same for every NaN of single precision that it reads."""
    return _IGNORE_NAN.fullmatch(opcode) is not None


_VECTORS = re.compile(
    r"(add|sub|mul|mad)(?!.*\.(r[zmp]|hi|cc|b?f16(x2)?|[su]16x2|f32x2)(\.|$))\..*|fma\.r[nzmp](\.ftz)?(\.sat)?\.f32|fma\.rn\.f64"
    r"|(and|or|xor|not|shl|shr|selp|setp|mov|cvta|createpolicy|neg|abs|lop3|min|max)(?!.*\.(b128|b?f16(x2)?|[su]16x2)(\.|$))\..*"
    r"|(div|rcp|sqrt|rsqrt|ex2)\.(full|approx|rn)(\.ftz)?\.f32"
    r"|cvt\.[us](8|16|32|64)\.[us](8|16|32|64)|cvt\.rn\.f32\.s32|cvt(\.ftz)?(\.sat)?\.f32\.f32"
)
"""Instructions of which the compiler makes vectors. In other loops, one that is none would keep it from the rest."""


def kind_of_loop(instruction: Instruction) -> str:
    """Return the kind of loop over lanes that runs an instruction: `blocks.BlockWriter` says what they are."""
    opcode = instruction.opcode
    if not find(opcode).is_pure or opcode.startswith("call"):
        return "threads"
    if any(isinstance(operand, Special) and re.search("clock|timer", operand.name) for operand in instruction.operands):
        return "threads"
    return "arithmetic" if _VECTORS.fullmatch(opcode) else "slow"


def is_plain_access(opcode: str) -> bool:
    """Return whether an instruction only loads or stores."""
    return opcode.split(".", 1)[0] in ("ld", "ldu", "st")


_TYPE = re.compile(r"(?:[busf]|bf|tf)\d+(?:x\d)?|e\dm\d(?:x\d)?|pred")
_LAYOUTS = ("row", "col")


def _unordered(variant: str) -> tuple[tuple[str, ...], ...]:
    """Return what is alike in all orders of a variant's modifiers: ptxas heeds only those of types and of layouts."""
    name, *words = variant.split(".")
    types = tuple(word for word in words if _TYPE.fullmatch(word))
    layouts = tuple(word for word in words if word in _LAYOUTS)
    return (name,), types, layouts, tuple(sorted(word for word in words if word not in types + layouts))


@functools.cache
def _by_modifiers() -> dict[tuple[tuple[str, ...], ...], Operation]:
    return {_unordered(variant): operation for variant, operation in OPERATIONS.items()}


_found: dict[str, Operation] = {}


def find(opcode: str) -> Operation:
    """Return the description of an opcode.

    Raises:
        Refused: It is not translated.
    """
    operation = _found.get(opcode)
    if operation is None:
        variant = canonical(opcode)
        operation = OPERATIONS.get(variant) or _by_modifiers().get(_unordered(variant))
        if operation is None:
            reason = _REFUSED.get(opcode.split(".", 1)[0])
            raise Refused(f"the instruction {opcode}" + (f": {reason}" if reason else ""))
        _found[opcode] = operation
    return operation


# How many operands instructions have. Others take their operands apart themselves, and refuse those that they do not expect.
_COUNTS = {
    count: frozenset(names.split())
    for count, names in {
        0: "brkpt exit fence griddepcontrol membar ret trap",
        1: "activemask nanosleep pmevent prefetch prefetchu setmaxnreg stackrestore stacksave",
        2: "abs applypriority bfind brev clz cnot cos cvta discard elect ex2 isspacep ld ldmatrix ldu lg2 mov movmatrix neg not"
        " popc rcp red rsqrt sin sqrt st stmatrix tanh testp",
        3: "add addc and atom bmsk copysign div match mul mul24 or redux rem set setp shl shr sub subc szext vabsdiff vadd vmax"
        " vmin vote vset vshl vshr vsub xor",
        4: "bfe dp2a dp4a fma fns mad mad24 madc mma prmt sad selp shf slct vabsdiff2 vabsdiff4",
        5: "bfi lop3 shfl",
    }.items()
}
_COUNT_OF = {name: count for count, names in _COUNTS.items() for name in names}
_LOGIC = frozenset(("and", "or", "xor"))


def check_operands(instruction: Instruction, operation: Operation) -> None:
    """Refuse an instruction with an operand too many or too few."""
    name, *words = operation.variant.split(".")
    count = _COUNT_OF.get(name)
    if name == "cvt":  # into a pair, from two numbers; .pack has a third operand, too
        is_packed = "pack" in words or (words[-2].endswith("x2") and words[-1] == "f32")
        count = 2 + is_packed + (words[-1] == "b32")
    elif name in ("min", "max"):
        count = 3 + (len(instruction.operands) == 4 and words[-1].startswith(("f", "bf")))
    elif name == "alloca":
        count = 2 + (len(instruction.operands) == 3)
    if count is None:
        return
    count += "L2::cache_hint" in instruction.opcode
    count += (name in ("set", "setp", "lop3") and not _LOGIC.isdisjoint(words)) + ("cas" in words)
    count += operation.family == "video" and words[-1] in ("add", "min", "max")
    count -= name in ("vote", "shfl") and "sync" not in words
    if len(instruction.operands) != count:
        raise Refused(f"{instruction.text}, which has {len(instruction.operands)} operands in the place of {count}")
