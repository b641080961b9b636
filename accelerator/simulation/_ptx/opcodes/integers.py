"""Integer arithmetic, logic and shifts."""

from __future__ import annotations

from ..code import Code
from ..operations import Choices, Table, rule
from ..syntax import Instruction, Pair
from ..types import PREDICATE, TYPES

TABLE = Table("integers")

_ALL = "u16 u32 u64 s16 s32 s64"
_CLAMPS = {"clamp": "true", "wrap": "false"}


def _flag(condition: bool) -> str:
    return "true" if condition else "false"


def _low_24(name: str) -> str:
    """The low 24 bits, extended as the type says."""
    return f"(u64)(({{T}})({name} << 8) >> 8)"


def _define_arithmetic() -> None:
    for name, sign in (("add", "+"), ("sub", "-")):
        rule(TABLE, f"{name}.T", f"({{U}})a {sign} ({{U}})b", types=_ALL)
        rule(TABLE, f"{name}.sat.s32", f"saturate_s32((s64)a {sign} (s64)b)", operands="s32")
    rule(TABLE, "add.T", "add_x2(a, b)", types="u16x2 s16x2")
    rule(TABLE, "mul.lo.T", "(u64)a * (u64)b", types=_ALL)
    rule(TABLE, "mul.hi.T", "({W})a * ({W})b >> {N}", types=_ALL)
    rule(TABLE, "mul.wide.T", "({W})a * ({W})b", types="u16 u32 s16 s32", operands="W T T")
    rule(TABLE, "mad.lo.T", "(u64)a * (u64)b + (u64)c", types=_ALL)
    rule(TABLE, "mad.hi.T", "({U})(({W})a * ({W})b >> {N}) + ({U})c", types=_ALL)
    rule(TABLE, "mad.hi.sat.s32", "saturate_s32(((s64)a * b >> 32) + c)", operands="s32")
    rule(TABLE, "mad.wide.T", "(u64)(({W})a * ({W})b) + (u64)c", types="u16 u32 s16 s32", operands="W T T W")
    product = f"{_low_24('a')} * {_low_24('b')}"
    rule(TABLE, "mul24.lo.T", product, types="u32 s32", operands="U")
    rule(TABLE, "mul24.hi.T", f"({product}) >> 16", types="u32 s32", operands="U")
    rule(TABLE, "mad24.lo.T", f"{product} + c", types="u32 s32", operands="U")
    rule(TABLE, "mad24.hi.T", f"(({product}) >> 16) + c", types="u32 s32", operands="U")
    signed_product = "(s64)((s32)(a << 8) >> 8) * ((s32)(b << 8) >> 8)"
    rule(TABLE, "mad24.hi.sat.s32", f"saturate_s32((s32)({signed_product} >> 16) + (s64)(s32)c)", operands="u32")
    rule(TABLE, "sad.T", "({U})c + (a < b ? ({U})b - ({U})a : ({U})a - ({U})b)", types=_ALL)
    rule(TABLE, "div.T", "div_{T}(a, b)", types=_ALL)
    rule(TABLE, "rem.T", "rem_{T}(a, b)", types=_ALL)
    rule(TABLE, "abs.T", "a < 0 ? 0 - ({U})a : ({U})a", types="s16 s32 s64")
    rule(TABLE, "neg.T", "0 - ({U})a", types="s16 s32 s64")
    for name, sign in (("min", "<"), ("max", ">")):
        rule(TABLE, f"{name}.T", f"a {sign} b ? a : b", types=_ALL)
        rule(TABLE, f"{name}.relu.s32", f"(a {sign} b ? a : b) > 0 ? (a {sign} b ? a : b) : 0", operands="s32")
        rule(TABLE, f"{name}.T", f"{name}_{{T}}(a, b)", types="u16x2 s16x2")
        rule(TABLE, f"{name}.relu.s16x2", f"max_s16x2({name}_s16x2(a, b), 0)", operands="b32")
    for x in ("u32", "s32"):
        for y in ("u32", "s32"):
            signs = f"{_flag(x == 's32')}, {_flag(y == 's32')}"
            rule(TABLE, f"dp4a.{x}.{y}", f"dot_4(a, b, c, {signs})", operands="u32")
            for half in ("lo", "hi"):
                rule(TABLE, f"dp2a.{half}.{x}.{y}", f"dot_2(a, b, c, {signs}, {_flag(half == 'hi')})", operands="u32")


def _define_bits() -> None:
    rule(TABLE, "popc.T", "__builtin_popcountll(a)", types="b32 b64", operands="u32 T")
    rule(TABLE, "clz.T", "a ? __builtin_clzll(a) - (64 - {N}) : {N}", types="b32 b64", operands="u32 T")
    rule(TABLE, "brev.T", "reverse_bits(a) >> (64 - {N})", types="b32 b64")
    for suffix, shifts in (("", "false"), (".shiftamt", "true")):
        rule(TABLE, f"bfind{suffix}.T", f"find_highest(a, {{N}}, {shifts})", types="u32 u64", operands="u32 T")
        signed = f"find_highest(({{U}})(a < 0 ? ~a : a), {{N}}, {shifts})"
        rule(TABLE, f"bfind{suffix}.T", signed, types="s32 s64", operands="u32 T")
    rule(TABLE, "fns.b32", "find_nth_set(a, b, c)", operands="u32 u32 u32 s32")
    rule(TABLE, "bfe.T", "bit_field(a, b, c, {N}, false)", types="u32 u64", operands="T T u32")
    rule(TABLE, "bfe.T", "bit_field(a, b, c, {N}, true)", types="s32 s64", operands="U U u32")
    rule(TABLE, "bfi.T", "insert_bit_field(a, b, c, e, {N})", types="b32 b64", operands="T T T u32 u32")
    for mode, clamps in _CLAMPS.items():
        rule(TABLE, f"szext.{mode}.u32", f"extend(a, b, false, {clamps})", operands="u32")
        rule(TABLE, f"szext.{mode}.s32", f"extend(a, b, true, {clamps})", operands="u32")
        rule(TABLE, f"bmsk.{mode}.b32", f"bit_mask(a, b, {clamps})", operands="u32")
        count = "c < 32 ? c : 32" if mode == "clamp" else "c & 31"
        rule(TABLE, f"shf.l.{mode}.b32", f"funnel_left(a, b, {count})", operands="u32")
        rule(TABLE, f"shf.r.{mode}.b32", f"funnel_right(a, b, {count})", operands="u32")
    for name, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
        rule(TABLE, f"{name}.T", f"a {sign} b", types="pred b16 b32 b64")
    rule(TABLE, "not.T", "~a", types="b16 b32 b64")
    rule(TABLE, "not.pred", "!a", operands="pred")
    rule(TABLE, "cnot.T", "a == 0", types="b16 b32 b64")
    rule(TABLE, "shl.T", "b < {N} ? (u64)a << (b & 63) : 0", types="b16 b32 b64", operands="T T u32")
    rule(TABLE, "shr.T", "b < {N} ? a >> (b & 63) : 0", types="b16 b32 b64 u16 u32 u64", operands="T T u32")
    rule(TABLE, "shr.T", "a >> (b < {N} ? b : {N} - 1)", types="s16 s32 s64", operands="T T u32")
    rule(TABLE, "prmt.b32", "permute(a, b, c)", operands="u32")
    for mode in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
        rule(TABLE, f"prmt.b32.{mode}", f"permute_{mode}(a, b, c)", operands="u32")
    rule(TABLE, "lop3.b32", "lookup_bits(a, b, c, e)", operands="u32")


def _lop3_with_predicate(code: Code, instruction: Instruction, choices: Choices) -> str:
    """d = F(a, b, c); p = (d != 0) BoolOp q."""
    pair, *operands, predicate = instruction.operands
    assert isinstance(pair, Pair)
    values = ", ".join(code.read(operand, TYPES["u32"]) for operand in operands)
    sign = {"and": "&", "or": "|"}[choices["operator"]]
    second = code.read(predicate, PREDICATE)
    return (
        f"{{ u32 found_ = lookup_bits({values}); u8 also_ = {second}; {code.write(pair.first, TYPES['u32'], 'found_')}"
        f" {code.write(pair.second, PREDICATE, f'(found_ != 0) {sign} also_')} }}"
    )


def _with_carry(code: Code, instruction: Instruction, choices: Choices) -> str:
    """add.cc, addc, sub.cc and subc: the carry is the condition code CC.CF. A GPU subtracts by adding the complement and one.

    PTX calls the carry of a subtraction a borrow. On a GPU it is the borrow's complement, which addc sees.
    """
    type = TYPES[f"u{choices['T'][1:]}"]
    opcode = instruction.opcode
    subtracts = opcode.startswith("sub")
    a, b = (code.read(operand, type) for operand in instruction.operands[1:3])
    added = f"({type.c})~{b}" if subtracts else b
    carried = " + carry" if opcode.startswith(("addc", "subc")) else " + 1" if subtracts else ""
    keeps = f" carry = sum_ >> {type.bits} & 1;" if choices["cc"] else ""
    return (
        f"{{ u128 sum_ = (u128){a} + (u128){added}{carried};{keeps}"
        f" {code.write(instruction.operands[0], type, f'({type.c})sum_')} }}"
    )


def _multiply_with_carry(code: Code, instruction: Instruction, choices: Choices) -> str:
    """mad.cc and madc: the carry is that of the addition."""
    type = TYPES[choices["T"]]
    word = TYPES[f"u{type.bits}"]
    a, b = (code.read(operand, type) for operand in instruction.operands[1:3])
    c = code.read(instruction.operands[3], word)
    wide = f"{type.name[0]}{type.bits * 2}"
    product = f"({word.c})(({wide}){a} * ({wide}){b}{f' >> {type.bits}' if choices['half'] == 'hi' else ''})"
    carried = " + carry" if instruction.opcode.startswith("madc") else ""
    keeps = f" carry = sum_ >> {type.bits} & 1;" if choices["cc"] else ""
    return (
        f"{{ u128 sum_ = (u128){product} + (u128){c}{carried};{keeps}"
        f" {code.write(instruction.operands[0], word, f'({word.c})sum_')} }}"
    )


def _define_carries() -> None:
    types = "u32 s32 u64 s64"
    for name in ("add", "sub"):
        TABLE.add(f"{name}.cc.T", _with_carry, is_pure=False, T=types)
        TABLE.add(f"{name}c{{.cc}}.T", _with_carry, is_pure=False, T=types)
    TABLE.add("mad.half.cc.T", _multiply_with_carry, is_pure=False, T=types, half="lo hi")
    TABLE.add("madc.half{.cc}.T", _multiply_with_carry, is_pure=False, T=types, half="lo hi")
    TABLE.add("lop3.operator.b32", _lop3_with_predicate, operator="and or")


_define_arithmetic()
_define_bits()
_define_carries()
