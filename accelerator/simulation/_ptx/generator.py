"""Writes the C of a kernel.

A kernel runs in one of three modes:

- Its blocks are loops over their threads (`MODE_BLOCK`): where threads wait for each other, all of them do (``blocks.py``).
- The lanes of a warp run one after the other, each until it waits (`MODE_LANES`): threads may take different ways.
- Each thread is a fiber (`MODE_FIBERS`): a function at which threads wait is recursive or called through a pointer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from . import opcodes
from .blocks import BlockWriter, names
from .code import Code
from .control_flow import EXIT, BasicBlock, Flow, Uniformity
from .errors import Refused
from .inlining import Calls, inline_waiting
from .opcodes import memory
from .operations import LaneAccess, Waiting
from .parser import identifier
from .program import Kernel, Program
from .syntax import Function, Instruction, Register, Symbol
from .types import TYPES

INTERFACE = "accelerator_kernel"
"""The symbol of a translated kernel."""


def generate(program: Program, name: str) -> str:
    """Return the C of a kernel and of the functions that it calls.

    Raises:
        Refused: It has something that is not translated.
    """
    module = program.find_entry(name)
    if module is None:
        raise Refused(f"no kernel {name}")
    function = program.modules[module].function(name)
    kernel = Kernel(program, module, function)
    calls = Calls(program)
    inlined = inline_waiting(calls, module, function)
    if inlined is None or (calls.waits(module, function) and _takes_stack(inlined)):
        main: _FiberFunction | Main = _FiberFunction(kernel, module, function, calls)
    else:
        main = Main(kernel, module, inlined, calls)
    body = main.write()
    frames = {(module, name): main.code.frame_size}
    bodies: list[str] = []
    prototypes: list[str] = []
    written: set[tuple[int, str]] = set()
    while missing := [called for called in (*kernel.called, *sorted(kernel.handles)) if called not in written]:
        for number, called in missing:
            written.add((number, called))
            writer = _FiberFunction(kernel, number, program.modules[number].function(called), calls)
            bodies.append(writer.write())
            frames[number, called] = writer.code.frame_size
            prototypes.append(f"{writer.signature()};")
    stack = kernel.stack_size(frames, (module, name)) + (main.code.frame_size if main.mode == "MODE_FIBERS" else 0)
    return _assemble(kernel, main, prototypes, [*bodies, body], stack)


def _takes_stack(function: Function) -> bool:
    """Whether a function has alloca. Only a fiber keeps its stack while it waits."""
    instructions = (statement for statement in function.body if isinstance(statement, Instruction))
    return any(instruction.opcode.startswith(("alloca", "stack")) for instruction in instructions)


def _function_name(module: int, name: str) -> str:
    return f"F{module}_{identifier(name)}"


class _Writer:
    """What all modes share: instructions, branches and calls."""

    def __init__(self, kernel: Kernel, module: int, function: Function, calls: Calls, *, keeps_parameters: bool) -> None:
        self.kernel = kernel
        self.module = module
        self.function = function
        self.calls = calls
        self.code = Code(kernel, function, module, keeps_parameters=keeps_parameters)
        self.flow = Flow(function)
        self.code.observed = self.flow.observed()
        self.leave = "goto leave;"
        self.uses: set[str] = set()
        """Names of the thread that any of the code uses."""
        self.waits = calls.waits(module, function)

    def instruction(self, instruction: Instruction) -> str | Waiting:
        """Return the C of an instruction, which a guard may skip."""
        self.code.instruction = instruction
        if instruction.opcode.startswith("call"):
            text: str | Waiting = self._call(instruction)
        else:
            operation = opcodes.find(instruction.opcode)
            opcodes.check_operands(instruction, operation)
            try:
                text = operation.translate(self.code, instruction, operation.choices)
            except (ValueError, AssertionError, IndexError) as error:
                raise Refused(instruction.text) from error
        self.uses |= self.code.uses
        if instruction.guard is None:
            return text
        if isinstance(text, Waiting):
            raise AssertionError("guarded waits are in blocks of their own")
        negation = "!" if instruction.is_guard_negated else ""
        return f"if ({negation}{instruction.guard.name}) {{ {text} }}"

    def branch(self, block: BasicBlock, goto: Callable[[int], str], following: int) -> str:
        """Return the C of the end of a block, of which `following` is the next one in the text."""
        if block.selector is not None:
            cases = " ".join(f"case {index}: {goto(target)}" for index, target in enumerate(block.targets))
            selector = self.code.read(block.selector, TYPES["u32"])
            problem = 'services->fail(k, KERNEL_ILLEGAL_INSTRUCTION, "it branches beyond the targets of brx.idx");'
            return f"switch ({selector}) {{ {cases} default: {problem} }}"
        if block.condition is None:
            target = block.targets[0]
            return "" if target == following else goto(target)
        negation = "!" if block.is_negated else ""
        taken, other = block.targets
        text = f"if ({negation}{block.condition.name}) {goto(taken)}"
        return text if other == following else f"{text} {goto(other)}"

    def declare(self, registers: Iterable[Register], uninitialized: int = 0) -> str:
        """Declare registers; of those that may be read before they are written, the value is 0."""
        lines: list[str] = []
        for register in registers:
            is_zero = uninitialized & self.flow.mask([register])
            lines.append(f"{register.type.c} {register.name}{' = 0' if is_zero else ''};")
        return " ".join(lines)

    def declare_parameters(self) -> str:
        """Declare the parameters of calls."""
        lines = [
            f"char p_{identifier(name)}[{max(variable.size, 1)}] __attribute__((aligned(16)));"
            for name, variable in self.code.arrays.items()
        ]
        return " ".join(lines)

    def _call(self, instruction: Instruction) -> str:
        target = instruction.operands[0]
        arguments = [self.code.parameter_pointer(name) for name in (*instruction.results, *instruction.arguments)]
        if isinstance(target, Symbol):
            found = self.kernel.call(self.module, self.function.name, target.name)
            if found is None:
                return self._system_call(instruction, target.name, arguments)
            self.code.uses.add("call")
            return f"{_function_name(*found)}({', '.join(['t', *arguments])});"
        self.code.uses.add("call")
        for function in self.kernel.program.functions_with_address():
            self.kernel.handles.add(function)
        handle = self.code.read(target, TYPES["u64"])
        types = ", ".join(["struct thread *", *("char *" for _ in arguments)])
        address = f"indirect_function(k, {handle}, {len(arguments)})"
        return f"((void (*)({types})){address})({', '.join(['t', *arguments])});"

    def _system_call(self, instruction: Instruction, name: str, arguments: list[str]) -> str:
        """Functions that CUDA's device runtime defines."""
        if name == "vprintf" and len(arguments) == 3:
            result, format, values = arguments
            return (
                f"STORE(u32, {result}, services->print(k, (const char *)LOAD(u64, {format}),"
                f" (const char *)LOAD(u64, {values})));"
            )
        if name == "__assertfail" and len(arguments) == 5:
            message, file, line, function, _ = arguments
            texts = [f"(const char *)LOAD(u64, {text})" for text in (message, file)]
            return f"services->fail_assertion(k, {', '.join(texts)}, LOAD(u32, {line}), (const char *)LOAD(u64, {function}));"
        if name == "malloc" and len(arguments) == 2:
            return f"STORE(u64, {arguments[0]}, services->allocate(k, LOAD(u64, {arguments[1]})));"
        if name == "free" and len(arguments) == 1:
            return f"services->release(k, LOAD(u64, {arguments[0]}));"
        if name.startswith(("cudaLaunchDevice", "cudaGetParameterBuffer", "__cudaCDP")):
            raise Refused("a kernel that launches kernels (dynamic parallelism)")
        raise Refused(f"a call of {name}, which no module defines")


class _FiberFunction(_Writer):
    """A function of C for one thread: a device function, or a kernel whose threads are fibers."""

    def __init__(self, kernel: Kernel, module: int, function: Function, calls: Calls) -> None:
        super().__init__(kernel, module, function, calls, keeps_parameters=False)
        self.mode = "MODE_FIBERS"

    def signature(self) -> str:
        names = [f"char *result_{number}" for number in range(len(self.function.results))]
        names += [
            f"char *argument_{number}" for number in range(0 if self.function.is_entry else len(self.function.parameters))
        ]
        return f"static void {_function_name(self.module, self.function.name)}({', '.join(['struct thread *const t', *names])})"

    def write(self) -> str:
        lines = [self.signature(), "{", "THREAD_NAMES;"]
        body = self._body()
        lines.append(f"ENTER_FUNCTION({self.code.frame_size});")
        lines += [self.declare(self.flow.registers, self.flow.live_in[0]), self.declare_parameters(), *body]
        lines += ["leave:", "t->local_top = local;", "}"]
        return "\n".join(line for line in lines if line)

    def _body(self) -> list[str]:
        def goto(target: int) -> str:
            return self.leave if target == EXIT else f"goto B{target};"

        polls = self.calls.polls(self.module, self.flow)
        lines: list[str] = []
        for block in self.flow.blocks:
            if block.exits and not self.function.is_entry:
                raise Refused(f"exit in the function {self.function.name}")
            lines.append(f"B{block.number}:;")
            for instruction in block.instructions:
                if id(instruction) in polls:
                    number = self.kernel.add_point("WAIT_POLITELY", "WARP_SYNC", self.kernel.access(instruction), "")
                    lines.append(f"if (polls_long(w, lane)) services->suspend(t, {number});")
                text = self.instruction(instruction)
                if isinstance(text, Waiting):
                    number = self.kernel.add_point(text.wait, text.operation, self.kernel.access(instruction), text.detail)
                    condition = f"if ({text.condition}) " if text.condition else ""
                    text = f"{text.before} {condition}services->suspend(t, {number}); {text.after}"
                lines.append(text)
            lines.append(self.branch(block, goto, block.number + 1))
        return lines


class Main(_Writer):
    """A kernel whose points are all in one function."""

    def __init__(self, kernel: Kernel, module: int, function: Function, calls: Calls) -> None:
        super().__init__(kernel, module, function, calls, keeps_parameters=calls.waits(module, kernel.function))
        self.polls = calls.polls(module, self.flow)
        self.uniformity: Uniformity | None = None
        self.mode = self._choose_mode()
        self.saved: dict[str, Register] = {}

    def _choose_mode(self) -> str:
        waiting = [
            (block, instruction)
            for block in self.flow.blocks
            for instruction in block.instructions
            if opcodes.find(instruction.opcode).waits
        ]
        if self.polls or any(not _is_for_all(instruction) for _, instruction in waiting):
            return "MODE_LANES"
        flat = Flow(self.function, is_flat=True)
        uniformity = Uniformity(flat)
        calls = any(each.opcode.startswith("call") for block in flat.blocks for each in block.instructions)
        if not waiting and (uniformity.diverged or calls) and not uniformity.changes_what_all_read():
            return "MODE_BLOCK"  # one loop over all threads
        for block in flat.blocks:
            if uniformity.diverged >> block.number & 1 and any(opcodes.find(each.opcode).waits for each in block.instructions):
                return "MODE_LANES"
        self.flow, self.uniformity = flat, uniformity
        self.code.observed = flat.observed()
        return "MODE_BLOCK"

    def save(self, register: Register) -> str:
        """Return the array that keeps a register of all lanes of a warp."""
        self.saved[register.name] = register
        return f"s->{register.name}"

    def saved_struct(self) -> list[str]:
        """Define what is kept of a warp."""
        arrays = [f"{each.type.c} {each.name}[LANES];" for each in self.saved.values()]
        return [f"struct saved {{ {' '.join(arrays)} }};"] if arrays else []

    def lane_access(self, instruction: Instruction) -> LaneAccess | None:
        """Describe a load or store, if the lanes of a warp can do it together."""
        if not opcodes.is_plain_access(instruction.opcode):
            return None
        operation = opcodes.find(instruction.opcode)
        opcodes.check_operands(instruction, operation)
        self.code.instruction = instruction
        try:
            return memory.lane_access(self.code, instruction, operation.choices)
        except (ValueError, AssertionError) as error:
            raise Refused(instruction.text) from error

    def write(self) -> str:
        if self.mode == "MODE_LANES":
            return _LaneWriter(self).write()
        return BlockWriter(self).write()


def _is_for_all(instruction: Instruction) -> bool:
    """Return whether all threads of a block can do it together."""
    if opcodes.find(instruction.opcode).waits != "uniform":
        return False
    opcode = opcodes.find(instruction.opcode).variant
    # A barrier with a number of threads is for some of them.
    if opcode == "barrier.sync":
        return len(instruction.operands) == 1
    return not opcode.startswith("barrier.red") or len(instruction.operands) == 3


class _LaneWriter:
    """Writes the function that runs lanes of a warp from one point to the next."""

    def __init__(self, main: Main) -> None:
        self._main = main
        self._resumptions: list[str] = []
        self._dirty = _find_dirty(main)

    def write(self) -> str:
        main = self._main
        code, flow = main.code, main.flow
        body: list[str] = []
        for block in flow.blocks:
            body.append(f"B{block.number}:;")
            dirty = self._dirty[block.number]
            live = flow.live_after(block)
            for index, instruction in enumerate(block.instructions):
                written = flow.effects[id(instruction)][0]
                if id(instruction) in main.polls:
                    body.append(self._poll(instruction, live[index], dirty))
                text = main.instruction(instruction)
                if isinstance(text, Waiting):
                    body.append(self._wait(instruction, text, live[index] & ~written, dirty))
                    dirty = written if not text.condition else dirty | written
                else:
                    body.append(text)
                    dirty |= written
            body.append(main.branch(block, self._goto, block.number + 1))
        body.append("leave: w->point[lane] = POINT_EXITED;")
        head = [*main.saved_struct(), "static void run_lanes(struct warp *const w, u32 from, u32 lanes)", "{"]
        head += ["struct block *const b = w->block;", "BLOCK_NAMES;", "SAVED_NAMES;" if main.saved else ""]
        head += ["FOR_LANES(lanes) {", "const u32 thread = w->first + lane; k->thread = thread;"]
        head.append(names(code.uses | {"tid"}))
        if "call" in code.uses:
            head.append(f"KERNEL_THREAD({code.frame_size});")
        head += [main.declare(flow.registers, flow.live_in[0]), main.declare_parameters()]
        head += ["switch (from) {", *self._resumptions, "}"]
        return "\n".join(line for line in (*head, *body, "}", "}") if line)

    @staticmethod
    def _goto(target: int) -> str:
        return "goto leave;" if target == EXIT else f"goto B{target};"

    def _suspend(self, number: int, live: int, dirty: int) -> str:
        """Keep what the lane needs later, and go on with the next lane."""
        flow = self._main.flow
        stores = [f"{self._main.save(register)}[lane] = {register.name};" for register in flow.members(live & dirty)]
        loads = [f"{register.name} = {self._main.save(register)}[lane];" for register in flow.members(live)]
        self._resumptions.append(f"case {number}: {' '.join(loads)} goto P{number};")
        return f"{' '.join(stores)} w->point[lane] = {number}; continue;"

    def _wait(self, instruction: Instruction, wait: Waiting, live: int, dirty: int) -> str:
        kernel = self._main.kernel
        number = kernel.add_point(wait.wait, wait.operation, kernel.access(instruction), wait.detail)
        suspend = self._suspend(number, live | self._read_after(instruction, wait), dirty)
        if wait.condition:
            suspend = f"if ({wait.condition}) {{ {suspend} }}"
        return f"{wait.before} {suspend} P{number}:; {wait.after}"

    def _read_after(self, instruction: Instruction, wait: Waiting) -> int:
        """What the instruction itself reads after the wait."""
        return self._main.flow.effects[id(instruction)][1] if wait.condition else 0

    def _poll(self, instruction: Instruction, live: int, dirty: int) -> str:
        flow, kernel = self._main.flow, self._main.kernel
        written, read = flow.effects[id(instruction)]
        kept = (live & ~written if flow.is_certain(instruction) else live) | read
        number = kernel.add_point("WAIT_POLITELY", "WARP_SYNC", kernel.access(instruction), "")
        return f"if (polls_long(w, lane)) {{ {self._suspend(number, kept, dirty)} }} P{number}:;"


def _find_dirty(main: Main) -> list[int]:
    """Return, for each block, the registers that may differ at its beginning from what was kept of them."""
    flow = main.flow
    count = len(flow.blocks)
    dirty = [0] * count
    dirty[0] = flow.live_in[0]
    work = list(range(count))
    while work:
        number = work.pop(0)
        block = flow.blocks[number]
        value = dirty[number]
        for instruction in block.instructions:
            written = flow.effects[id(instruction)][0]
            is_kept = opcodes.find(instruction.opcode).waits and not _may_go_on(instruction)
            value = written if is_kept else value | written
        for target in block.targets:
            if target != EXIT and value & ~dirty[target]:
                dirty[target] |= value
                work.append(target)
    return dirty


def _may_go_on(instruction: Instruction) -> bool:
    """Return whether a lane may pass a waiting instruction without being suspended."""
    opcode = opcodes.find(instruction.opcode).variant
    return opcode.startswith(("mbarrier.try_wait", "barrier.arrive"))


def _assemble(kernel: Kernel, main: _FiberFunction | Main, prototypes: list[str], bodies: list[str], stack: int) -> str:
    offsets, shared_size = kernel.layout_of_shared_memory()
    function = kernel.function
    lines = ['#include "kernel.h"', ""]
    lines += [f"enum {{ {name} = {offset} }};" for name, offset in offsets.items()]
    lines += [*kernel.details, f"static const struct point points[] = {{{', '.join(['{0}', *kernel.points])}}};", *prototypes]
    if kernel.handles:
        lines += _function_table(kernel)
    lines += bodies
    lines += _tables(kernel)
    runs = {"MODE_BLOCK": ("run_block", "run_block"), "MODE_LANES": ("run_lanes", "run_lanes")}
    name, value = runs.get(main.mode, ("run_thread", _function_name(kernel.module, function.name)))
    architecture = kernel.program.modules[kernel.module].architecture
    saved = "sizeof(struct saved)" if isinstance(main, Main) and main.saved else "0"
    required = ", ".join(str(size) for size in function.required_block or (0, 0, 0))
    fields = {
        "interface": "KERNEL_INTERFACE",
        "mode": main.mode,
        "name": _string(function.name),
        name: value,
        "services": "&services",
        "points": "points",
        "accesses": "accesses",
        "variables": "variables_used",
        "parameters": "parameter_places",
        "point_count": len(kernel.points) + 1,
        "access_count": len(kernel.accesses),
        "variable_count": len(kernel.variables),
        "parameter_count": len(kernel.parameters),
        "parameter_size": kernel.parameter_size,
        "range_groups": len(kernel.range_groups),
        "shared_size": shared_size,
        "local_size": main.code.frame_size if main.mode != "MODE_FIBERS" else 0,
        "stack_size": stack,
        "saved_size": saved,
        "constant_size": kernel.constant_size,
        "thread_limit": function.thread_limit,
        "required_block": f"{{{required}}}",
        "ptx_version": architecture,
        "calls_functions": int("call" in main.uses or bool(kernel.called)),
        "is_recursive": int(main.mode == "MODE_FIBERS" or kernel.is_recursive()),
        "shares_local": int(isinstance(main, Main) and main.mode == "MODE_BLOCK" and main.uniformity is None),
        "uses_matrices": int(kernel.uses_matrices),
        "uses_clusters": int(function.uses_clusters),
    }
    initializer = ",\n    ".join(f".{field} = {value}" for field, value in fields.items())
    lines.append(f'__attribute__((visibility("default"))) const struct kernel {INTERFACE} = {{\n    {initializer},\n}};')
    return "\n".join(lines) + "\n"


def _function_table(kernel: Kernel) -> list[str]:
    """Write the functions by the numbers that stand for their addresses."""
    program = kernel.program
    entries: list[str] = []
    for module, name in sorted(kernel.handles):
        function = program.modules[module].function(name)
        count = len(function.results) + len(function.parameters)
        number = program.function_number(module, name)
        entries.append(f"[{number}] = {{(void (*)(void)){_function_name(module, name)}, {count}}}")
    return [f"static const struct function functions[] = {{{', '.join(entries)}}};", "INDIRECT_FUNCTION"]


def _tables(kernel: Kernel) -> list[str]:
    accesses = [f"{{{_string(text)}, {_string(file)}, {line}}}" for text, file, line in kernel.accesses]
    variables = [f"{{{_string(name)}, {size}}}" for name, size in kernel.variable_table()]
    places = [f"{{{offset}, {size}}}" for offset, size in kernel.parameters]
    return [
        f"static const struct access accesses[] = {{{', '.join([*accesses, '{0}'])}}};",
        f"static const struct variable variables_used[] = {{{', '.join([*variables, '{0}'])}}};",
        f"static const u32 parameter_places[][2] = {{{', '.join([*places, '{0}'])}}};",
    ]


def _string(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
    return f'"{escaped}"'
