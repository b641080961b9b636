"""Scalar video instructions: arithmetic that saturates and is combined with a third operand. Parts of registers are refused."""

from __future__ import annotations

from ..code import Code
from ..operations import Choices, Table
from ..syntax import Instruction
from ..types import TYPES

TABLE = Table("video")

# On numbers of 64 bits, in which nothing overflows.
_EXPRESSIONS = {
    "vadd": "{a} + {b}",
    "vsub": "{a} - {b}",
    "vabsdiff": "({a} < {b} ? {b} - {a} : {a} - {b})",
    "vmin": "({a} < {b} ? {a} : {b})",
    "vmax": "({a} > {b} ? {a} : {b})",
    "vshl.clamp": "({b} < 32 ? {a} << {b} : 0)",
    "vshl.wrap": "{a} << ({b} & 31)",
    "vshr.clamp": "{a} >> ({b} < 32 ? {b} : 32)",
    "vshr.wrap": "{a} >> ({b} & 31)",
    "vset": "({a} {sign} {b})",
}
_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _video(code: Code, instruction: Instruction, choices: Choices) -> str:
    name = instruction.opcode.split(".", 1)[0]
    target = TYPES[choices.get("D", "u32")]
    a, b = (
        f"(s64){code.read(operand, TYPES[choices[kind]])}"
        for operand, kind in zip(instruction.operands[1:3], "AB", strict=True)
    )
    key = f"{name}.{choices['mode']}" if "mode" in choices else name
    value = _EXPRESSIONS[key].format(a=a, b=b, sign=_SIGNS.get(choices.get("order", "")))
    low, high = (0, (1 << 32) - 1) if target.kind == "unsigned" else (-(1 << 31), (1 << 31) - 1)
    clamped = f"wide_ < {low}ll ? {low}ll : wide_ > {high}ll ? {high}ll : wide_" if choices.get("sat") else "wide_"
    result = "narrow_"
    if second := choices.get("second"):
        c = code.read(instruction.operands[3], target)
        result = {"add": f"narrow_ + {c}", "min": f"narrow_ < {c} ? narrow_ : {c}", "max": f"narrow_ > {c} ? narrow_ : {c}"}[
            second
        ]
    written = code.write(instruction.operands[0], target, result)
    return f"{{ s64 wide_ = {value}; {target.c} narrow_ = ({target.c})({clamped}); {written} }}"


_TYPES = {"D": "u32 s32", "A": "u32 s32", "B": "u32 s32", "second": "add min max"}
for _name in ("vadd", "vsub", "vabsdiff", "vmin", "vmax"):
    TABLE.add(f"{_name}.D.A.B{{.sat}}{{.second}}", _video, _TYPES)
for _name in ("vshl", "vshr"):
    TABLE.add(f"{_name}.D.A.B.mode{{.second}}", _video, {**_TYPES, "B": "u32"}, mode="clamp wrap")
TABLE.add("vset.A.B.order{.second}", _video, _TYPES, order=" ".join(_SIGNS))
