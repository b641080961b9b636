"""Comparisons and selections."""

from __future__ import annotations

from ..code import Code
from ..operations import Choices, Table, rule
from ..syntax import Instruction, Operand, Pair
from ..types import PREDICATE, TYPES

TABLE = Table("comparisons")

_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
_LOGIC = {"and": "&", "or": "|", "xor": "^"}
_EQUALITIES = "eq ne"
_ORDERS = "eq ne lt le gt ge"
_UNSIGNED_ORDERS = f"{_ORDERS} lo ls hi hs"
_FLOAT_ORDERS = f"{_ORDERS} equ neu ltu leu gtu geu num nan"
_HALF_TYPES = "f16 bf16"


def compare(comparison: str, a: str, b: str, *, is_float: bool) -> str:
    """Return an expression of a comparison.

    Comparisons of floats without u are false if an operand is NaN, those with u are true.
    """
    if not is_float:
        return f"({a} {_SIGNS[comparison]} {b})"
    unordered = f"({a} != {a} || {b} != {b})"
    if comparison == "num":
        return f"!{unordered}"
    if comparison == "nan":
        return unordered
    if comparison == "ne":
        return f"({a} < {b} || {a} > {b})"
    if comparison == "neu":
        return f"({a} != {b})"
    if comparison.endswith("u"):
        return f"({unordered} || {a} {_SIGNS[comparison[:-1]]} {b})"
    return f"({a} {_SIGNS[comparison]} {b})"


def _read(code: Code, operand: Operand, type: str, choices: Choices) -> str:
    """Read an operand; halves are compared in single precision."""
    if type == "f16" or type == "bf16":
        value = code.read(operand, TYPES["b16"])
        value = f"flush_{type}({value})" if choices.get("ftz") else value
        return f"{'float_of_half' if type == 'f16' else 'float_of_bfloat16'}({value})"
    value = code.read(operand, TYPES[type])
    return f"flush({value})" if choices.get("ftz") else value


def _comparison(code: Code, instruction: Instruction, choices: Choices) -> str:
    type = choices["T"]
    a, b = (_read(code, operand, type, choices) for operand in instruction.operands[1:3])
    return compare(choices["order"], a, b, is_float=type in ("f16", "bf16", "f32", "f64"))


def _combined(code: Code, instruction: Instruction, choices: Choices, value: str) -> str:
    """Combine a comparison with the predicate c, if the variant has one."""
    if "logic" not in choices:
        return value
    return f"({value} {_LOGIC[choices['logic']]} ({code.read(instruction.operands[-1], PREDICATE)}))"


def _setp(code: Code, instruction: Instruction, choices: Choices) -> str:
    """p = BoolOp(a CmpOp b, c); q = BoolOp(!(a CmpOp b), c)."""
    value = _comparison(code, instruction, choices)
    target = instruction.operands[0]
    if not isinstance(target, Pair):
        return code.write(target, PREDICATE, _combined(code, instruction, choices, value))
    first = _combined(code, instruction, choices, "found_")
    second = _combined(code, instruction, choices, "!found_")
    return f"{{ u8 found_ = {value}, {_write_both(code, target, first, second)} }}"


def _write_both(code: Code, target: Pair, first: str, second: str) -> str:
    """Return the end of a declaration and the writes of two predicates, of which the first may be read by the second."""
    return f"second_ = {second}; {code.write(target.first, PREDICATE, first)} {code.write(target.second, PREDICATE, 'second_')}"


def _compared_halves(code: Code, instruction: Instruction, choices: Choices) -> list[str]:
    """Return the comparisons of the low and of the high halves of two pairs."""
    type = choices["T"].removesuffix("x2")
    widen = "float_of_half" if type == "f16" else "float_of_bfloat16"
    words = [code.read(operand, TYPES["b32"]) for operand in instruction.operands[1:3]]
    results: list[str] = []
    for shift in (0, 16):
        halves = [f"(u16)({word} >> {shift})" for word in words]
        halves = [f"flush_{type}({half})" if choices.get("ftz") else half for half in halves]
        a, b = (f"{widen}({half})" for half in halves)
        results.append(_combined(code, instruction, choices, compare(choices["order"], a, b, is_float=True)))
    return results


def _setp_pair(code: Code, instruction: Instruction, choices: Choices) -> str:
    """Compares the halves of two pairs: p is of the low ones, q of the high ones."""
    target = instruction.operands[0]
    assert isinstance(target, Pair)
    return f"{{ u8 {_write_both(code, target, *_compared_halves(code, instruction, choices))} }}"


_ONES = {
    "u32": "0xffffffffu : 0",
    "s32": "-1 : 0",
    "f32": "1.0f : 0.0f",
    "f16": "0x3c00 : 0",
    "bf16": "0x3f80 : 0",
    "u16": "0xffff : 0",
    "s16": "-1 : 0",
}


def _set(code: Code, instruction: Instruction, choices: Choices) -> str:
    """d is all ones if the comparison holds; 1.0 if d is a float."""
    value = _combined(code, instruction, choices, _comparison(code, instruction, choices))
    return code.write(instruction.operands[0], TYPES[choices["D"]], f"{value} ? {_ONES[choices['D']]}")


def _set_pair(code: Code, instruction: Instruction, choices: Choices) -> str:
    """Compares the halves of two pairs into halves: of 1.0 or 0, or of all ones or 0 if the result is an integer."""
    ones = _ONES[choices["D"].removesuffix("x2") if choices["D"].endswith("x2") else "u16"]
    low, high = (f"({value} ? {ones})" for value in _compared_halves(code, instruction, choices))
    return code.write(instruction.operands[0], TYPES["b32"], f"pack_halves({low}, {high})")


def _add_comparisons(orders: str, ftz: str, types: str) -> None:
    for combination in ("", ".logic"):
        chosen = {"order": orders, "logic": "and or xor", "T": types}
        TABLE.add(f"setp.order{combination}{ftz}.T", _setp, chosen)
        TABLE.add(f"set.order{combination}{ftz}.D.T", _set, chosen, D="u32 s32 f32")


def _define_comparisons() -> None:
    _add_comparisons(_EQUALITIES, "", "b16 b32 b64")
    _add_comparisons(_UNSIGNED_ORDERS, "", "u16 u32 u64")
    _add_comparisons(_ORDERS, "", "s16 s32 s64")
    _add_comparisons(_FLOAT_ORDERS, "{.ftz}", "f32")
    _add_comparisons(_FLOAT_ORDERS, "", "f64")
    for combination in ("", ".logic"):
        chosen = {"order": _FLOAT_ORDERS, "logic": "and or xor"}
        for ftz, type in (("{.ftz}", "f16"), ("", "bf16")):
            TABLE.add(f"setp.order{combination}{ftz}.T", _setp, chosen, T=type)
            TABLE.add(f"setp.order{combination}{ftz}.T", _setp_pair, chosen, T=f"{type}x2")
            TABLE.add(f"set.order{combination}{ftz}.D.T", _set, chosen, D=f"{type} u16 s16 u32 s32", T=type)
            TABLE.add(f"set.order{combination}{ftz}.D.T", _set_pair, chosen, D=f"{type}x2 u32 s32", T=f"{type}x2")


def _slct(code: Code, instruction: Instruction, choices: Choices) -> str:
    """d = (c >= 0) ? a : b; .ftz flushes c, and NaN chooses b."""
    type = TYPES[choices["T"]]
    a, b = (code.read(operand, type) for operand in instruction.operands[1:3])
    c = _read(code, instruction.operands[3], choices["C"], choices)
    return code.write(instruction.operands[0], type, f"{c} >= 0 ? {a} : {b}")


_define_comparisons()
_SELECTABLE = "b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64"
# Without a branch, so that the compiler makes vectors of it.
rule(TABLE, "selp.T", "((a ^ b) & -({U})(c)) ^ b", types=_SELECTABLE, operands="B B B pred")
TABLE.add("slct.T.C", _slct, T=_SELECTABLE, C="s32 f32")
TABLE.add("slct.ftz.T.C", _slct, T=_SELECTABLE, C="f32")
