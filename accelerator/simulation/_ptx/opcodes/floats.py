"""Arithmetic on single and double precision."""

from __future__ import annotations

from collections.abc import Callable

from ..code import Code
from ..operations import Choices, Table, rule
from ..syntax import Instruction
from ..types import TYPES

TABLE = Table("floats")

_ROUNDINGS = {"rz": "ROUND_TO_ZERO", "rm": "ROUND_DOWN", "rp": "ROUND_UP"}
_EXPRESSIONS = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "rcp": "1 / {0}",
    "sqrt.f32": "__builtin_sqrtf({0})",
    "sqrt.f64": "__builtin_sqrt({0})",
    "fma.f32": "__builtin_fmaf({0}, {1}, {2})",
    "fma.f64": "__builtin_fma({0}, {1}, {2})",
}


def _operands(code: Code, instruction: Instruction, choices: Choices) -> list[str]:
    """Read all operands; .ftz flushes them."""
    type = TYPES[choices["T"]]
    values = [code.read(operand, type) for operand in instruction.operands[1:]]
    return [f"flush({value})" for value in values] if choices.get("ftz") else values


def _result(code: Code, instruction: Instruction, choices: Choices, expression: str) -> str:
    """Write the result; .ftz flushes it, then .sat clamps it."""
    if choices.get("ftz"):
        expression = f"flush({expression})"
    if choices.get("sat"):
        expression = f"saturate_{choices['T']}({expression})"
    return code.write_computed(instruction.operands[0], TYPES[choices["T"]], expression)


def _arithmetic(code: Code, instruction: Instruction, choices: Choices) -> str:
    """Correctly rounded operations, to nearest or as the modifier says."""
    name, type = choices["operation"], choices["T"]
    values = _operands(code, instruction, choices)
    rounding = _ROUNDINGS.get(choices["rnd"])
    if rounding is None:
        template = _EXPRESSIONS.get(f"{name}.{type}") or _EXPRESSIONS[name]
        return _result(code, instruction, choices, template.format(*values))
    if name == "rcp":
        name, values = "div", ["1", *values]
    return _result(code, instruction, choices, _directed(name, type, rounding, values))


def _directed(name: str, type: str, rounding: str, values: list[str]) -> str:
    return f"directed_{name}_{type}({', '.join((rounding, *values))})"


def _packed(code: Code, instruction: Instruction, choices: Choices) -> str:
    """Two floats in 64 bits, each computed alone."""
    name = instruction.opcode.split(".", 1)[0]
    words = [code.read(operand, TYPES["b64"]) for operand in instruction.operands[1:]]
    rounding = _ROUNDINGS.get(choices["rnd"])
    template = _EXPRESSIONS.get(f"{name}.f32") or _EXPRESSIONS[name]
    halves: list[str] = []
    for shift in (0, 32):
        values = [f"float_of_bits((u32)({word} >> {shift}))" for word in words]
        values = [f"flush({value})" for value in values] if choices["ftz"] else values
        value = _directed(name, "f32", rounding, values) if rounding else template.format(*values)
        halves.append(f"bits_of_float(canonical_f32({f'flush({value})' if choices['ftz'] else value}))")
    return code.write(instruction.operands[0], TYPES["b64"], f"{halves[0]} | (u64){halves[1]} << 32")


def _sign(expression: str, code: Code, instruction: Instruction, choices: Choices) -> str:
    """Changes the sign, of a NaN too."""
    value = expression.format(*_operands(code, instruction, choices))
    return code.write(instruction.operands[0], TYPES[choices["T"]], value)


def _function(expression: str, code: Code, instruction: Instruction, choices: Choices) -> str:
    return _result(code, instruction, choices, expression.format(*_operands(code, instruction, choices)))


def _min_or_max(code: Code, instruction: Instruction, choices: Choices) -> str:
    name = "min" if instruction.opcode.startswith("min") else "max"
    type = choices["T"]
    function = f"{name}{'_nan' if choices.get('NaN') else ''}_{type}"
    values = _operands(code, instruction, choices)
    if choices.get("xorsign"):
        a, b = values
        value = f"with_xor_of_signs({function}(__builtin_fabsf({a}), __builtin_fabsf({b})), {a}, {b})"
    else:
        sizes = [f"__builtin_fabsf({value})" if choices.get("abs") else value for value in values]
        value = f"{function}({sizes[0]}, {sizes[1]})"
        if len(sizes) == 3:
            value = f"{function}({value}, {sizes[2]})"
    return code.write(instruction.operands[0], TYPES[type], value)


def _define_arithmetic() -> None:
    rounded = {"rnd": "rn rz rm rp"}
    for name in ("add", "sub", "mul"):
        single = f"{name}{{.rnd}}{{.ftz}}{{.sat}}.T"
        _add(single, name, {**rounded, "T": "f32"})
        _add(f"{name}{{.rnd}}.T", name, {**rounded, "T": "f64"})
    for name in ("fma", "mad"):
        _add(f"{name}.rnd{{.ftz}}{{.sat}}.T", "fma", {**rounded, "T": "f32"})
        _add(f"{name}.rnd.T", "fma", {**rounded, "T": "f64"})
    for name in ("add", "sub", "mul"):
        TABLE.add(f"{name}{{.rnd}}{{.ftz}}.f32x2", _packed, rounded)
    TABLE.add("fma.rnd{.ftz}.f32x2", _packed, rounded)
    for name in ("div", "rcp", "sqrt"):
        _add(f"{name}.rnd{{.ftz}}.T", name, {**rounded, "T": "f32"})
        _add(f"{name}.rnd.T", name, {**rounded, "T": "f64"})


def _add(pattern: str, name: str, choices: Choices) -> None:
    def translate(code: Code, instruction: Instruction, chosen: Choices) -> str:
        return _arithmetic(code, instruction, {**chosen, "operation": name})

    TABLE.add(pattern, translate, choices)


def _add_function(pattern: str, expression: str, write: Callable[..., str] = _function, **choices: str) -> None:
    def translate(code: Code, instruction: Instruction, chosen: Choices) -> str:
        return write(expression, code, instruction, chosen)

    TABLE.add(pattern, translate, choices)


def _define_approximations() -> None:
    """Correctly rounded or nearly so: within the errors that CUDA documents, and with its special cases."""
    for pattern, expression in (
        ("div.approx{.ftz}.T", "approximate_div({0}, {1})"),
        ("div.full{.ftz}.T", "{0} / {1}"),
        ("rcp.approx{.ftz}.T", "1 / {0}"),
        ("sqrt.approx{.ftz}.T", "__builtin_sqrtf({0})"),
        ("rsqrt.approx{.ftz}.T", "approximate_rsqrt({0})"),
        ("sin.approx{.ftz}.T", "__builtin_sinf({0})"),
        ("cos.approx{.ftz}.T", "__builtin_cosf({0})"),
        ("lg2.approx{.ftz}.T", "__builtin_log2f({0})"),
        ("ex2.approx{.ftz}.T", "approximate_ex2({0})"),
        ("tanh.approx.T", "__builtin_tanhf({0})"),
    ):
        _add_function(pattern, expression, T="f32")
    _add_function("rsqrt.approx.T", "1 / __builtin_sqrt({0})", T="f64")
    rule(TABLE, "rcp.approx.ftz.f64", "approximate_rcp_f64(a)", operands="f64")
    rule(TABLE, "rsqrt.approx.ftz.f64", "approximate_rsqrt_f64(a)", operands="f64")


def _define_signs() -> None:
    _add_function("abs{.ftz}.T", "__builtin_fabsf({0})", _sign, T="f32")
    _add_function("abs.T", "__builtin_fabs({0})", _sign, T="f64")
    _add_function("neg{.ftz}.T", "-{0}", _sign, T="f32")
    _add_function("neg.T", "-{0}", _sign, T="f64")
    # copysign d, a, b: the sign of a on the value of b.
    rule(TABLE, "copysign.f32", "__builtin_copysignf(b, a)", operands="f32")
    rule(TABLE, "copysign.f64", "__builtin_copysign(b, a)", operands="f64")
    for name in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
        rule(TABLE, f"testp.{name}.T", f"is_{name}_{{T}}(a)", types="f32 f64", operands="pred T")


def _define_extremes() -> None:
    for name in ("min", "max"):
        for modifiers in ("", ".abs", ".xorsign.abs"):
            TABLE.add(f"{name}{{.ftz}}{{.NaN}}{modifiers}.T", _min_or_max, T="f32")
        TABLE.add(f"{name}.T", _min_or_max, T="f64")


_define_arithmetic()
_define_approximations()
_define_signs()
_define_extremes()
