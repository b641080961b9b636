"""cvt: conversions between types, and packed conversions."""

from __future__ import annotations

from ..code import Code
from ..operations import Choices, Table
from ..syntax import Instruction, Operand
from ..types import TYPES, PtxType

TABLE = Table("conversions")

_INTEGERS = "u8 s8 u16 s16 u32 s32 u64 s64"
_WIDER_INTEGERS = "u16 s16 u32 s32 u64 s64"
_ROUNDINGS = {"rz": "ROUND_TO_ZERO", "rm": "ROUND_DOWN", "rp": "ROUND_UP"}
_TO_INTEGER = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
_HALF_ROUNDINGS = {"rz": "{half}_toward_zero", "rm": "{half}_down", "rp": "{half}_up"}
_FLOATS = ("f16", "bf16", "f32", "f64")


def _read_float(code: Code, operand: Operand, type: str) -> str:
    """Read a float; a half in single precision."""
    if type == "f16":
        return f"float_of_half({code.read(operand, TYPES['b16'])})"
    if type == "bf16":
        return f"float_of_bfloat16({code.read(operand, TYPES['b16'])})"
    return code.read(operand, TYPES[type])


def _integer_to_integer(code: Code, instruction: Instruction, choices: Choices) -> str:
    """Keeps the low bits; .sat clamps to the result's range."""
    target, source = TYPES[choices["D"]], TYPES[choices["A"]]
    value = code.read(instruction.operands[1], source)
    if "sat" in choices:
        low, high = _range(target)
        wide = f"(s128){value}"
        value = f"{wide} < (s128){low} ? (s128){low} : {wide} > (s128){high} ? (s128){high} : {wide}"
        return code.write(instruction.operands[0], target, f"({target.c})({value})")
    return code.write(instruction.operands[0], target, value)


def _range(type: PtxType) -> tuple[str, str]:
    if type.kind == "unsigned":
        return "0", f"{(1 << type.bits) - 1}ull"
    largest = (1 << (type.bits - 1)) - 1
    return f"(-{largest}ll - 1)", f"{largest}ll"


def _holds(target: PtxType, source: PtxType) -> bool:
    """Return whether one type has all numbers of another."""
    if target.kind == source.kind:
        return target.bits >= source.bits
    return target.kind == "signed" and target.bits > source.bits


def _integer_to_float(code: Code, instruction: Instruction, choices: Choices) -> str:
    source = TYPES[choices["A"]]
    value = code.read(instruction.operands[1], source)
    sign = "s64" if source.kind == "signed" else "u64"
    rounding = choices["rnd"]
    target = choices["D"]
    if target in ("f16", "bf16"):
        function = _HALF_ROUNDINGS.get(rounding, "{half}_nearest").format(half=target)
        if rounding == "rn":
            function = "half_of_double" if target == "f16" else "bfloat16_of_double"
        return _finish(code, instruction, choices, f"{function}(double_of_{sign}_to_odd({value}))")
    if rounding in _ROUNDINGS:
        return _finish(code, instruction, choices, f"directed_{target}_of_{sign}({_ROUNDINGS[rounding]}, {value})")
    return _finish(code, instruction, choices, f"({TYPES[target].c}){value}")


def _finish(code: Code, instruction: Instruction, choices: Choices, value: str) -> str:
    """Write a result that is a float; .ftz flushes single precision, .sat clamps to [0, 1]."""
    target = choices["D"]
    if choices.get("ftz") and target == "f32":
        value = f"flush({value})"
    for modifier, function in (("sat", "saturate"), ("relu", "relu"), ("satfinite", "satfinite")):
        if choices.get(modifier):
            value = f"{function}_{target}({value})"
    write = code.write if choices["A"] == "bf16" else code.write_computed  # the bits of a bfloat16 are those of a float
    return write(instruction.operands[0], TYPES[target], value)


def _source(code: Code, instruction: Instruction, choices: Choices) -> str:
    """Return the operand; .ftz flushes single precision, but a GPU does not for a result of half precision."""
    value = _read_float(code, instruction.operands[1], choices["A"])
    return f"flush({value})" if choices.get("ftz") and choices["A"] == "f32" and choices["D"] != "f16" else value


def _float_to_integer(code: Code, instruction: Instruction, choices: Choices) -> str:
    """Rounds, then clamps to the result's range."""
    target = TYPES[choices["D"]]
    is_double = choices["A"] == "f64"
    suffix = "" if is_double else "f"
    rounded = f"__builtin_{_TO_INTEGER[choices['rnd']]}{suffix}({_source(code, instruction, choices)})"
    function = "signed_of" if target.kind == "signed" else "unsigned_of"
    return code.write(
        instruction.operands[0], target, f"({target.c}){function}({rounded}, {target.bits}, {str(is_double).lower()})"
    )


def _float_to_float(code: Code, instruction: Instruction, choices: Choices) -> str:
    source, target, rounding = choices["A"], choices["D"], choices.get("rnd", "")
    value = _source(code, instruction, choices)
    if rounding in _TO_INTEGER:
        value = f"__builtin_{_TO_INTEGER[rounding]}{'' if source == 'f64' else 'f'}({value})"
    if target in ("f16", "bf16"):
        return _finish(code, instruction, choices, _to_half(target, source, rounding, value))
    if target == "f32" and source == "f64" and rounding in _ROUNDINGS:
        return _finish(code, instruction, choices, f"directed_f32_of_f64({_ROUNDINGS[rounding]}, {value})")
    return _finish(code, instruction, choices, f"({TYPES[target].c})({value})")


def _to_half(target: str, source: str, rounding: str, value: str) -> str:
    if rounding in _HALF_ROUNDINGS:
        return f"{_HALF_ROUNDINGS[rounding].format(half=target)}({value})"
    name = "half" if target == "f16" else "bfloat16"
    return f"{name}_of_{'double' if source == 'f64' else 'float'}({value})"


def _to_half_pair(code: Code, instruction: Instruction, choices: Choices) -> str:
    """d = {convert(a), convert(b)}: a in the high half."""
    half = choices["D"].removesuffix("x2")
    halves: list[str] = []
    for operand in instruction.operands[1:3]:
        value = _to_half(half, "f32", choices["rnd"], code.read(operand, TYPES["f32"]))
        for modifier in ("relu", "satfinite"):
            if choices[modifier]:
                value = f"{modifier}_{half}({value})"
        halves.append(value)
    return code.write(instruction.operands[0], TYPES["b32"], f"pack_halves({halves[1]}, {halves[0]})")


def _to_tf32(code: Code, instruction: Instruction, choices: Choices) -> str:
    rounding = {"rn": "TO_NEAREST", "rz": "TO_ZERO", "rna": "TO_NEAREST_AWAY"}[choices["rnd"]]
    value = code.read(instruction.operands[1], TYPES["f32"])
    flags = ", ".join("true" if choices.get(name) else "false" for name in ("relu", "satfinite"))
    return code.write(instruction.operands[0], TYPES["b32"], f"tf32_of_float({value}, {rounding}, {flags})")


def _to_narrow_pair(code: Code, instruction: Instruction, choices: Choices) -> str:
    """Two floats, or two halves of a register, to formats of 8 bits: the first in the high byte."""
    narrow = choices["D"].removesuffix("x2")
    relu = "true" if choices["relu"] else "false"
    if choices["A"] == "f32":
        high, low = (code.read(operand, TYPES["f32"]) for operand in instruction.operands[1:3])
    else:
        word = code.read(instruction.operands[1], TYPES["b32"])
        high, low = f"float_of_half((u16)({word} >> 16))", f"float_of_half((u16){word})"
    packed = f"{narrow}_of_float({high}, {relu}) << 8 | {narrow}_of_float({low}, {relu})"
    return code.write(instruction.operands[0], TYPES["b16"], packed)


def _from_narrow_pair(code: Code, instruction: Instruction, choices: Choices) -> str:
    narrow = choices["A"].removesuffix("x2")
    relu = "true" if choices["relu"] else "false"
    word = code.read(instruction.operands[1], TYPES["b16"])
    low, high = f"half_of_{narrow}((u8){word}, {relu})", f"half_of_{narrow}((u8)({word} >> 8), {relu})"
    return code.write(instruction.operands[0], TYPES["b32"], f"pack_halves({low}, {high})")


def _pack(code: Code, instruction: Instruction, choices: Choices) -> str:
    """cvt.pack.sat: a and b, clamped, in the low bits, below c's low bits."""
    type = choices["D"]
    bits = int(type[1:])
    low, high = (0, (1 << bits) - 1) if type[0] == "u" else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    clamped: list[str] = []
    for operand in instruction.operands[1:3]:
        value = code.read(operand, TYPES["s32"])
        clamped.append(f"(u32)({value} < {low} ? {low} : {value} > {high} ? {high} : {value}) & {(1 << bits) - 1}u")
    packed = f"({clamped[0]}) << {bits} | ({clamped[1]})"
    if len(instruction.operands) == 4:
        packed = f"{code.read(instruction.operands[3], TYPES['u32'])} << {2 * bits} | {packed}"
    return code.write(instruction.operands[0], TYPES["b32"], packed)


def _define_scalars() -> None:
    rounded = {"rnd": "rn rz rm rp"}
    to_integer = {"rnd": " ".join(_TO_INTEGER)}
    TABLE.add("cvt.D.A", _integer_to_integer, D=_INTEGERS, A=_INTEGERS)
    for target in _INTEGERS.split():
        sources = " ".join(source for source in _INTEGERS.split() if not _holds(TYPES[target], TYPES[source]))
        TABLE.add("cvt.sat.D.A", _integer_to_integer, D=target, A=sources)
    TABLE.add("cvt.rnd{.sat}.D.A", _integer_to_float, rounded, D="f16 f32 f64", A=_INTEGERS)
    TABLE.add("cvt.rnd.D.A", _integer_to_float, rounded, D="bf16", A=_WIDER_INTEGERS)
    TABLE.add("cvt.rnd{.sat}.D.A", _float_to_integer, to_integer, D=_INTEGERS, A="f16 f64")
    TABLE.add("cvt.rnd.D.A", _float_to_integer, to_integer, D=_INTEGERS, A="bf16")
    TABLE.add("cvt.rnd{.ftz}{.sat}.D.A", _float_to_integer, to_integer, D=_INTEGERS, A="f32")


def _define_floats() -> None:
    rounded = {"rnd": "rn rz rm rp"}
    to_integer = {"rnd": " ".join(_TO_INTEGER)}
    # The same type: with rounding to an integer, or without.
    TABLE.add("cvt{.rnd}{.ftz}{.sat}.D.A", _float_to_float, to_integer, D="f32", A="f32")
    TABLE.add("cvt{.rnd}{.sat}.D.A", _float_to_float, to_integer, D="f64", A="f64")
    TABLE.add("cvt{.rnd}{.sat}.D.A", _float_to_float, to_integer, D="f16", A="f16")
    TABLE.add("cvt.rnd.D.A", _float_to_float, to_integer, D="bf16", A="bf16")
    # To a wider one.
    TABLE.add("cvt{.ftz}{.sat}.D.A", _float_to_float, D="f64", A="f32")
    TABLE.add("cvt{.ftz}{.sat}.D.A", _float_to_float, D="f32", A="f16")
    TABLE.add("cvt{.sat}.D.A", _float_to_float, D="f64", A="f16")
    TABLE.add("cvt.D.A", _float_to_float, D="f32 f64", A="bf16")
    # To a narrower one.
    TABLE.add("cvt.rnd{.ftz}{.sat}.D.A", _float_to_float, rounded, D="f32", A="f64")
    TABLE.add("cvt.rnd{.ftz}{.sat}.D.A", _float_to_float, rounded, D="f16", A="f32")
    TABLE.add("cvt.rnd{.sat}.D.A", _float_to_float, rounded, D="f16", A="f64")
    TABLE.add("cvt.rnd.D.A", _float_to_float, rounded, D="bf16", A="f32 f64 f16")
    TABLE.add("cvt.rnd.D.A", _float_to_float, rounded, D="f16", A="bf16")
    for modifiers in (".relu", ".satfinite", ".relu.satfinite"):
        TABLE.add(f"cvt.rnd{modifiers}.D.A", _float_to_float, D="f16 bf16", A="f32", rnd="rn rz")


def _define_packed() -> None:
    TABLE.add("cvt.rnd{.relu}{.satfinite}.D.f32", _to_half_pair, D="f16x2 bf16x2", rnd="rn rz")
    TABLE.add("cvt.rnd{.satfinite}.tf32.f32", _to_tf32, rnd="rna")
    TABLE.add("cvt.rnd{.satfinite}{.relu}.tf32.f32", _to_tf32, rnd="rn rz")
    TABLE.add("cvt.rn.satfinite{.relu}.D.A", _to_narrow_pair, D="e4m3x2 e5m2x2", A="f32 f16x2")
    TABLE.add("cvt.rn{.relu}.f16x2.A", _from_narrow_pair, A="e4m3x2 e5m2x2")
    TABLE.add("cvt.pack.sat.D.s32", _pack, D="u16 s16")
    TABLE.add("cvt.pack.sat.D.s32.b32", _pack, D="u8 s8 u4 s4 u2 s2")


_define_scalars()
_define_floats()
_define_packed()
