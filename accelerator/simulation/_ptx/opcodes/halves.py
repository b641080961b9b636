"""Arithmetic on half precision and bfloat16, alone and in pairs."""

from __future__ import annotations

from collections.abc import Callable

from ..code import Code
from ..operations import Choices, Table
from ..syntax import Instruction
from ..types import TYPES

TABLE = Table("halves")


def each_half(code: Code, instruction: Instruction, type: str, compute: Callable[[list[str]], str]) -> str:
    """Write the results of a computation on one half, or on each of a pair."""
    target, *operands = instruction.operands
    if not type.endswith("x2"):
        return code.write(target, TYPES["b16"], compute([code.read(operand, TYPES["b16"]) for operand in operands]))
    words = [code.read(operand, TYPES["b32"]) for operand in operands]
    low = compute([f"(u16)({word})" for word in words])
    high = compute([f"(u16)({word} >> 16)" for word in words])
    return code.write(target, TYPES["b32"], f"pack_halves({low}, {high})")


def _computation(expression: str, code: Code, instruction: Instruction, choices: Choices) -> str:
    type = choices["T"]
    half = type.removesuffix("x2")

    def compute(values: list[str]) -> str:
        if choices.get("ftz"):
            values = [f"flush_{half}({value})" for value in values]
        value = expression.format(*values, half=half)
        if choices.get("ftz"):
            value = f"flush_{half}({value})"
        for modifier, function in (("sat", "saturate"), ("relu", "relu")):
            if choices.get(modifier):
                value = f"{function}_{half}({value})"
        return value

    return each_half(code, instruction, type, compute)


def _min_or_max(code: Code, instruction: Instruction, choices: Choices) -> str:
    type = choices["T"]
    half = type.removesuffix("x2")
    name = "min" if instruction.opcode.startswith("min") else "max"
    function = f"{name}{'_nan' if choices['NaN'] else ''}_{half}"

    def compute(values: list[str]) -> str:
        if choices.get("ftz"):
            values = [f"flush_{half}({value})" for value in values]
        if "xorsign" not in choices:
            value = f"{function}({values[0]}, {values[1]})"
            return value if len(values) == 2 else f"{function}({value}, {values[2]})"
        a, b = values
        return f"xorsign_{half}({function}({a} & 0x7fff, {b} & 0x7fff), {a}, {b})"

    return each_half(code, instruction, type, compute)


def _add(pattern: str, expression: str, **choices: str) -> None:
    def translate(code: Code, instruction: Instruction, chosen: Choices) -> str:
        return _computation(expression, code, instruction, chosen)

    TABLE.add(pattern, translate, choices)


_HALF, _BFLOAT16 = "f16 f16x2", "bf16 bf16x2"

for _name in ("add", "sub", "mul"):
    _add(f"{_name}{{.rn}}{{.ftz}}{{.sat}}.T", f"{_name}_{{half}}({{0}}, {{1}})", T=_HALF)
    _add(f"{_name}{{.rn}}.T", f"{_name}_{{half}}({{0}}, {{1}})", T=_BFLOAT16)
_FMA = "fma_{half}({0}, {1}, {2})"
_add("fma.rn{.ftz}{.sat}.T", _FMA, T=_HALF)
_add("fma.rn{.ftz}.relu.T", _FMA, T=_HALF)
_add("fma.rn{.relu}.T", _FMA, T=_BFLOAT16)
_add("neg{.ftz}.T", "({0} ^ 0x8000)", T=_HALF)
_add("abs{.ftz}.T", "({0} & 0x7fff)", T=_HALF)
_add("neg.T", "({0} ^ 0x8000)", T=_BFLOAT16)
_add("abs.T", "({0} & 0x7fff)", T=_BFLOAT16)
_add("tanh.approx.T", "tanh_{half}({0})", T=f"{_HALF} {_BFLOAT16}")
_add("ex2.approx.T", "ex2_{half}({0})", T=_HALF)
_add("ex2.approx.ftz.T", "ex2_{half}({0})", T=_BFLOAT16)
for _name in ("min", "max"):
    for _modifiers in ("", ".xorsign.abs"):
        TABLE.add(f"{_name}{{.ftz}}{{.NaN}}{_modifiers}.T", _min_or_max, T=_HALF)
        TABLE.add(f"{_name}{{.NaN}}{_modifiers}.T", _min_or_max, T=_BFLOAT16)
