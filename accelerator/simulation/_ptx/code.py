"""Writes the C of a function's instructions: operands, results and addresses.

The C uses the names that ``kernel.h`` describes: ``k``, ``b``, ``w`` and ``t`` are the worker, the block, the warp and the
thread.
"""

from __future__ import annotations

from collections.abc import Callable

from .errors import Refused
from .parser import identifier
from .program import RESERVED, Kernel
from .syntax import (
    Address,
    Function,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
)
from .types import TYPES, PtxType, align

_GLOBAL_SPACES = ("", "global", "const")
_LARGEST_SCALAR = 16

# Read-only registers whose value is the same in all threads of a block.
_BLOCK_REGISTERS = {
    **{f"%ntid.{axis}": f"ntid_{axis}" for axis in "xyz"},
    **{f"%ctaid.{axis}": f"ctaid_{axis}" for axis in "xyz"},
    **{f"%nctaid.{axis}": f"launch->grid[{index}]" for index, axis in enumerate("xyz")},
    **{f"%{name}.w": "0u" for name in ("ntid", "ctaid", "nctaid")},
    "%nwarpid": "(threads + LANES - 1) / LANES",
    "%smid": "0u",
    "%nsmid": "1u",
    "%gridid": "1u",
    "%dynamic_smem_size": "launch->dynamic_shared",
    "%total_smem_size": "rounded_shared_size(shared_size)",
    "%aggr_smem_size": "rounded_shared_size(shared_size) + RESERVED_SHARED",
    "%envreg1": "(u32)(services->grid_workspace(k) >> 32)",
    "%envreg2": "(u32)services->grid_workspace(k)",
    # A cluster is one block.
    **{f"%clusterid.{axis}": f"ctaid_{axis}" for axis in "xyz"},
    **{f"%nclusterid.{axis}": f"launch->grid[{index}]" for index, axis in enumerate("xyz")},
    **{f"%cluster_ctaid.{axis}": "0u" for axis in "xyz"},
    **{f"%cluster_nctaid.{axis}": "1u" for axis in "xyz"},
    "%cluster_ctarank": "0u",
    "%cluster_nctarank": "1u",
    "%is_explicit_cluster": "0u",
}
_THREAD_REGISTERS = {
    **{f"%tid.{axis}": f"tid_{axis}" for axis in "xyz"},
    "%tid.w": "0u",
    "%laneid": "lane",
    "%warpid": "thread / LANES",
    "%lanemask_eq": "1u << lane",
    "%lanemask_lt": "lanes_before(lane)",
    "%lanemask_le": "lanes_before(lane) | 1u << lane",
    "%lanemask_ge": "~lanes_before(lane)",
    "%lanemask_gt": "~(lanes_before(lane) | 1u << lane)",
    "%clock": "(u32)clock_cycles()",
    "%clock_hi": "(u32)(clock_cycles() >> 32)",
    "%clock64": "clock_cycles()",
    "%globaltimer": "services->nanoseconds()",
    "%globaltimer_lo": "(u32)services->nanoseconds()",
    "%globaltimer_hi": "(u32)(services->nanoseconds() >> 32)",
}
SPECIAL_REGISTERS = frozenset((*_BLOCK_REGISTERS, *_THREAD_REGISTERS, "%reserved_smem_offset_1"))
"""Those that a kernel may read."""


def is_block_register(name: str) -> bool:
    """Return whether all threads of a block read the same value."""
    return name in _BLOCK_REGISTERS or name.startswith("%reserved_smem")


class Code:
    """The C of one function, for one mode of execution.

    Attributes:
        function: The function.
        kernel: What is known about the kernel that it belongs to.
        observed: Registers of which some instruction reads the bits that a NaN has.
        uses: Names of the thread that the C uses: ``tid``, ``lane``, ``warp``, ``local``, ``call``.
    """

    def __init__(self, kernel: Kernel, function: Function, module: int, *, keeps_parameters: bool = False) -> None:
        """Create it.

        Args:
            kernel: The kernel that the function belongs to.
            function: The function.
            module: The number of its module.
            keeps_parameters: Whether the parameters of its calls must outlive a point at which it waits.
        """
        self.kernel = kernel
        self.function = function
        self.module = module
        self.uses: set[str] = set()
        self.observed: set[str] = set()
        self.range_names = "k->ranges[{}]"
        self._frame: dict[str, int] = {}
        self.frame_size = 0
        self.arrays: dict[str, Variable] = {}
        self._keeps_parameters = keeps_parameters
        self._parameters = self._parameter_addresses()
        self._roots = _find_roots(function)
        self.instruction = Instruction("", (), "")
        for variable in function.variables.values():
            self._place(variable)
        self.frame_size = align(self.frame_size, 16)  # the frame of a called function begins there

    def _parameter_addresses(self) -> dict[str, tuple[str, Variable]]:
        found: dict[str, tuple[str, Variable]] = {}
        offset = 0
        for number, variable in enumerate(self.function.parameters):
            if self.function.is_entry:
                offset = align(offset, variable.alignment)
                found[variable.name] = (f"(parameters + {offset})", variable)
                offset += variable.size
            else:
                found[variable.name] = (f"argument_{number}", variable)
        for number, variable in enumerate(self.function.results):
            found[variable.name] = (f"result_{number}", variable)
        return found

    def _place(self, variable: Variable) -> None:
        in_frame = variable.space == "local" or (
            variable.space == "param" and (self._keeps_parameters or variable.size > _LARGEST_SCALAR)
        )
        if in_frame:
            self.frame_size = align(self.frame_size, max(variable.alignment, 8))
            self._frame[variable.name] = self.frame_size
            self.frame_size += variable.size
        elif variable.space == "param":
            self.arrays[variable.name] = variable

    # Operands

    def read(self, operand: Operand, type: PtxType) -> str:
        """Return an expression of an operand's value as a type."""
        match operand:
            case Register():
                return _as_type(operand.name, operand.type, type)
            case Immediate():
                return _constant(operand, type)
            case Special():
                return f"({type.c})({self._special(operand.name)})"
            case Symbol():
                return f"({type.c})({self.address_of(operand)})"
            case Negated():
                return f"!{operand.operand.name}"
            case _:
                raise Refused(self.instruction.text)

    def write(self, operand: Operand, type: PtxType, expression: str) -> str:
        """Return a statement that assigns an expression of a type to a register."""
        if isinstance(operand, Sink):
            return f"(void)({expression});"
        if not isinstance(operand, Register):
            raise Refused(self.instruction.text)
        target = operand.type
        if target.kind == "predicate":
            return f"{operand.name} = ({expression}) != 0;"
        if type.is_float and target.bits > type.bits:
            # The bits of a float in a wider register.
            return f"{operand.name} = {_as_type(f'({_bits_of(expression, type)})', TYPES[f'u{type.bits}'], target)};"
        if type.is_float or target.is_float:
            return f"{operand.name} = {_as_type(f'({expression})', type, target)};"
        return f"{operand.name} = ({target.c})({type.c})({expression});"

    @staticmethod
    def choose(register: Register, condition: str, other: str) -> str:
        """Return a statement that assigns another value of its type to a register if a condition does not hold."""
        type = register.type
        word = TYPES["u8" if type.kind == "predicate" else f"u{type.bits}"]
        a, b = (_as_type(value, type, word) if type.is_float else value for value in (register.name, other))
        chosen = f"(({a} ^ {b}) & -({word.c})({condition})) ^ {b}"
        return f"{register.name} = {_as_type(f'({chosen})', word, type) if type.is_float else f'({type.c})({chosen})'};"

    def write_computed(self, operand: Operand, type: PtxType, expression: str) -> str:
        """Return a statement that assigns a result of arithmetic, of which single precision has one NaN."""
        if type.name == "f32" and isinstance(operand, Register) and operand.name in self.observed:
            expression = f"canonical_f32({expression})"
        return self.write(operand, type, expression)

    def _special(self, name: str) -> str:
        if name in _BLOCK_REGISTERS:
            return _BLOCK_REGISTERS[name]
        if name == "%reserved_smem_offset_1":
            return self.kernel.shared_name(0, "", RESERVED)
        if name not in _THREAD_REGISTERS:
            raise Refused(f"the register {name}")
        if name.startswith("%tid"):
            self.uses.add("tid")
        if "lane" in name:
            self.uses.add("lane")
        return _THREAD_REGISTERS[name]

    # Addresses

    def address_of(self, symbol: Symbol) -> str:
        """Return an expression of the address of a variable, parameter or function, in its state space.

        Addresses of shared, local and parameter memory are offsets, so that registers of 32 bits hold them.
        """
        offset = f" + {symbol.offset}" if symbol.offset else ""
        name = symbol.name
        if name in self._frame or (name in self._parameters and not self.function.is_entry):
            self.uses.add("local")  # a function's parameters are in local memory
            return f"(u64)({self.parameter_pointer(name)} - local_base){offset}"
        if name in self._parameters:
            return f"(u64)({self._parameters[name][0]} - parameters){offset}"
        if name in self.arrays:
            raise Refused(f"the address of the parameter {name}")
        variable = self.function.variables.get(name)
        if variable is not None and variable.space == "shared":
            return f"{self.kernel.shared_name(self.module, self.function.name, variable)}{offset}"
        if variable is not None:
            return f"(u64)variables[{self.kernel.variable(self.module, variable, self.function.name)}]{offset}"
        found = self.kernel.find_variable(self.module, name)
        if found is not None:
            module, variable = found
            if variable.space == "shared":
                return f"{self.kernel.shared_name(module, '', variable)}{offset}"
            return f"(u64)variables[{self.kernel.variable(module, variable, '')}]{offset}"
        return f"{self.kernel.function_handle(self.module, name)}ull"

    def parameter_pointer(self, name: str) -> str:
        """Return a pointer to a parameter of a call."""
        if name in self._frame:
            self.uses.add("local")
            return f"(local + {self._frame[name]})"
        if name in self._parameters:
            return f"(char *){self._parameters[name][0]}"
        return f"(char *)p_{identifier(name)}"

    def pointer(self, address: Operand, space: str, size: int, beyond: str = "") -> str:
        """Return a pointer of C to memory of `size` bytes, after a check that the thread may access it.

        Args:
            address: The operand.
            space: Its state space; "" for a generic address.
            size: A power of two.
            beyond: An expression of bytes to add to the address.
        """
        if not isinstance(address, Address):
            raise Refused(self.instruction.text)
        space = space.partition("::")[0] or self._space_of(address.base)
        if space in _GLOBAL_SPACES:
            return self._global_pointer(address, size, beyond)
        known = None if beyond else self._known_pointer(address, space, size)
        if known is not None:
            return known
        value = self.address(address)
        value = f"({value} + {beyond})" if beyond else value
        access = self.kernel.access(self.instruction)
        log2 = size.bit_length() - 1
        if space == "shared":
            return f'locate_in(k, "shared", shared, shared_size, {value}, {log2}, {access})'
        if space == "local":
            self.uses.add("local")
            return f'locate_in(k, "local", local_base, local_span, {value}, {log2}, {access})'
        if space == "param" and self.function.is_entry:
            total = self.kernel.parameter_size
            return f'locate_in(k, "parameter", (char *)parameters, {total}, {value}, {log2}, {access})'
        raise Refused(self.instruction.text)

    def _space_of(self, base: Operand) -> str:
        """Return the state space of a variable that a generic address names."""
        if not isinstance(base, Symbol):
            return ""
        variable = self.function.variables.get(base.name)
        found = self.kernel.find_variable(self.module, base.name)
        if base.name in self._parameters or (variable is not None and variable.space == "param"):
            raise Refused(f"{self.instruction.text}: a parameter at a generic address")
        variable = variable or (found[1] if found else None)
        return variable.space if variable is not None else ""

    def constants(self, value: str) -> list[str]:
        """Return expressions of whether an address is in each of the program's constant variables."""
        kernel = self.kernel
        return [
            f"{value} - (u64)variables[{kernel.variable(number, variable, '')}] < {variable.size}"
            for number, variable in kernel.program.constants()
        ]

    def address(self, address: Operand) -> str:
        """Return the value of an address."""
        if not isinstance(address, Address):
            raise Refused(self.instruction.text)
        base, offset = address
        if isinstance(base, Register) and base.type.bits == 32:
            return (
                f"(u32)({self.read(base, TYPES['u32'])} + {offset}u)"
                if offset >= 0
                else (f"(u32)({self.read(base, TYPES['u32'])} - {-offset}u)")
            )
        value = self.read(base, TYPES["u64"])
        return f"({value} + {offset}ll)" if offset else value

    def _global_pointer(self, address: Address, size: int, beyond: str) -> str:
        group = self.kernel.range_group(self.function.name, self._root(address.base), size)
        value = self.address(address)
        value = f"({value} + {beyond})" if beyond else value
        log2 = size.bit_length() - 1
        access = self.kernel.access(self.instruction)
        return f"locate(k, &{self.range_names.format(group)}, {group}, {value}, {log2}, {access})"

    def lane_access(
        self, address: Address, base: Register, space: str, size: int
    ) -> tuple[str, Callable[[str], str], str, str]:
        """Return what `LaneAccess` calls address, place, limits and memory."""
        log2 = size.bit_length() - 1
        if space == "shared":
            limits, memory = f"0, shared_size >> {log2}", "shared_size"
            return self.address(address), "(shared + {})".format, limits, memory
        group = self.kernel.range_group(self.function.name, self._root(base), size)
        known = self.range_names.format(group)
        return self.address(address), "((char *){})".format, f"{known}.low, {known}.limit + 1", f"&{known}, {group}"

    def _known_pointer(self, address: Address, space: str, size: int) -> str | None:
        """Return a pointer to a variable at a constant offset, which needs no check."""
        base, offset = address
        if not isinstance(base, Symbol):
            return None
        name = base.name
        variable = self._parameters[name][1] if name in self._parameters else self.function.variables.get(name)
        if space == "shared" and variable is None:
            found = self.kernel.find_variable(self.module, name)
            variable = found[1] if found else None
        if variable is None or not 0 <= offset <= variable.size - size or offset % size or variable.alignment % size:
            if variable is not None and space == "param":
                return self._unaligned_parameter(name, variable, offset, size)
            return None
        if space == "shared":
            return f"(shared + {self.address_of(Symbol(name, offset))})"
        return f"({self.parameter_pointer(name)} + {offset})"

    def _unaligned_parameter(self, name: str, variable: Variable, offset: int, size: int) -> str:
        # Structs that are passed by value may be packed.
        if not 0 <= offset <= variable.size - size:
            raise Refused(f"{self.instruction.text}: beyond the parameter")
        return f"({self.parameter_pointer(name)} + {offset})"

    def _root(self, base: Operand) -> str:
        return self._roots.get(base.name, base.name) if isinstance(base, Register) else repr(base)


def _bits_of(expression: str, type: PtxType) -> str:
    return f"bits_of_{type.c}({expression})"


def _as_type(expression: str, source: PtxType, target: PtxType) -> str:
    """Return an expression of another type with the same bits, as far as they fit."""
    if source is target or (source.c == target.c and source.kind != "predicate"):
        return expression
    if source.kind == "predicate" or target.kind == "predicate":
        if source.kind == target.kind:
            return expression
        raise Refused(f"a predicate in the place of a {target.name if source.kind == 'predicate' else source.name}")
    if source.is_float:
        bits = _bits_of(expression, source)
        return _as_type(bits, TYPES[f"u{source.bits}"], target)
    if target.is_float:
        cast = expression if source.c == target.word else f"({target.word}){expression}"
        return f"{target.c}_of_bits({cast})"
    return f"({target.c}){expression}"


def _constant(constant: Immediate, type: PtxType) -> str:
    value, bits = constant
    if type.kind == "predicate":
        return str(int(value != 0))
    is_right = bits in (64, type.bits) if type.is_float else bits == 0 or (type.kind == "bits" and bits == type.bits)
    if not is_right:
        raise Refused(f"a constant in the place of a {type.name}")
    if bits and bits != type.bits and type.is_float:
        # A constant of the other precision: C converts it.
        return f"({type.c}){_float_constant(value, bits)}"
    if type.is_float:
        return _float_constant(value & (1 << type.bits) - 1, type.bits)
    value &= (1 << type.bits) - 1
    if type.bits == 128:
        return f"((u128){value >> 64}ull << 64 | {value & (1 << 64) - 1}ull)"
    return f"({type.c}){value}{'ull' if value >> 31 else 'u'}"


def _float_constant(value: int, bits: int) -> str:
    return f"float_of_bits({value:#x}u)" if bits == 32 else f"double_of_bits({value:#x}ull)"


def _find_roots(function: Function) -> dict[str, str]:
    """Return, for registers with addresses, the register from which each was computed.

    Accesses through one root probably use one piece of memory: they share the range that was found last.
    """
    sources: dict[str, list[str]] = {}
    for statement in function.body:
        if isinstance(statement, Instruction) and statement.operands and isinstance(statement.operands[0], Register):
            target = statement.operands[0]
            if target.type.bits != 64 or target.name in sources:
                continue
            kind = statement.opcode.split(".", 1)[0]
            operands = [
                operand.name for operand in statement.operands[1:] if isinstance(operand, Register) and operand.type.bits == 64
            ]
            sources[target.name] = operands if kind in ("add", "sub", "mad", "mov", "cvta", "selp") else []
            if kind in ("mul", "shl", "cvt", "and", "neg"):
                sources[target.name] = [""]  # an offset, not an address
    roots: dict[str, str] = {}

    def root(name: str, depth: int) -> str:
        if name in roots or depth > 64:
            return roots.get(name, name)
        roots[name] = name
        found = [root(source, depth + 1) for source in sources.get(name, []) if source]
        addresses = [candidate for candidate in found if sources.get(candidate) != [""]]
        if addresses:
            roots[name] = addresses[0]
        return roots[name]

    for name in sources:
        root(name, 0)
    return roots
