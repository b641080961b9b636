"""Barriers of a block, and fences."""

from __future__ import annotations

import re

from ..code import Code
from ..operations import Choices, Table, Waiting
from ..syntax import Instruction
from ..types import PREDICATE, TYPES

TABLE = Table("barriers")

_OPERATIONS = {"popc": "BARRIER_POPC", "and": "BARRIER_AND", "or": "BARRIER_OR"}


def canonical(opcode: str) -> str:
    """bar{.cta} is barrier{.cta}.aligned, and threads that are not aligned may use either here."""
    return re.sub(r"\.(?:cta|aligned)(?=\.|$)", "", re.sub(r"^bar\.", "barrier.", opcode))


def _sync(code: Code, instruction: Instruction, choices: Choices) -> Waiting:
    code.uses.add("warp")
    number, *count = (code.read(operand, TYPES["u32"]) for operand in instruction.operands)
    assert len(count) <= 1
    before = f"w->a[lane] = {number}; w->b[lane] = {count[0] if count else 0};"
    return Waiting(before, "", "WAIT_BARRIER", "BARRIER_SYNC")


def _reduce(code: Code, instruction: Instruction, choices: Choices) -> Waiting:
    """Wait, and learn of how many, of all or of any of the threads the predicate was true."""
    code.uses.add("warp")
    target, number, *rest = instruction.operands
    assert 1 <= len(rest) <= 2
    count = code.read(rest[0], TYPES["u32"]) if len(rest) > 1 else "0"
    predicate = code.read(rest[-1], PREDICATE)
    before = f"w->a[lane] = {code.read(number, TYPES['u32'])}; w->b[lane] = {count}; w->c[lane] = {predicate};"
    after = code.write(target, TYPES[choices["T"]], f"({TYPES[choices['T']].c})w->result[lane]")
    return Waiting(before, after, "WAIT_BARRIER", _OPERATIONS[choices["operation"]])


def _arrive(code: Code, instruction: Instruction, choices: Choices) -> str:
    number, count = (code.read(operand, TYPES["u32"]) for operand in instruction.operands)
    code.uses.add("lane")
    return f"services->arrive(b, thread, {number}, {count});"


def _fence(code: Code, instruction: Instruction, choices: Choices) -> str:
    return "__atomic_thread_fence(__ATOMIC_SEQ_CST);"


TABLE.add("barrier.sync", _sync, results=0, is_pure=False, waits="uniform")
TABLE.add("barrier.arrive", _arrive, results=0, is_pure=False, waits="lanes")
TABLE.add("barrier.red.operation.T", _reduce, is_pure=False, waits="uniform", operation="popc", T="u32")
TABLE.add("barrier.red.operation.T", _reduce, is_pure=False, waits="uniform", operation="and or", T="pred")
_SCOPES = {"scope": "cta cluster gpu sys"}
TABLE.add("membar.level", _fence, results=0, is_pure=False, level="cta gl sys")
TABLE.add("fence{.order}.scope", _fence, _SCOPES, results=0, is_pure=False, order="sc acq_rel acquire release")
_PROXIES = "alias async async.global async.shared::cta"
TABLE.add("fence.proxy.kind", _fence, results=0, is_pure=False, kind=_PROXIES)
TABLE.add("membar.proxy.alias", _fence, results=0, is_pure=False)
TABLE.add("fence.mbarrier_init.release.cluster", _fence, results=0, is_pure=False)
