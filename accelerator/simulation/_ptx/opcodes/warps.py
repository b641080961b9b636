"""What the lanes of a warp do together: exchange values, vote, match, reduce."""

from __future__ import annotations

from ..code import Code
from ..operations import Choices, Table, Waiting
from ..syntax import Instruction, Operand, Pair
from ..types import PREDICATE, TYPES

TABLE = Table("warps")

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
    return _waiting(code, choices, before, members, _results(code, target), _SHUFFLES[choices["mode"]])


def _vote(code: Code, instruction: Instruction, choices: Choices) -> Waiting:
    target, a, *members = instruction.operands
    before = f"w->a[lane] = {code.read(a, PREDICATE)};"
    return _waiting(code, choices, before, members, _results(code, target, choices["T"]), _VOTES[choices["mode"]])


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
    return Waiting(before, _results(code, target), "WAIT_WARP", _REDUCTIONS[f"{choices['operation']}.{choices['T']}"])


def _active_mask(code: Code, instruction: Instruction, choices: Choices) -> Waiting:
    return Waiting("", _results(code, instruction.operands[0]), "WAIT_CONVERGED", "WARP_ACTIVE_MASK")


def _elect(code: Code, instruction: Instruction, choices: Choices) -> Waiting:
    target, members = instruction.operands
    return Waiting(_members(code, members), _results(code, target), "WAIT_WARP", "ELECT")


def _sync(code: Code, instruction: Instruction, choices: Choices) -> Waiting:
    return Waiting(_members(code, instruction.operands[0]), "", "WAIT_WARP", "WARP_SYNC")


TABLE.add("shfl{.sync}.mode.b32", _shuffle, is_pure=False, waits="uniform", mode=" ".join(_SHUFFLES))
TABLE.add("vote{.sync}.mode.T", _vote, is_pure=False, waits="uniform", mode="all any uni", T="pred")
TABLE.add("vote{.sync}.mode.T", _vote, is_pure=False, waits="uniform", mode="ballot", T="b32")
TABLE.add("match.mode.sync.T", _match, is_pure=False, waits="uniform", mode="any all", T="b32 b64")
TABLE.add("redux.sync.operation.T", _reduce, is_pure=False, waits="uniform", operation="add min max", T="u32 s32")
TABLE.add("redux.sync.operation.T", _reduce, is_pure=False, waits="uniform", operation="and or xor", T="b32")
TABLE.add("activemask.b32", _active_mask, is_pure=False, waits="uniform")
TABLE.add("elect.sync", _elect, is_pure=False, waits="uniform")
TABLE.add("bar.warp.sync", _sync, results=0, is_pure=False, waits="uniform")
