"""Writes the function that runs all threads of a block.

Between two places at which all threads of a block wait for each other, warps run one after the other. A warp runs in pieces,
which are loops over its lanes. What the lanes do together, such as a shuffle, is between two pieces and reads arrays with an
element for each lane (hierarchical collapsing). There are three kinds of pieces:

- In arithmetic, all 32 lanes compute, also those that are no threads: the compiler makes vectors of the loop.
- In accesses of memory, the addresses are computed first, and checked together. Lanes that access adjacent memory copy it.
- In all else, the threads of the warp run in order.

A warp skips instructions whose guard holds in none of its lanes.

What all threads compute alike is computed once, outside the loops.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from . import opcodes
from .control_flow import EXIT, BasicBlock, Guard, guard_of, is_uniform_source, loads
from .operations import LaneAccess, Together, Waiting
from .syntax import Instruction

if TYPE_CHECKING:
    from .generator import Main

_LONGEST = 32
"""Instructions in a loop of arithmetic: compilers make no vectors of very long loops, or take long."""
_SHORTEST_SKIPPED = 8
"""Instructions without accesses of memory that a warp skips if no lane runs them."""
_TIDS = "const u32 tid_x = w->x[lane], tid_y = w->y[lane], tid_z = w->z[lane]; (void)tid_x, (void)tid_y, (void)tid_z;"


def names(uses: set[str]) -> str:
    """Declare what a thread's code uses, in a loop over the lanes of a warp."""
    lines = [_TIDS] if uses & {"tid", "call"} else []
    if uses & {"local", "call"}:
        lines.append("char *const local_base = LOCAL_OF(thread), *const local = local_base; (void)local;")
        lines.append("const u64 local_span = b->local_span; (void)local_span;")
    return " ".join(lines)


@dataclass
class _Piece:
    """A loop over the lanes of a warp, or what they do together.

    Attributes:
        kind: ``arithmetic``, ``slow`` (arithmetic of which the compiler makes no vectors), ``threads`` or ``together``.
        lines: The C: of the loop's body, or of everything if lanes do it together.
        read: Registers that it reads before it writes them.
        written: Registers that it writes.
        killed: Those of them that it writes in all lanes.
        touched: All of which its code has the names, besides those that it writes.
        uses: Names of the thread that it uses.
    """

    kind: str
    lines: list[str] = field(default_factory=list[str])
    read: int = 0
    written: int = 0
    killed: int = 0
    touched: int = 0
    uses: set[str] = field(default_factory=set[str])

    def note(self, written: int, read: int, *, is_certain: bool) -> None:
        self.touched |= read
        self.read |= (read if is_certain else read | written) & ~self.killed
        self.written |= written
        if is_certain:
            self.killed |= written


class BlockWriter:
    """Writes the function that runs all threads of a block."""

    def __init__(self, main: Main) -> None:
        self._main = main
        self._code = main.code
        self._flow = main.flow
        self._lines: list[str] = []
        self._done: set[int] = set()
        self._heads: dict[int, None] = {}
        """Blocks in which threads diverge, to which all come together."""
        self._segments = 0
        self._varying = main.uniformity.varying if main.uniformity else ~0
        # Of the open loop over warps:
        self._open: list[_Piece] | None = None
        self._read_uniform = self._live = 0
        self._guard: Guard | None = None
        """That of the instructions which a warp skips if it holds in no lane."""
        self._skips = 0
        self._has_loaded = False
        main.code.range_names = "range_{}"

    def write(self) -> str:
        main, flow = self._main, self._flow
        if main.uniformity is None:
            self._begin(flow.live_in[0])
            self._emit_region((1 << len(flow.blocks)) - 1, EXIT, "B", flow.live_in[0])
            self._close(0)
        else:
            for block in flow.blocks:
                if not main.uniformity.diverged >> block.number & 1 and block.number not in self._done:
                    self._lines.append(f"U{block.number}:;")
                    self._emit_block(block)
            while heads := [head for head in self._heads if head not in self._done]:
                self._emit_head(heads[0])
        head = main.saved_struct()
        head += ["static void run_block(struct block *const b)", "{", "BLOCK_NAMES;"]
        head += [
            f"struct range range_{number} = k->ranges[{number}]; (void)range_{number};"
            for number in range(len(main.kernel.range_groups))
        ]
        # Those that may be read before they are written are 0.
        kept = [register for register in flow.members(flow.live_in[0]) if register.name in main.saved]
        if kept:
            cleared = " ".join(f"__builtin_memset(s->{register.name}, 0, sizeof s->{register.name});" for register in kept)
            head.append(f"FOR_WARPS {{ WARP_NAMES; SAVED_NAMES; {cleared} }}")
        uniform = [register for register in flow.registers if not flow.mask([register]) & self._varying]
        head.append(main.declare(uniform, ~0))
        return "\n".join(line for line in (*head, *self._lines, "}") if line)

    # Loops

    def _begin(self, live: int) -> None:
        """Begin a loop over the warps, at a place where some registers are live."""
        if self._open is None:
            self._open = []
            self._segments += 1
            self._read_uniform = 0
            self._has_loaded = False
            self._live = live

    def _piece(self, kind: str) -> _Piece:
        """Return the piece to which code of a kind is added."""
        assert self._open is not None
        last = self._open[-1] if self._open else None
        is_same = last is not None and (last.kind == kind or (last.kind, kind) == ("threads", "slow"))
        is_full = last is not None and kind == "arithmetic" and len(last.lines) >= _LONGEST
        if last is None or kind == "together" or not is_same or is_full:
            last = _Piece(kind)
            self._open.append(last)
        return last

    def _close(self, live: int) -> None:
        """End the loop, at a place where some registers are live."""
        if self._open is None:
            return
        self._end_skip()
        main, flow = self._main, self._flow
        arrays, touched, after = 0, 0, live
        bodies: list[list[str]] = []
        for piece in reversed(self._open):
            read, written = piece.read & self._varying, piece.written & self._varying
            touched |= read | written
            kept = written & after
            arrays |= read | (written if piece.kind == "together" else kept)
            bodies.append(self._loop(piece, read, kept))
            after = (after & ~piece.killed) | piece.read
        saved = touched & (self._live | live) & arrays
        lines = ["FOR_WARPS {", "WARP_NAMES;", "SAVED_NAMES;" if saved else ""]
        for register in flow.members(arrays):
            if flow.mask([register]) & saved:
                main.save(register)
                lines.append(f"{register.type.c} *const a_{register.name} = s->{register.name};")
            else:
                zero = " = {0}" if self._live & flow.mask([register]) else ""
                lines.append(f"{register.type.c} a_{register.name}[LANES]{zero};")
        for body in reversed(bodies):
            lines += body
        self._lines += [line for line in (*lines, "}") if line]
        self._open = None

    def _loop(self, piece: _Piece, loaded: int, kept: int) -> list[str]:
        """Write a piece."""
        if piece.kind == "together":
            return piece.lines
        main, flow = self._main, self._flow
        is_ordered = piece.kind == "threads"
        registers = (piece.touched | piece.written) & self._varying
        head = ["FOR_LANES(lanes) {" if is_ordered else "FOR_ALL_LANES {"]
        head.append(f"const u32 thread = first + lane; {'k->thread = thread;' if is_ordered else '(void)thread;'}")
        head.append(names(piece.uses))
        if "call" in piece.uses:
            head.append(f"KERNEL_THREAD({self._code.frame_size});")
        head += [main.declare(flow.members(registers)), main.declare_parameters() if is_ordered else ""]
        head += [f"{register.name} = a_{register.name}[lane];" for register in flow.members(loaded)]
        stores = [f"a_{register.name}[lane] = {register.name};" for register in flow.members(kept)]
        return [*head, *piece.lines, *stores, "}"]

    def _lane_loop(self, head: str, body: str, read: int, written: int) -> str:
        """Return a loop over lanes in what they do together: its registers are elements of arrays."""
        flow = self._flow
        registers = list(flow.members((read | written) & self._varying))
        loads = [f"{each.name} = a_{each.name}[lane];" for each in flow.members(read & self._varying)]
        stores = [f"a_{each.name}[lane] = {each.name};" for each in flow.members(written & self._varying)]
        return f"{head} {{ {self._main.declare(registers)} {' '.join(loads)} {body} {' '.join(stores)} }}"

    def _append(self, text: str, instruction: Instruction, kind: str) -> None:
        written, read = self._flow.effects[id(instruction)]
        piece = self._piece(kind)
        piece.lines.append(text)
        piece.uses |= self._code.uses
        piece.note(written, read, is_certain=self._flow.is_certain(instruction))
        self._read_uniform |= read & ~self._varying

    # Instructions with a guard

    def _begin_skip(self, own: Guard, block: BasicBlock, start: int) -> None:
        """Let a warp skip the instructions of a block with the guard of that at a place, if it holds in no lane."""
        guard, is_negated = own
        following = itertools.islice(block.instructions, start, None)
        run = list(itertools.takewhile(lambda each: guard_of(each) == own, following))
        if len(run) < _SHORTEST_SKIPPED and not any(opcodes.is_plain_access(each.opcode) for each in run):
            return
        self._guard = own
        self._skips += 1
        mask = self._flow.mask([guard])
        if mask & self._varying:
            taking = f"lanes & {'~' if is_negated else ''}mask_of(a_{guard.name})"
        else:
            taking = f"{'!' if is_negated else ''}{guard.name} ? lanes : 0"
        piece = self._piece("together")
        piece.lines = [f"const u32 skip_{self._skips} = {taking};", f"if (skip_{self._skips}) {{"]
        piece.note(0, mask, is_certain=True)
        self._read_uniform |= mask & ~self._varying

    def _end_skip(self) -> None:
        if self._guard is not None:
            self._guard = None
            self._piece("together").lines = ["}"]

    # Blocks that all threads run together

    def _emit_block(self, block: BasicBlock) -> None:
        uniformity = self._main.uniformity
        assert uniformity is not None
        self._done.add(block.number)
        live = self._flow.live_after(block)
        before = self._flow.live_in[block.number]
        for index, instruction in enumerate(block.instructions):
            written, _ = self._flow.effects[id(instruction)]
            self._code.uses.clear()
            if self._is_uniform(instruction):
                if self._read_uniform & written:
                    self._close(before)
                text = self._main.instruction(instruction)
                assert isinstance(text, str)
                self._lines.append(text)
            else:
                # The warps of a GPU's block have loaded an old value by the time that one of them stores the new one, and
                # code of Inductor counts on it: all threads add 1 to the step of an optimizer.
                if self._has_loaded and uniformity.is_store_of_all(instruction):
                    self._close(before)
                self._begin(before)
                own = guard_of(instruction)
                if own != self._guard:
                    self._end_skip()
                    if own is not None:
                        self._begin_skip(own, block, index)
                self._has_loaded = self._has_loaded or loads(instruction)
                self._emit(instruction, live[index])
                if self._guard is not None and written & self._flow.mask([self._guard[0]]):
                    self._end_skip()
            before = live[index]
        self._end_skip()
        self._end(block)

    def _emit(self, instruction: Instruction, live: int) -> None:
        """Write an instruction of which threads have different results."""
        access = self._main.lane_access(instruction)
        if access is not None:
            self._access(instruction, access)
            return
        kind, guard = opcodes.kind_of_loop(instruction), instruction.guard
        written = list(self._flow.members(self._flow.effects[id(instruction)][0]))
        is_alone = guard is None or (kind == "arithmetic" and self._flow.is_certain(instruction))
        is_chosen = kind == "arithmetic" and not is_alone and len(written) == 1
        text = self._main.instruction(replace(instruction, guard=None) if is_alone or is_chosen else instruction)
        if isinstance(text, Waiting):
            self._wait(instruction, text, live)
            return
        if is_chosen and guard is not None:
            # gcc makes no vectors of a loop in which branches depend on each other.
            (target,) = written
            condition = f"{'!' if instruction.is_guard_negated else ''}{guard.name}"
            text = (
                f"{{ const {target.type.c} before_ = {target.name}; {text} {self._code.choose(target, condition, 'before_')} }}"
            )
        self._append(text, instruction, kind)

    def _is_uniform(self, instruction: Instruction) -> bool:
        written, read = self._flow.effects[id(instruction)]
        is_alike = not (written | read) & self._varying and bool(written)
        return is_alike and is_uniform_source(instruction, self._flow.function) and not instruction.opcode.startswith("call")

    def _together(self, instruction: Instruction, lines: list[str]) -> None:
        written, read = self._flow.effects[id(instruction)]
        piece = self._piece("together")
        piece.lines = lines
        piece.note(written, read, is_certain=self._flow.is_certain(instruction))
        self._read_uniform |= read & ~self._varying

    def _access(self, instruction: Instruction, access: LaneAccess) -> None:
        """Write a load or store of all lanes."""
        flow = self._flow
        written, values = flow.effects[id(instruction)][0], flow.mask(list(access.values))
        taking = "lanes" if self._guard is None else f"skip_{self._skips}"
        word, log2 = f"u{access.base.type.bits}", access.log2
        first = f"({access.type.c} *){access.place('at_[0]')}"
        computed = self._lane_loop("FOR_ALL_LANES", f"at_[lane] = {access.address};", flow.mask([access.base]), 0)
        row = access.body(lambda index: f"row_[{access.elements} * lane + {index}]")
        each = access.body(lambda index: f"(({access.type.c} *)at_lane_)[{index}]")
        each = f"char *const at_lane_ = {access.place('at_[lane]')}; {each}"
        lines = [
            f"{{ {word} at_[LANES];",
            computed,
            f"if (are_adjacent_{word}({access.limits}, at_, {taking}, {log2})) {{ {access.type.c} *const row_ = {first};",
            self._lane_loop("FOR_ALL_LANES", row, values, written),
            f"}} else {{ locate_lanes_{word}(k, {access.memory}, at_, {taking}, {log2}, first, {access.number});",
            self._lane_loop(f"FOR_LANES({taking})", each, values, written) + " } }",
        ]
        self._together(instruction, lines)

    def _wait(self, instruction: Instruction, wait: Waiting, live: int) -> None:
        kernel, flow = self._main.kernel, self._flow
        written, read = flow.effects[id(instruction)]
        if wait.operation == "BARRIER_SYNC":
            self._close(live)
            return
        if wait.together is not None and (lines := self._write_together(wait.together)) is not None:
            self._together(instruction, lines)
            return
        piece = self._piece("arithmetic")
        piece.lines.append(wait.before)
        piece.note(0, read, is_certain=True)
        piece.uses |= self._code.uses
        self._read_uniform |= read & ~self._varying
        number = kernel.add_point(wait.wait, wait.operation, kernel.access(instruction), wait.detail)
        if wait.wait == "WAIT_BARRIER":
            needed = live & ~written
            self._close(needed)
            self._lines.append(f"services->operate(b, &points[{number}]);")
            self._begin(needed)
        else:
            self._piece("together").lines.append(f"services->operate_warp(w, &points[{number}]);")
        if wait.after:
            piece = self._piece("arithmetic")
            piece.lines.append(wait.after)
            piece.note(written, 0, is_certain=True)

    def _write_together(self, together: Together) -> list[str] | None:
        """Write what the lanes of a warp do together, if each of its registers is in an array."""
        if any(not self._flow.mask([register]) & self._varying for register in together.registers):
            return None
        return [together.text]

    def _end(self, block: BasicBlock) -> None:
        """Write the end of a block that all threads run."""
        uniformity = self._main.uniformity
        assert uniformity is not None
        if block.number not in uniformity.regions:
            self._close(self._flow.live_out[block.number] | (self._flow.branch_reads(block) & self._varying))
            # Which block is written next is not known here: it may have another number than the next one.
            self._lines.append(self._main.branch(block, self._goto_together, -2))
            return
        join = uniformity.join[block.number]
        self._begin(self._flow.live_out[block.number] | self._flow.branch_reads(block))
        piece = self._piece("threads")
        piece.note(0, self._flow.branch_reads(block), is_certain=True)
        self._read_uniform |= self._flow.branch_reads(block) & ~self._varying
        label = f"S{self._segments}_{block.number}_"
        is_merged = self._is_merged(block, join)
        piece.lines.append(self._main.branch(block, self._goto_in(label, join), -2))
        self._emit_region(uniformity.regions[block.number], join, label, self._flow.live_out[block.number])
        if is_merged:
            self._emit_block(self._flow.blocks[join])
            return
        self._close(0 if join == EXIT else self._flow.live_in[join])
        self._lines.append(self._goto_together(join))

    @staticmethod
    def _goto_in(label: str, join: int) -> Callable[[int], str]:
        return lambda target: f"goto {label}end;" if target in (join, EXIT) else f"goto {label}{target};"

    def _is_merged(self, block: BasicBlock, join: int) -> bool:
        """Return whether threads come to the join, and to the blocks before it, only from here, so that the loop can go on."""
        uniformity = self._main.uniformity
        assert uniformity is not None
        if join == EXIT or join in self._done or uniformity.diverged >> join & 1:
            return False
        inside = uniformity.regions[block.number] | 1 << block.number
        predecessors = self._flow.predecessors()
        entered = [join, *(other.number for other in self._flow.blocks if uniformity.regions[block.number] >> other.number & 1)]
        return all(inside >> source & 1 for number in entered for source in predecessors[number])

    def _goto_together(self, target: int) -> str:
        if target == EXIT:
            return "return;"
        uniformity = self._main.uniformity
        assert uniformity is not None
        if uniformity.diverged >> target & 1:
            self._heads[target] = None
        return f"goto U{target};"

    def _emit_head(self, head: int) -> None:
        """Write the blocks from one at which threads diverge to the one at which all are together again."""
        uniformity = self._main.uniformity
        assert uniformity is not None
        self._done.add(head)
        region, join = uniformity.region_from(head)
        live = self._flow.live_in[head]
        self._lines.append(f"U{head}:;")
        self._begin(live)
        label = f"S{self._segments}_{head}_"
        self._piece("threads").lines.append(f"goto {label}{head};")
        self._emit_region(region, join, label, live)
        self._close(0 if join == EXIT else self._flow.live_in[join])
        self._lines.append(self._goto_together(join))

    # Blocks that some threads run

    def _emit_region(self, region: int, join: int, label: str, live: int) -> None:
        """Write blocks through which threads take different ways, to the join or to the end of the thread.

        Args:
            region: The blocks.
            join: The block at which threads are together again, or EXIT.
            label: What the names of the blocks begin with.
            live: The registers that are live before.
        """
        numbers = [block.number for block in self._flow.blocks if region >> block.number & 1]
        goto, piece = self._goto_in(label, join), self._piece("threads")
        all_written = all_read = 0
        for position, number in enumerate(numbers):
            block = self._flow.blocks[number]
            piece.lines.append(f"{label}{number}:;")
            for instruction in block.instructions:
                self._code.uses.clear()
                text = self._main.instruction(instruction)
                assert isinstance(text, str)
                piece.lines.append(text)
                self._has_loaded = self._has_loaded or loads(instruction)
                piece.uses |= self._code.uses
                written, read = self._flow.effects[id(instruction)]
                all_written |= written
                all_read |= read
            all_read |= self._flow.branch_reads(block)
            following = numbers[position + 1] if position + 1 < len(numbers) else -2
            piece.lines.append(self._main.branch(block, goto, following))
        piece.lines.append(f"{label}end:;")
        piece.touched |= all_read
        piece.read |= live & (all_read | all_written) & ~piece.killed
        piece.written |= all_written
        self._read_uniform |= all_read & ~self._varying
