"""Control flow of a function: basic blocks, liveness, loops, and what all threads of a block do alike.

Sets of registers and of basic blocks are integers with a bit for each.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from . import opcodes
from .code import is_block_register
from .errors import Refused
from .syntax import (
    Address,
    Directive,
    Function,
    Instruction,
    Label,
    Negated,
    Operand,
    Pair,
    Register,
    Special,
    Symbol,
    Vector,
)
from .types import PREDICATE, TYPES

Guard = tuple[Register, bool]
"""A predicate, and whether it is negated."""

EXIT = -1
"""In place of a basic block: the thread returns."""

CARRY = Register("carry", TYPES["u32"])
"""The condition code CC.CF, which add.cc writes and addc reads."""

_OWN_SPACES = {"local", "param", "const"}
"""Memory that no other thread writes."""
_RETURNS = ("ret", "ret.uni", "exit")


@dataclass(slots=True)
class BasicBlock:
    """Instructions that run one after the other, and where they lead.

    `targets` has one block without a condition. With a condition it has two, of which the first follows if the condition
    holds. With a selector it has those of an indirect branch.
    """

    number: int
    instructions: list[Instruction] = field(default_factory=list[Instruction])
    targets: list[int] = field(default_factory=list[int])
    condition: Register | None = None
    is_negated: bool = False
    selector: Operand | None = None
    exits: bool = False  # whether its EXIT ends the thread, in a function too


def registers_of(operand: Operand) -> Iterator[Register]:
    """Yield the registers in an operand."""
    match operand:
        case Register():
            yield operand
        case Negated():
            yield operand.operand
        case Address():
            yield from registers_of(operand.base)
        case Vector():
            for part in operand.parts:
                yield from registers_of(part)
        case Pair():
            yield from registers_of(operand.first)
            yield from registers_of(operand.second)
        case _:
            pass


def written_and_read(instruction: Instruction) -> tuple[list[Register], list[Register]]:
    """Return the registers that an instruction writes, and those that it reads."""
    results = opcodes.find(instruction.opcode).results
    written: list[Register] = []
    read: list[Register] = []
    for position, operand in enumerate(instruction.operands):
        is_result = position < results and not isinstance(operand, Address)
        (written if is_result else read).extend(registers_of(operand))
    first, *modifiers = instruction.opcode.split(".")
    if first in ("addc", "subc", "madc"):
        read.append(CARRY)
    if "cc" in modifiers:
        written.append(CARRY)
    if instruction.guard is not None:
        read.append(instruction.guard)
    return written, read


class Flow:
    """The control flow of a function.

    Attributes:
        function: The function.
        blocks: Its basic blocks, in the order of the text; the first one is the entry.
        registers: Its registers, in the order of their bits.
        live_in: For each block, the registers whose values it or a later one needs.
    """

    def __init__(self, function: Function, *, is_flat: bool = False) -> None:
        """Find the control flow.

        Args:
            function: The function.
            is_flat: Whether short branches become guards of the instructions that they skip.
        """
        self.function = function
        self.blocks = _flatten(_split(function)) if is_flat else _split(function)
        self.registers: list[Register] = []
        self._bits: dict[str, int] = {}
        self.effects: dict[int, tuple[int, int]] = {}
        """For each instruction, by its id: the registers that it writes and reads."""
        for block in self.blocks:
            for instruction in block.instructions:
                written, read = written_and_read(instruction)
                self.effects[id(instruction)] = (self.mask(written), self.mask(read))
            if block.condition is not None:
                self.mask([block.condition])
            if block.selector is not None:
                self.mask(list(registers_of(block.selector)))
        self._guards: dict[int, list[Guard]] = {}
        """For each guarded instruction, by its id: what holds in the threads that run it."""
        self._certain: set[int] = set()
        self.live_in, self.live_out = self._find_live([self._find_guards(block) for block in self.blocks])
        for block in self.blocks:
            self._find_certain(block)

    def mask(self, registers: list[Register]) -> int:
        bits = 0
        for register in registers:
            bit = self._bits.get(register.name)
            if bit is None:
                bit = self._bits[register.name] = len(self.registers)
                self.registers.append(register)
            bits |= 1 << bit
        return bits

    def observed(self) -> set[str]:
        """Return the names of the registers of which an instruction reads all bits, those of a NaN too."""
        return {
            register.name
            for block in self.blocks
            for instruction in block.instructions
            if not opcodes.ignores_nan(instruction.opcode)
            for register in written_and_read(instruction)[1]
        }

    def members(self, mask: int) -> Iterator[Register]:
        """Yield the registers of a set."""
        while mask:
            lowest = mask & -mask
            yield self.registers[lowest.bit_length() - 1]
            mask ^= lowest

    def branch_reads(self, block: BasicBlock) -> int:
        """Return the registers that decide where a block leads."""
        registers = [block.condition] if block.condition is not None else []
        if block.selector is not None:
            registers += list(registers_of(block.selector))
        return self.mask(registers)

    def is_certain(self, instruction: Instruction) -> bool:
        """Return whether no thread needs what an instruction's results were before: it has no guard, or nothing reads the
        results in the threads that its guard skips."""
        return instruction.guard is None or id(instruction) in self._certain

    def _find_guards(self, block: BasicBlock) -> tuple[int, int]:
        """Find what holds in the threads that run guarded instructions.

        Returns:
            The registers of which the block needs the values from before it, and those that it writes in all threads.
        """
        needed = writes = watched = 0
        written_under: dict[Guard, int] = {}
        implied: dict[Guard, list[Guard]] = {}
        for instruction in block.instructions:
            written, read = self.effects[id(instruction)]
            own = guard_of(instruction)
            outer = own or (_outer_guard(instruction) if _joins_guards(instruction) else None)
            guards = [outer, *implied.get(outer, ())] if outer is not None else []
            self._guards[id(instruction)] = guards
            needed |= read & ~functools.reduce(operator.or_, (written_under.get(guard, 0) for guard in guards), writes)
            if written & watched:  # guards that the instruction changes hold no longer
                for guard in [guard for guard in {*written_under, *implied} if self.mask([guard[0]]) & written]:
                    written_under.pop(guard, None)
                    implied.pop(guard, None)
                for others in implied.values():
                    others[:] = [guard for guard in others if not self.mask([guard[0]]) & written]
            if own is not None:
                watched |= self.mask([own[0]])
                if not self.mask([own[0]]) & written:
                    written_under[own] = written_under.get(own, 0) | written
                continue
            writes |= written
            if guards:
                joined = instruction.operands[0]
                assert isinstance(joined, Register)
                implied[joined, False] = guards
                watched |= self.mask([joined, *(guard for guard, _ in guards)])
        return needed | (self.branch_reads(block) & ~writes), writes

    def _find_certain(self, block: BasicBlock) -> None:
        """Find guarded instructions whose results only instructions with their guard read."""
        accesses: dict[int, list[int]] = {}  # for each register, the places of the instructions that read or write it
        for place, instruction in enumerate(block.instructions):
            for number in _numbers(functools.reduce(operator.or_, self.effects[id(instruction)])):
                accesses.setdefault(number, []).append(place)
        after = self.live_out[block.number] | self.branch_reads(block)
        for place, instruction in enumerate(block.instructions):
            if instruction.guard is None:
                continue
            guard = self.mask([instruction.guard])
            uses = accesses[guard.bit_length() - 1]
            end = next((use for use in uses if use >= place and self._written(block, use) & guard), len(block.instructions))
            for number in _numbers(self._written(block, place)):
                later = accesses[number][bisect.bisect_right(accesses[number], place) :]
                if not self._is_private(block, place, end, number, later, bool(after >> number & 1)):
                    break
            else:
                self._certain.add(id(instruction))

    def _written(self, block: BasicBlock, place: int) -> int:
        return self.effects[id(block.instructions[place])][0]

    def _is_private(self, block: BasicBlock, place: int, end: int, number: int, later: list[int], is_live: bool) -> bool:
        """Return whether only threads that an instruction's guard does not skip read its result.

        Args:
            block: The block.
            place: The place of the instruction.
            end: The place of the next one that changes the guard.
            number: The bit of the result.
            later: The places of instructions after it that read or write the result.
            is_live: Whether the result is needed after the block.
        """
        guard = guard_of(block.instructions[place])
        for other in later:
            written, read = self.effects[id(block.instructions[other])]
            if read >> number & 1 and (other > end or guard not in self._guards[id(block.instructions[other])]):
                return False
            if written >> number & 1 and block.instructions[other].guard is None:
                return True
        return not is_live

    def _find_live(self, effects: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
        """Find the live registers, given for each block those that it needs and those that it writes in all threads."""
        count = len(self.blocks)
        live_in, live_out = [0] * count, [0] * count
        predecessors = self.predecessors()
        work = list(range(count))
        while work:
            number = work.pop()
            out = 0
            for target in self.blocks[number].targets:
                if target != EXIT:
                    out |= live_in[target]
            live_out[number] = out
            needed, written = effects[number]
            before = needed | (out & ~written)
            if before != live_in[number]:
                live_in[number] = before
                work.extend(predecessors[number])
        return live_in, live_out

    def live_after(self, block: BasicBlock) -> list[int]:
        """Return, for each instruction of a block, the registers whose values are needed after it."""
        live = self.live_out[block.number] | self.branch_reads(block)
        after: list[int] = []
        for instruction in reversed(block.instructions):
            after.append(live)
            written, read = self.effects[id(instruction)]
            if self.is_certain(instruction):
                live &= ~written
            live |= read
        after.reverse()
        return after

    def predecessors(self) -> list[list[int]]:
        result: list[list[int]] = [[] for _ in self.blocks]
        for block in self.blocks:
            for target in set(block.targets):
                if target != EXIT:
                    result[target].append(block.number)
        return result

    def loops(self) -> list[int]:
        """Return the loops, each a set of blocks that can all reach each other."""
        reachable = [0] * len(self.blocks)
        for block in self.blocks:
            for target in block.targets:
                if target != EXIT:
                    reachable[block.number] |= 1 << target
        changed = True
        while changed:
            changed = False
            for block in reversed(self.blocks):
                before = reachable[block.number]
                after = before
                for target in block.targets:
                    if target != EXIT:
                        after |= reachable[target]
                if after != before:
                    reachable[block.number] = after
                    changed = True
        found: list[int] = []
        seen = 0
        for block in self.blocks:
            bit = 1 << block.number
            if reachable[block.number] & bit and not seen & bit:
                loop = bit
                for other in _numbers(reachable[block.number]):
                    if reachable[other] & bit:
                        loop |= 1 << other
                seen |= loop
                found.append(loop)
        return found

    def polls(self, reads: Callable[[Instruction], bool]) -> set[int]:
        """Return the ids of the instructions that may wait for other threads in a loop.

        Such an instruction reads what others write, and whether its loop ends depends on what it reads. In a loop that changes
        nothing else, any load may be one.

        Args:
            reads: Whether a call is of a function that reads what others write.
        """
        found: set[int] = set()
        predecessors = self.predecessors()
        for loop in self.loops():
            blocks = [self.blocks[number] for number in _numbers(loop)]
            instructions = [instruction for block in blocks for instruction in block.instructions]
            written = functools.reduce(operator.or_, (self.effects[id(each)][0] for each in instructions), 0)
            entries = [block.number for block in blocks if any(not loop >> each & 1 for each in predecessors[block.number])]
            changes = any(self.live_in[number] & written for number in entries or [0]) or self._changes_frame(instructions)
            for instruction in instructions:
                may_poll = opcodes.find(instruction.opcode).polls or reads(instruction)
                may_poll |= not changes and loads(instruction)
                if may_poll and self._decides(instruction, blocks, loop):
                    found.add(id(instruction))
        return found

    def _changes_frame(self, instructions: list[Instruction]) -> bool:
        """Return whether a loop computes what it writes to a thread's own memory from what it reads there, as a counter."""
        kept = self._tainted(1 << len(self.registers), instructions)
        return any(
            instruction.arguments  # of a call
            or (instruction.opcode.startswith("st") and self.effects[id(instruction)][1] & kept)
            for instruction in instructions
        )

    def _with_memory(self, instruction: Instruction) -> tuple[int, int]:
        """Return what an instruction writes and reads, where a thread's own memory is one more register, and all other too."""
        written, read = self.effects[id(instruction)]
        kind, spaces = instruction.opcode.partition(".")[0], _spaces(instruction)
        memory = (0 if spaces & {"global", "shared"} else 1) | (0 if spaces & _OWN_SPACES else 2)
        memory <<= len(self.registers)
        is_call = bool(instruction.arguments or instruction.results)
        return written | (memory if kind == "st" or is_call else 0), read | (memory if kind == "ld" or is_call else 0)

    def _tainted(self, tainted: int, instructions: list[Instruction]) -> int:
        """Return what depends on registers, with them."""
        effects = [self._with_memory(instruction) for instruction in instructions]
        changed = True
        while changed:
            changed = False
            for written, read in effects:
                if read & tainted and written & ~tainted:
                    tainted |= written
                    changed = True
        return tainted

    def _decides(self, source: Instruction, blocks: list[BasicBlock], loop: int) -> bool:
        tainted = self._tainted(
            self._with_memory(source)[0], [instruction for block in blocks for instruction in block.instructions]
        )
        for block in blocks:
            leaves = any(target == EXIT or not loop >> target & 1 for target in block.targets)
            if leaves and self.branch_reads(block) & tainted:
                return True
        return False


def loads(instruction: Instruction) -> bool:
    """Return whether an instruction loads from memory that other threads may change."""
    return instruction.opcode.startswith("ld") and not _spaces(instruction) & _OWN_SPACES


def _spaces(instruction: Instruction) -> set[str]:
    """Return the state space of an access, among its modifiers; a generic address may be in any."""
    return {part.partition("::")[0] for part in instruction.opcode.split(".")}


def _numbers(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _split(function: Function) -> list[BasicBlock]:
    """Split a function's body into basic blocks, and drop those that nothing reaches."""
    blocks = [BasicBlock(0)]
    labels: dict[str, int] = {}
    switches = {statement.label: statement.targets for statement in function.body if isinstance(statement, Directive)}
    jumps: list[tuple[BasicBlock, tuple[str, ...]]] = []
    is_open = True  # whether the last block goes on to the next one

    def begin(falls_through: bool) -> BasicBlock:
        block = BasicBlock(len(blocks))
        if falls_through:
            blocks[-1].targets.append(block.number)
        blocks.append(block)
        return block

    branches = (each for each in function.body if isinstance(each, Instruction) and each.opcode.startswith("bra"))
    used = {operand.name for branch in branches for operand in branch.operands if isinstance(operand, Symbol)}
    used.update(*switches.values())
    for statement in function.body:
        current = blocks[-1]
        if isinstance(statement, Label):
            if statement.name not in used:  # of debuggers
                continue
            if current.instructions or current.targets or not is_open:
                current = begin(is_open)
            is_open = True
            labels[statement.name] = current.number
        elif isinstance(statement, Instruction):
            if not is_open:
                current = begin(False)
                is_open = True
            kind = statement.opcode.split(".", 1)[0]
            if kind in ("bra", "brx") or statement.opcode in _RETURNS:
                is_open = _end(current, statement, jumps, switches)
                if is_open:
                    begin(True)
            elif statement.guard is not None and opcodes.find(statement.opcode).waits:
                _isolate(current, statement, blocks)
            else:
                current.instructions.append(statement)
    if is_open:
        blocks[-1].targets.append(EXIT)
    for block, names in jumps:
        block.targets = [labels[name] for name in names] + block.targets
    return _reachable(blocks)


def _end(
    block: BasicBlock,
    statement: Instruction,
    jumps: list[tuple[BasicBlock, tuple[str, ...]]],
    switches: dict[str, tuple[str, ...]],
) -> bool:
    """End a block by a branch or return; return whether the next one may follow."""
    block.condition, block.is_negated = statement.guard, statement.is_guard_negated
    if statement.opcode in _RETURNS:
        block.targets.append(EXIT)
        # Compilers write it behind trap, too, where nothing arrives.
        block.exits = statement.opcode == "exit" and not (block.instructions and block.instructions[-1].opcode == "trap")
    elif statement.opcode.startswith("brx"):
        if statement.guard is not None:
            raise Refused(f"{statement.text}: a guarded indirect branch")
        selector, table = statement.operands
        assert isinstance(table, Symbol)
        if table.name not in switches:
            raise Refused(f"{statement.text}: no .branchtargets")
        block.selector = selector
        jumps.append((block, switches[table.name]))
    else:
        target = statement.operands[0]
        assert isinstance(target, Symbol)
        jumps.append((block, (target.name,)))
    return statement.guard is not None


def _isolate(current: BasicBlock, statement: Instruction, blocks: list[BasicBlock]) -> None:
    """Put a guarded instruction at which lanes wait into a block of its own, behind a branch."""
    inner, after = BasicBlock(len(blocks)), BasicBlock(len(blocks) + 1)
    current.condition, current.is_negated = statement.guard, statement.is_guard_negated
    current.targets = [inner.number, after.number]
    inner.instructions.append(replace(statement, guard=None))
    inner.targets.append(after.number)
    blocks += [inner, after]


_LONGEST_SKIPPED = 64
"""Instructions that become guarded in the place of a branch: then each thread computes them, whether it needs them or not."""


def _flatten(blocks: list[BasicBlock]) -> list[BasicBlock]:
    """Replace branches that skip a block, or choose between two, by guards of their instructions."""
    names = (Register(f"{_JOINED}{number}", PREDICATE) for number in itertools.count())
    changed = True
    while changed:
        changed = False
        entries = Counter(target for block in blocks for target in block.targets)
        for block in blocks:
            if block.condition is None or len(block.targets) != 2:
                continue
            sides = [blocks[target] if target != EXIT else None for target in block.targets]
            ends = [
                side.targets[0] if side is not None and entries[side.number] == 1 and _may_be_guarded(side, block) else None
                for side in sides
            ]
            skips = [ends[0] == block.targets[1], ends[1] == block.targets[0]]
            chosen = [0, 1] if ends[0] is not None and ends[0] == ends[1] else [skips.index(True)] if any(skips) else []
            if not chosen:
                continue
            join = ends[chosen[0]]
            assert join is not None
            for place in chosen:
                side = sides[place]
                assert side is not None
                for instruction in side.instructions:
                    block.instructions += _guarded(instruction, block.condition, block.is_negated != bool(place), names)
            block.condition, block.targets, changed = None, [join], True
            blocks = _merge(_reachable(blocks))
            break
    return blocks


def _may_be_guarded(side: BasicBlock, block: BasicBlock) -> bool:
    if side is block or len(side.targets) != 1 or side.exits or len(side.instructions) > _LONGEST_SKIPPED:
        return False
    for instruction in side.instructions:
        is_call = instruction.opcode.startswith("call") or ".cc" in instruction.opcode
        if is_call or opcodes.find(instruction.opcode).waits or block.condition in written_and_read(instruction)[0]:
            return False
    return True


def _guarded(instruction: Instruction, condition: Register, is_negated: bool, names: Iterator[Register]) -> list[Instruction]:
    if instruction.guard is None:
        return [replace(instruction, guard=condition, is_guard_negated=is_negated)]
    both = next(names)
    terms = [
        Negated(register) if negated else register
        for register, negated in ((condition, is_negated), (instruction.guard, instruction.is_guard_negated))
    ]
    combine = Instruction("and.pred", (both, *terms), instruction.text)
    return [combine, replace(instruction, guard=both, is_guard_negated=False)]


_JOINED = "guard_"
"""What the names of predicates begin with that join two guards. Those of PTX begin otherwise."""


def guard_of(instruction: Instruction) -> Guard | None:
    """Return the guard of an instruction, if it has one."""
    return None if instruction.guard is None else (instruction.guard, instruction.is_guard_negated)


def _joins_guards(instruction: Instruction) -> bool:
    target = instruction.operands[0] if instruction.operands else None
    return isinstance(target, Register) and target.name.startswith(_JOINED)


def _outer_guard(instruction: Instruction) -> Guard:
    """Return the first one of the guards that an instruction joins: without it, the second one decides nothing."""
    term = instruction.operands[1]
    if isinstance(term, Negated):
        return term.operand, True
    assert isinstance(term, Register)
    return term, False


def _merge(blocks: list[BasicBlock]) -> list[BasicBlock]:
    """Join blocks that follow each other without a branch."""
    entries = Counter(target for block in blocks for target in block.targets)
    for block in blocks:
        while len(block.targets) == 1 and block.targets[0] not in (EXIT, 0, block.number) and entries[block.targets[0]] == 1:
            following = blocks[block.targets[0]]
            if block.selector is not None:
                break
            block.instructions += following.instructions
            block.targets, block.exits = following.targets, following.exits
            block.condition, block.is_negated = following.condition, following.is_negated
            block.selector = following.selector
            following.targets, following.instructions = [], []
    return _reachable(blocks)


def _reachable(blocks: list[BasicBlock]) -> list[BasicBlock]:
    seen: set[int] = set()
    work = [0]
    while work:
        number = work.pop()
        if number not in seen:
            seen.add(number)
            work.extend(target for target in blocks[number].targets if target != EXIT)
    numbers = {old: new for new, old in enumerate(sorted(seen))}
    kept = [blocks[old] for old in numbers]
    for block in kept:
        block.number = numbers[block.number]
        block.targets = [target if target == EXIT else numbers[target] for target in block.targets]
        if block.condition is not None and len(set(block.targets)) == 1:
            block.condition, block.targets = None, block.targets[:1]
    return kept


class Uniformity:
    """What all threads of a block do alike, if they begin together.

    Attributes:
        varying: Registers whose values may differ between threads.
        diverged: Blocks that some threads may run and others not.
        join: For each block outside `diverged` that ends with a branch on which threads may disagree, the block at which
            they are together again, or EXIT.
        regions: For each of those, the blocks between.
    """

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self.varying = 0
        self.diverged = 0
        self.join: dict[int, int] = {}
        self.regions: dict[int, int] = {}
        self._post_dominators = _find_post_dominators(flow)
        changed = True
        while changed:
            changed = self._mark_values() or self._mark_branches()
            if not changed:
                break

    def is_varying(self, mask: int) -> bool:
        return bool(self.varying & mask)

    def is_store_of_all(self, instruction: Instruction) -> bool:
        """Return whether all threads of a block store to the same address."""
        if not instruction.opcode.startswith("st.") or _spaces(instruction) & _OWN_SPACES:
            return False
        guard = [instruction.guard] if instruction.guard is not None else []
        return not self.varying & self._flow.mask([*registers_of(instruction.operands[0]), *guard])

    def changes_what_all_read(self) -> bool:
        """Return whether all threads of a block store to the same address, after one of them may have loaded."""
        blocks = [block for block in self._flow.blocks if not self.diverged >> block.number & 1]
        has_stores = any(self.is_store_of_all(instruction) for block in blocks for instruction in block.instructions)
        return has_stores and any(loads(instruction) for block in self._flow.blocks for instruction in block.instructions)

    def _mark_values(self) -> bool:
        before = self.varying
        flow = self._flow
        for block in flow.blocks:
            is_diverged = bool(self.diverged >> block.number & 1)
            for instruction in block.instructions:
                written, read = flow.effects[id(instruction)]
                if is_diverged or read & self.varying or not is_uniform_source(instruction, flow.function):
                    self.varying |= written
        return self.varying != before

    def _mark_branches(self) -> bool:
        before = (self.diverged, len(self.regions))
        flow = self._flow
        for block in flow.blocks:
            if len(block.targets) < 2 or block.number in self.regions:
                continue
            if not (flow.branch_reads(block) & self.varying or self.diverged >> block.number & 1):
                continue
            join = self._post_dominators[block.number]
            region = self._between(block.targets, join)
            self.join[block.number], self.regions[block.number] = join, region
            self.diverged |= region
        return (self.diverged, len(self.regions)) != before

    def region_from(self, head: int) -> tuple[int, int]:
        """Return the blocks from one at which threads diverge to that at which they are together again, and the latter."""
        join = self._post_dominators[head]
        while join != EXIT and self.diverged >> join & 1:
            join = self._post_dominators[join]
        return self._between([head], join), join

    def _between(self, first: list[int], join: int) -> int:
        region = 0
        work = list(first)
        while work:
            number = work.pop()
            if number not in (join, EXIT) and not region >> number & 1:
                region |= 1 << number
                work.extend(self._flow.blocks[number].targets)
        return region


def is_uniform_source(instruction: Instruction, function: Function) -> bool:
    """Return whether an instruction gives all threads the same result if its registers have the same values."""
    operation = opcodes.find(instruction.opcode)
    are_alike = True
    for operand in instruction.operands:
        if isinstance(operand, Special):
            are_alike = are_alike and is_block_register(operand.name)
        elif isinstance(operand, Symbol) and operand.name in function.variables:
            # Each thread has its own local memory.
            are_alike = are_alike and function.variables[operand.name].space not in ("local", "param")
    if instruction.opcode.startswith("ld.param"):
        address = instruction.operands[-1]
        # Those of the kernel, not those of calls, which each thread has of its own.
        return isinstance(address, Address) and isinstance(address.base, Symbol) and address.base.name not in function.variables
    return operation.is_pure and are_alike


def _find_post_dominators(flow: Flow) -> list[int]:
    """Return the nearest block that every path from a block to the exit passes; EXIT if there is none."""
    count = len(flow.blocks)
    everything = (1 << count) - 1
    sets = [everything] * count
    changed = True
    while changed:
        changed = False
        for block in reversed(flow.blocks):
            common = everything
            for target in block.targets:
                common &= 0 if target == EXIT else sets[target]
            common |= 1 << block.number
            if common != sets[block.number]:
                sets[block.number] = common
                changed = True
    return [_nearest(sets, block.number) if _ends(flow, block.number) else EXIT for block in flow.blocks]


def _nearest(sets: list[int], number: int) -> int:
    # The nearest one is post-dominated by all others: its own set is the largest.
    others = _numbers(sets[number] & ~(1 << number))
    return max(others, key=lambda other: sets[other].bit_count(), default=EXIT)


def _ends(flow: Flow, number: int) -> bool:
    """Return whether a path leads from a block to the exit; all blocks post-dominate one that never ends."""
    seen = 0
    work = [number]
    while work:
        current = work.pop()
        if current == EXIT:
            return True
        if not seen >> current & 1:
            seen |= 1 << current
            work.extend(flow.blocks[current].targets)
    return False
