"""Asynchronous copies and mbarrier objects.

A copy is done when it is begun, so groups of copies need no waiting. PTX does not say what an mbarrier object
holds; here it is the word that ``memory.h`` describes.
"""

from __future__ import annotations

from ..code import Code
from ..operations import Choices, Table, Waiting
from ..syntax import Address, Immediate, Instruction, Operand, Register, Sink
from ..types import PREDICATE, TYPES

TABLE = Table("asynchronous")


def canonical(opcode: str) -> str:
    """Take hints, scopes and orders out: nothing here depends on them."""
    parts = [
        "shared" if part.startswith("shared::") else part
        for part in opcode.split(".")
        if part not in ("cta", "cluster", "relaxed", "acquire", "release") and "L2::" not in part
    ]
    if "shared" in parts and parts[0] == "mbarrier":
        parts.remove("shared")
        parts.insert(-1, "shared")
    return ".".join(parts)


def _copy(code: Code, instruction: Instruction, choices: Choices) -> str:
    """Copies 4, 8 or 16 bytes; of a shorter source, or one to ignore, the rest is zeros."""
    target, source, size, *rest = instruction.operands
    assert isinstance(size, Immediate)
    rest = [operand for operand in rest if not (isinstance(operand, Register) and operand.type.bits == 64)]
    copied = f"{size.value}u"
    if rest:
        operand = rest[0]
        is_predicate = isinstance(operand, Register) and operand.type is PREDICATE
        copied = f"({code.read(operand, PREDICATE)} ? 0 : {size.value}u)" if is_predicate else code.read(operand, TYPES["u32"])
    to = code.pointer(target, "shared", size.value)
    if not rest:
        return f"__builtin_memcpy({to}, {code.pointer(source, 'global', size.value)}, {size.value});"
    # Of a shorter source each byte is read alone: what follows it need not exist.
    whole = code.pointer(source, "global", size.value)
    return (
        f"{{ u32 copied_ = {copied}; char *to_ = {to}; __builtin_memset(to_, 0, {size.value});"
        f" if (copied_ && (copied_ >= {size.value} || ({code.address(source)} & {size.value - 1})))"
        f" __builtin_memcpy(to_, {whole}, {size.value});"
        f" else for (u32 i_ = 0; i_ < copied_; i_++) to_[i_] = *{code.pointer(source, 'global', 1, 'i_')}; }}"
    )


def _nothing(code: Code, instruction: Instruction, choices: Choices) -> str:
    return ";"


def _object(code: Code, address: Operand, choices: Choices) -> str:
    """Return a pointer to an mbarrier object."""
    return f"(u64 *){code.pointer(address, choices.get('space', ''), 8)}"


def _init(code: Code, instruction: Instruction, choices: Choices) -> str:
    address, count = instruction.operands
    return f"mbarrier_init({_object(code, address, choices)}, {code.read(count, TYPES['u32'])});"


def _arrive(code: Code, instruction: Instruction, choices: Choices) -> str:
    operands = list(instruction.operands)
    target = Sink() if isinstance(operands[0], Address) else operands.pop(0)
    expects = choices.get("expect")
    amount = code.read(operands[1], TYPES["u32"]) if len(operands) > 1 else ""
    count = "1" if expects or not amount else amount
    bytes_ = amount if expects else "0"
    drops = "true" if choices["verb"] == "arrive_drop" else "false"
    value = f"mbarrier_arrive({_object(code, operands[0], choices)}, {count}, {bytes_ or '0'}, {drops})"
    return code.write(target, TYPES["b64"], value)


def _expect(code: Code, instruction: Instruction, choices: Choices) -> str:
    address, amount = instruction.operands
    function = "mbarrier_expect" if choices["verb"] == "expect_tx" else "mbarrier_complete"
    return f"{function}({_object(code, address, choices)}, {code.read(amount, TYPES['u32'])});"


def _completed(code: Code, instruction: Instruction, choices: Choices) -> str:
    _, address, phase = instruction.operands[:3]
    pointer = _object(code, address, choices)
    if choices.get("parity"):
        return f"mbarrier_parity_is_over({pointer}, {code.read(phase, TYPES['u32'])})"
    return f"mbarrier_phase_is_over({pointer}, {code.read(phase, TYPES['u64'])})"


def _test(code: Code, instruction: Instruction, choices: Choices) -> str:
    return code.write(instruction.operands[0], PREDICATE, _completed(code, instruction, choices))


def _try(code: Code, instruction: Instruction, choices: Choices) -> Waiting:
    """Lets other threads run if the phase is not over, then tests."""
    completed = _completed(code, instruction, choices)
    after = code.write(instruction.operands[0], PREDICATE, completed)
    return Waiting("", after, "WAIT_POLITELY", "WARP_SYNC", condition=f"!{completed}")


def _pending_count(code: Code, instruction: Instruction, choices: Choices) -> str:
    target, state = instruction.operands
    return code.write(target, TYPES["u32"], f"mbarrier_pending({code.read(state, TYPES['u64'])})")


def _arrive_after_copies(code: Code, instruction: Instruction, choices: Choices) -> str:
    """The thread's copies are done, so it arrives; with .noinc the count expects this, otherwise it is adjusted."""
    pointer = _object(code, instruction.operands[0], choices)
    if choices["noinc"]:
        return f"(void)mbarrier_arrive({pointer}, 1, 0, false);"
    return f"(void){pointer};"


def _bulk(code: Code, instruction: Instruction, choices: Choices) -> str:
    """Copies a multiple of 16 bytes; to shared memory, then completes as many bytes of an mbarrier's transaction."""
    target, source, size, *rest = instruction.operands
    count = code.read(size, TYPES["u32"])
    to_shared = choices["D"] == "shared"
    ends = [
        f"char *{name} = {code.pointer(address, space, 16)}; (void){code.pointer(address, space, 16, '(u64)size_ - 16')};"
        for name, address, space in (("to_", target, choices["D"]), ("from_", source, choices["A"]))
    ]
    complete = f" mbarrier_complete({_object(code, rest[0], {'space': 'shared'})}, size_);" if to_shared else ""
    return f"{{ u32 size_ = {count}; if (size_) {{ {' '.join(ends)} __builtin_memcpy(to_, from_, size_); }}{complete} }}"


TABLE.add("cp.async.cache.shared.global", _copy, results=0, is_pure=False, cache="ca cg")
for _pattern in ("cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all", "cp.async.bulk.commit_group"):
    TABLE.add(_pattern, _nothing, results=0, is_pure=False)
TABLE.add("cp.async.bulk.wait_group{.read}", _nothing, results=0, is_pure=False)
TABLE.add("cp.async.bulk.prefetch.L2.global", _nothing, results=0, is_pure=False)
TABLE.add("cp.async.bulk.D.A.mbarrier::complete_tx::bytes", _bulk, results=0, is_pure=False, D="shared", A="global")
TABLE.add("cp.async.bulk.D.A.bulk_group", _bulk, results=0, is_pure=False, D="global", A="shared")
_SPACE = {"space": "shared"}
TABLE.add("cp.async.mbarrier.arrive{.noinc}{.space}.b64", _arrive_after_copies, _SPACE, results=0, is_pure=False)
TABLE.add("mbarrier.init{.space}.b64", _init, _SPACE, results=0, is_pure=False)
TABLE.add("mbarrier.inval{.space}.b64", _nothing, _SPACE, results=0, is_pure=False)
_ARRIVALS = {**_SPACE, "verb": "arrive arrive_drop"}
TABLE.add("mbarrier.verb{.expect}{.space}.b64", _arrive, _ARRIVALS, is_pure=False, expect="expect_tx")
TABLE.add("mbarrier.verb.noComplete{.space}.b64", _arrive, _ARRIVALS, is_pure=False)
TABLE.add("mbarrier.verb{.space}.b64", _expect, _SPACE, results=0, is_pure=False, verb="expect_tx complete_tx")
TABLE.add("mbarrier.test_wait{.parity}{.space}.b64", _test, _SPACE, is_pure=False, polls=True)
TABLE.add("mbarrier.try_wait{.parity}{.space}.b64", _try, _SPACE, is_pure=False, waits="lanes")
TABLE.add("mbarrier.pending_count.b64", _pending_count)
