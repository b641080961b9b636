"""Tensor cores: products of matrices whose elements the lanes of a warp hold."""

from __future__ import annotations

import re

from ..code import Code
from ..operations import Choices, Table, Waiting
from ..syntax import Instruction, Operand, Register, Vector
from ..types import TYPES

TABLE = Table("matrices")

_ELEMENTS = {
    "f16": "E_F16",
    "bf16": "E_BF16",
    "tf32": "E_TF32",
    "f32": "E_F32",
    "f64": "E_F64",
    "e4m3": "E_E4M3",
    "e5m2": "E_E5M2",
    "s8": "E_S8",
    "u8": "E_U8",
    "s4": "E_S4",
    "u4": "E_U4",
    "b1": "E_B1",
    "s32": "E_S32",
}
_BITS = {
    "f16": 16,
    "bf16": 16,
    "tf32": 32,
    "f32": 32,
    "f64": 64,
    "e4m3": 8,
    "e5m2": 8,
    "s8": 8,
    "u8": 8,
    "s4": 4,
    "u4": 4,
    "b1": 1,
    "s32": 32,
}


def _parts(operand: Operand) -> tuple[Operand, ...]:
    return operand.parts if isinstance(operand, Vector) else (operand,)


def _is_double(operand: Operand) -> bool:
    return isinstance(operand, Register) and operand.type.bits == 64


def _words(code: Code, operand: Operand) -> list[str]:
    """Read a fragment as words of 32 bits."""
    words: list[str] = []
    for part in _parts(operand):
        if _is_double(part):
            value = code.read(part, TYPES["b64"])
            words += [f"(u32)({value})", f"(u32)({value} >> 32)"]
        else:
            words.append(code.read(part, TYPES["b32"]))
    return words


def _put(words: list[str]) -> str:
    return " ".join(f"w->operands[{index}][lane] = {word};" for index, word in enumerate(words))


def _word_count(operand: Operand) -> int:
    return sum(2 if _is_double(part) else 1 for part in _parts(operand))


def _take(code: Code, target: Operand, word: str = "w->results[{}][lane]") -> str:
    """Write words of 32 bits to a fragment."""
    writes: list[str] = []
    index = 0
    for part in _parts(target):
        if _is_double(part):
            value = f"({word.format(index)} | (u64){word.format(index + 1)} << 32)"
            writes.append(code.write(part, TYPES["b64"], value))
            index += 2
        else:
            writes.append(code.write(part, TYPES["b32"], word.format(index)))
            index += 1
    return " ".join(writes)


def _shape(shape: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"m(\d+)n(\d+)k(\d+)", shape)
    assert match is not None
    return int(match[1]), int(match[2]), int(match[3])


def _multiply(code: Code, instruction: Instruction, choices: Choices) -> Waiting:
    """d = a * b + c."""
    code.uses.add("warp")
    target, *operands = instruction.operands
    fragments = [_words(code, operand) for operand in operands[:3]]
    m, n, k = _shape(choices["shape"])
    fields = {
        "m": m,
        "n": n,
        "k": k,
        **{name: _ELEMENTS[choices[name.upper()]] for name in "abcd"},
        **{f"{name}_words": len(words) for name, words in zip("abc", fragments, strict=True)},
        "d_words": _word_count(target),
        "a_is_column": int(choices.get("alayout") == "col"),
        "b_is_column": int(choices.get("blayout") == "col"),
        "is_wmma": int(instruction.opcode.startswith("wmma")),
        "saturates": int(bool(choices.get("satfinite"))),
        "is_and": int(choices.get("combine") == "and"),
    }
    detail = "struct matrix_shape {" + ", ".join(f".{name} = {value}" for name, value in fields.items()) + "}"
    before = _put([word for words in fragments for word in words]) + " w->members[lane] = ~0u;"
    return Waiting(before, _take(code, target), "WAIT_WARP", "MATRIX_MULTIPLY", detail)


def _mma(pattern: str, *, shape: str, a: str, b: str = "", c: str, d: str = "", **choices: str) -> None:
    """Accept mma.sync; b and d are a's and c's types if they are not given."""
    for a_type in a.split():
        for b_type in (b or a_type).split():
            for c_type in c.split():
                for d_type in (d or c_type).split():
                    _mma_types(pattern, {"A": a_type, "B": b_type, "C": c_type, "D": d_type}, shape=shape, **choices)


def _mma_types(pattern: str, types: Choices, **choices: str) -> None:
    def translate(code: Code, instruction: Instruction, chosen: Choices) -> Waiting:
        return _multiply(code, instruction, {**chosen, **types})

    filled = pattern
    for name, type in types.items():
        filled = re.sub(rf"\.{name}(?=[.{{]|$)", f".{type}", filled)
    TABLE.add(filled, translate, choices, is_pure=False, waits="uniform")


def _define_mma() -> None:
    plain = "mma.sync.aligned.shape.row.col.D.A.B.C"
    quads = "mma.sync.aligned.shape.alayout.blayout.D.A.B.C"
    for c, d in (("f16", "f16 f32"), ("f32", "f32")):
        _mma(quads, shape="m8n8k4", a="f16", c=c, d=d, alayout="row col", blayout="row col")
    _mma(plain, shape="m16n8k8 m16n8k16", a="f16", c="f16 f32")
    _mma(plain, shape="m16n8k8 m16n8k16", a="bf16", c="f32")
    _mma(plain, shape="m16n8k4 m16n8k8", a="tf32", c="f32")
    _mma(plain, shape="m8n8k4 m16n8k4 m16n8k8 m16n8k16", a="f64", c="f64")
    _mma(plain, shape="m16n8k16 m16n8k32", a="e4m3 e5m2", b="e4m3 e5m2", c="f16 f32")
    integers = "mma.sync.aligned.shape.row.col{.satfinite}.D.A.B.C"
    _mma(integers, shape="m8n8k16 m16n8k16 m16n8k32", a="s8 u8", b="s8 u8", c="s32")
    _mma(integers, shape="m8n8k32 m16n8k32 m16n8k64", a="s4 u4", b="s4 u4", c="s32")
    _mma(
        "mma.sync.aligned.shape.row.col.D.A.B.C.combine.popc",
        shape="m8n8k128 m16n8k128 m16n8k256",
        a="b1",
        c="s32",
        combine="xor and",
    )


def _define_wmma() -> None:
    layouts = {"alayout": "row col", "blayout": "row col"}
    shapes = "m16n16k16 m8n32k16 m32n8k16"
    prefix = "wmma.mma.sync.aligned.alayout.blayout.shape"
    for d in ("f16", "f32"):
        for c in ("f16", "f32"):
            _mma_types(f"{prefix}.{d}.{c}", {"A": "f16", "B": "f16", "C": c, "D": d}, shape=shapes, **layouts)
    _mma(f"{prefix}.D.A.B.C", shape=shapes, a="bf16", c="f32", **layouts)
    _mma(f"{prefix}.D.A.B.C", shape="m16n16k8", a="tf32", c="f32", **layouts)
    _mma(f"{prefix}.D.A.B.C", shape="m8n8k4", a="f64", c="f64", **layouts)
    for type in ("s8", "u8"):
        _mma(f"{prefix}.D.A.B.C{{.satfinite}}", shape=shapes, a=type, c="s32", **layouts)


# Which matrices of which shapes and types wmma.load and wmma.store move.
_WHOLE = "m16n16k16 m8n32k16 m32n8k16"
_FRAGMENTS = (
    ("a b", _WHOLE, "f16 bf16 s8 u8"),
    ("c d", _WHOLE, "f16 f32 s32"),
    ("a b", "m16n16k8", "tf32"),
    ("c d", "m16n16k8", "f32"),
    ("a b c d", "m8n8k4", "f64"),
)


def _move_fragment(code: Code, instruction: Instruction, choices: Choices) -> str:
    """Lane i holds the elements i * count to (i + 1) * count of the matrix, in the order of its rows.

    PTX does not say which elements a lane holds, only that wmma.load, wmma.mma and wmma.store agree.
    """
    code.uses.add("lane")
    m, n, k = _shape(choices["shape"])
    rows, columns = {"a": (m, k), "b": (k, n)}.get(choices["matrix"], (m, n))
    is_row = choices["layout"] == "row"
    lines, length = (rows, columns) if is_row else (columns, rows)
    is_load = instruction.opcode.startswith("wmma.load")
    fragment, address = instruction.operands[:2] if is_load else instruction.operands[1::-1]
    stride = code.read(instruction.operands[2], TYPES["u32"]) if len(instruction.operands) > 2 else f"{length}u"
    size = _BITS[choices["T"]] // 8
    space = choices.get("space", "")
    # The first and the last element are checked; the others lie between them.
    last = f"({lines - 1} * (u64){stride} + {length - 1}) * {size}"
    head = f"{{ (void){code.pointer(address, space, size, last)}; char *matrix_ = {code.pointer(address, space, size)};"
    place = f"matrix_, {stride}, lane, {rows}, {columns}, {size}, {'true' if is_row else 'false'}"
    if is_load:
        count = _word_count(fragment)
        return f"{head} u32 words_[{count}] = {{0}}; load_fragment(words_, {place}); {_take(code, fragment, 'words_[{}]')} }}"
    words = _words(code, fragment)
    return f"{head} u32 words_[] = {{{', '.join(words)}}}; store_fragment(words_, {place}); }}"


def _define_fragments() -> None:
    for matrices, shapes, types in _FRAGMENTS:
        for matrix in matrices.split():
            verb = "store" if matrix == "d" else "load"
            TABLE.add(
                f"wmma.{verb}.matrix.sync.aligned.layout.shape{{.space}}.T",
                _move_fragment,
                results=0 if verb == "store" else 1,
                is_pure=False,
                matrix=matrix,
                layout="row col",
                shape=shapes,
                space="global shared",
                T=types,
            )


def _load_matrices(code: Code, instruction: Instruction, choices: Choices) -> Waiting:
    """Lanes 8i to 8i + 7 have the addresses of the rows of the matrix i of 8 x 8 halves."""
    code.uses.add("warp")
    count = int(choices["count"][1])
    pointer = code.pointer(instruction.operands[1], choices.get("space", ""), 16)
    before = f"if (lane < {8 * count}) w->a[lane] = (u64){pointer}; w->members[lane] = ~0u;"
    detail = f"struct matrix_move {{{count}, {int(bool(choices.get('trans')))}}}"
    return Waiting(before, _take(code, instruction.operands[0]), "WAIT_WARP", "MATRIX_LOAD", detail)


def _store_matrices(code: Code, instruction: Instruction, choices: Choices) -> Waiting:
    code.uses.add("warp")
    count = int(choices["count"][1])
    pointer = code.pointer(instruction.operands[0], choices.get("space", ""), 16)
    before = f"if (lane < {8 * count}) w->a[lane] = (u64){pointer}; w->members[lane] = ~0u;"
    before += _put(_words(code, instruction.operands[1]))
    detail = f"struct matrix_move {{{count}, {int(bool(choices.get('trans')))}}}"
    return Waiting(before, "", "WAIT_WARP", "MATRIX_STORE", detail)


def _transpose(code: Code, instruction: Instruction, choices: Choices) -> Waiting:
    code.uses.add("warp")
    target, source = instruction.operands
    before = _put([code.read(source, TYPES["b32"])]) + " w->members[lane] = ~0u;"
    return Waiting(before, code.write(target, TYPES["b32"], "w->results[0][lane]"), "WAIT_WARP", "MATRIX_TRANSPOSE")


def _define_moves() -> None:
    options = {"count": "x1 x2 x4", "space": "shared"}
    TABLE.add("ldmatrix.sync.aligned.m8n8.count{.trans}{.space}.b16", _load_matrices, options, is_pure=False, waits="uniform")
    TABLE.add(
        "stmatrix.sync.aligned.m8n8.count{.trans}{.space}.b16",
        _store_matrices,
        options,
        results=0,
        is_pure=False,
        waits="uniform",
    )
    TABLE.add("movmatrix.sync.aligned.m8n8.trans.b16", _transpose, is_pure=False, waits="uniform")


_define_mma()
_define_wmma()
_define_fragments()
_define_moves()
