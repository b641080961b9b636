"""What the lanes of a warp do together: exchange values, vote, match, reduce."""

from __future__ import annotations

from ..code import Code
from ..operations import Choices, Table, Together, Waiting
from ..syntax import Immediate, Instruction, Negated, Operand, Pair, Register
from ..types import PREDICATE, TYPES

TABLE = Table("warps")

_LANES = 32

_SHUFFLES = {"up": "SHUFFLE_UP", "down": "SHUFFLE_DOWN", "bfly": "SHUFFLE_BUTTERFLY", "idx": "SHUFFLE_INDEX"}
_VOTES = {"all": "VOTE_ALL", "any": "VOTE_ANY", "uni": "VOTE_UNIFORM", "ballot": "VOTE_BALLOT"}
_REDUCTIONS = {
    "add.u32": "REDUCE_ADD",
    "add.s32": "REDUCE_ADD",
    "min.u32": "REDUCE_MIN_U32",
    "min.s32": "REDUCE_MIN_S32",
    "max.u32": "REDUCE_MAX_U32",
    "max.s32": "REDUCE_MAX_S32",
    "and.b32": "REDUCE_AND",
    "or.b32": "REDUCE_OR",
    "xor.b32": "REDUCE_XOR",
}


def _members(code: Code, operand: Operand) -> str:
    code.uses.add("warp")
    return f"w->members[lane] = {code.read(operand, TYPES['u32'])};"


def _results(code: Code, target: Operand, type: str = "b32") -> str:
    """Take the result, and the predicate of a pair."""
    code.uses.add("warp")
    if isinstance(target, Pair):
        value = code.write(target.first, TYPES[type], f"({TYPES[type].c})w->result[lane]")
        return f"{value} {code.write(target.second, PREDICATE, 'w->flag[lane]')}"
    return code.write(target, TYPES[type], f"({TYPES[type].c})w->result[lane]")


def _is_synchronized(choices: Choices) -> bool:
    """Whether the instruction names the lanes that take part; without .sync, the active ones do."""
    return bool(choices.get("sync"))


def _shuffle(code: Code, instruction: Instruction, choices: Choices) -> Waiting:
    target, a, b, c, *members = instruction.operands
    values = (code.read(operand, TYPES["u32"]) for operand in (a, b, c))
    before = "w->a[lane] = {}; w->b[lane] = {}; w->c[lane] = {};".format(*values)
    waiting = _waiting(code, choices, before, members, _results(code, target), _SHUFFLES[choices["mode"]])
    return waiting._replace(together=_shuffle_together(instruction, choices["mode"]) if _are_all(members) else None)


def _source(mode: str, lane: int, b: int, c: int) -> int | None:
    """Return the lane whose value a lane takes; None if it is out of range."""
    segment, clamp, offset = c >> 8 & 31, c & 31, b & 31
    last = (lane & segment) | (clamp & ~segment)
    source = {
        "up": lane - offset,
        "down": lane + offset,
        "bfly": lane ^ offset,
        "idx": (lane & segment) | (offset & ~segment),
    }[mode]
    return source if (source >= last if mode == "up" else source <= last) else None


def _shuffle_together(instruction: Instruction, mode: str) -> Together | None:
    """Write a shuffle whose sources are known: vectors of 8 elements are permuted."""
    target, value, b, c = instruction.operands[:4]
    result, flag = (target.first, target.second) if isinstance(target, Pair) else (target, None)
    if not (isinstance(b, Immediate) and isinstance(c, Immediate) and _is_word(value) and _is_word(result)):
        return None
    assert isinstance(value, Register)
    assert isinstance(result, Register)
    found = [_source(mode, lane, b.value, c.value) for lane in range(_LANES)]
    sources = [lane if source is None else source & 31 for lane, source in enumerate(found)]
    parts: list[str] = []
    for start in range(0, _LANES, 8):
        chosen = sources[start : start + 8]
        chunks = sorted({source // 8 for source in chosen})
        first, second = chunks[0], chunks[-1]
        if len(chunks) > 2:
            vector = f"{{{', '.join(f'from_[{source}]' for source in chosen)}}}"
        else:
            places = ", ".join(str(source % 8 + 8 * (source // 8 != first)) for source in chosen)
            vector = f"SHUFFLE_8(from_ + {8 * first}, from_ + {8 * second}, {places})"
        parts.append(f"const u32x8 part_{start} = {vector};")
    stores = " ".join(f"STORE(u32x8, to_ + {start}, part_{start});" for start in range(0, _LANES, 8))
    text = f"{{ const u32 *from_ = (const u32 *)a_{value.name}; u32 *to_ = (u32 *)a_{result.name}; {' '.join(parts)}"
    table = ", ".join(map(str, sources))
    part = f"const u8 sources_[LANES] = {{{table}}}; shuffle_part(to_, from_, sources_, lanes);"
    text += f" if (lanes == ~0u) {{ {stores} }} else {{ {part} }}"
    registers = [value, result]
    if isinstance(flag, Register):
        valid = sum(1 << lane for lane, source in enumerate(found) if source is not None)
        text += f" FOR_ALL_LANES a_{flag.name}[lane] = {valid:#x}u >> lane & 1;"
        registers.append(flag)
    return Together(f"{text} }}", tuple(registers))


def _is_word(operand: Operand) -> bool:
    return isinstance(operand, Register) and operand.type.bits == 32


def _are_all(members: list[Operand]) -> bool:
    """Return whether all lanes take part: no lanes are named, or all are."""
    return not members or (isinstance(members[0], Immediate) and members[0].value & 0xFFFFFFFF == 0xFFFFFFFF)


def _same(target: Operand, value: str, registers: tuple[Operand, ...], text: str) -> Together | None:
    """Give all lanes one result."""
    if not isinstance(target, Register) or target.type.is_float or not all(isinstance(each, Register) for each in registers):
        return None
    known = tuple(each for each in (target, *registers) if isinstance(each, Register))
    return Together(f"{{ {text} const u32 result_ = {value}; FOR_ALL_LANES a_{target.name}[lane] = result_; }}", known)


def _vote(code: Code, instruction: Instruction, choices: Choices) -> Waiting:
    target, a, *members = instruction.operands
    before = f"w->a[lane] = {code.read(a, PREDICATE)};"
    waiting = _waiting(code, choices, before, members, _results(code, target, choices["T"]), _VOTES[choices["mode"]])
    voter = a.operand if isinstance(a, Negated) else a
    if not _are_all(members) or not isinstance(voter, Register):
        return waiting
    ballot = f"const u32 ballot_ = {'~' if isinstance(a, Negated) else ''}mask_of(a_{voter.name}) & lanes;"
    value = {
        "all": "ballot_ == lanes",
        "any": "ballot_ != 0",
        "uni": "ballot_ == 0 || ballot_ == lanes",
        "ballot": "ballot_",
    }[choices["mode"]]
    return waiting._replace(together=_same(target, value, (voter,), ballot))


def _waiting(code: Code, choices: Choices, before: str, members: list[Operand], after: str, operation: str) -> Waiting:
    if _is_synchronized(choices):
        return Waiting(f"{before} {_members(code, members[0])}", after, "WAIT_WARP", operation)
    return Waiting(before, after, "WAIT_CONVERGED", operation)


def _match(code: Code, instruction: Instruction, choices: Choices) -> Waiting:
    target, a, members = instruction.operands
    before = f"w->a[lane] = {code.read(a, TYPES[choices['T']])}; {_members(code, members)}"
    operation = "MATCH_ALL" if choices["mode"] == "all" else "MATCH_ANY"
    return Waiting(before, _results(code, target), "WAIT_WARP", operation)


def _reduce(code: Code, instruction: Instruction, choices: Choices) -> Waiting:
    target, a, members = instruction.operands
    before = f"w->a[lane] = {code.read(a, TYPES['u32'])}; {_members(code, members)}"
    name = f"{choices['operation']}.{choices['T']}"
    waiting = Waiting(before, _results(code, target), "WAIT_WARP", _REDUCTIONS[name])
    if not _are_all([members]) or not _is_word(a):
        return waiting
    assert isinstance(a, Register)
    cast = f"({'s32' if choices['T'] == 's32' else 'u32'})"
    step = {
        **{word: f"sum_ {sign} x_" for word, sign in (("add", "+"), ("and", "&"), ("or", "|"), ("xor", "^"))},
        **{word: f"{cast}x_ {sign} {cast}sum_ ? x_ : sum_" for word, sign in (("min", "<"), ("max", ">"))},
    }[choices["operation"]]
    text = f"const u32 *from_ = (const u32 *)a_{a.name}; u32 sum_ = *from_;"  # the first lane is a thread in every warp
    text += f" FOR_LANES(lanes & ~1u) {{ const u32 x_ = from_[lane]; sum_ = {step}; }}"
    return waiting._replace(together=_same(target, "sum_", (a,), text))


def _active_mask(code: Code, instruction: Instruction, choices: Choices) -> Waiting:
    target = instruction.operands[0]
    return Waiting("", _results(code, target), "WAIT_CONVERGED", "WARP_ACTIVE_MASK", together=_same(target, "lanes", (), ""))


def _elect(code: Code, instruction: Instruction, choices: Choices) -> Waiting:
    target, members = instruction.operands
    return Waiting(_members(code, members), _results(code, target), "WAIT_WARP", "ELECT")


def _sync(code: Code, instruction: Instruction, choices: Choices) -> Waiting:
    members = instruction.operands[0]
    together = Together("", ()) if _are_all([members]) else None
    return Waiting(_members(code, members), "", "WAIT_WARP", "WARP_SYNC", together=together)


TABLE.add("shfl{.sync}.mode.b32", _shuffle, is_pure=False, waits="uniform", mode=" ".join(_SHUFFLES))
TABLE.add("vote{.sync}.mode.T", _vote, is_pure=False, waits="uniform", mode="all any uni", T="pred")
TABLE.add("vote{.sync}.mode.T", _vote, is_pure=False, waits="uniform", mode="ballot", T="b32")
TABLE.add("match.mode.sync.T", _match, is_pure=False, waits="uniform", mode="any all", T="b32 b64")
TABLE.add("redux.sync.operation.T", _reduce, is_pure=False, waits="uniform", operation="add min max", T="u32 s32")
TABLE.add("redux.sync.operation.T", _reduce, is_pure=False, waits="uniform", operation="and or xor", T="b32")
TABLE.add("activemask.b32", _active_mask, is_pure=False, waits="uniform")
TABLE.add("elect.sync", _elect, is_pure=False, waits="uniform")
TABLE.add("bar.warp.sync", _sync, results=0, is_pure=False, waits="uniform")
