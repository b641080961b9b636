"""Links the modules of a program, and collects what a kernel needs of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .errors import Refused
from .parser import Module, identifier
from .syntax import Function, Instruction, Variable
from .types import TYPES, align

RESERVED = Variable("reserved", "shared", TYPES["b8"], 1024, 128)
"""Shared memory that cooperative_groups takes beside the kernel's."""

_TAKEN_ADDRESS = re.compile(r"\bmov\s*\.[bus]64\s*[\w$%]+\s*,\s*([A-Za-z_$][\w$]*)\s*;")
_NAME = re.compile(r"[A-Za-z_$][\w$]*")
_SHARED_LIMIT = 48 << 10
_STRENGTHS = ("common", "weak", "visible")
"""Of definitions of one name in several modules, the last of these counts."""


class Program:
    """Modules that are linked as nvlink does it: a name that others may see has one definition.

    Attributes:
        modules: The modules.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        """Link the modules.

        Raises:
            Refused: One is not understood, or nvlink would not link them.
        """
        self.modules = [Module(text) for text in texts]
        self._numbers: dict[tuple[int, str], int] = {}
        self._functions: dict[str, tuple[int, str]] = {}
        self._variables: dict[str, tuple[int, Variable]] = {}
        for number, module in enumerate(self.modules):
            for name in module.function_names:
                self._numbers[number, name] = len(self._numbers) + 1
                if linkage := module.linkage(name):
                    other = self._functions.setdefault(name, (number, name))
                    known = self.modules[other[0]].linkage(name)
                    if other[0] != number and _is_stronger(linkage, known, name):
                        self._functions[name] = number, name
            for variable in module.variables.values():
                if variable.linkage not in ("", "extern"):
                    self._link(number, variable)
        for number, module in enumerate(self.modules):
            for alias, name in module.aliases.items():
                self._functions.setdefault(alias, (number, name))
            for variable in module.variables.values():
                self._check_size(number, variable)

    def _link(self, module: int, variable: Variable) -> None:
        _, known = self._variables.setdefault(variable.name, (module, variable))
        is_larger = variable.linkage == known.linkage == "common" and variable.size > known.size
        if known is not variable and (is_larger or _is_stronger(variable.linkage, known.linkage, variable.name)):
            self._variables[variable.name] = module, variable

    def _check_size(self, module: int, variable: Variable) -> None:
        owner, chosen = self._variables.get(variable.name, (module, variable))
        if not variable.linkage or owner == module:
            return
        if variable.space != chosen.space:
            raise Refused(f"{variable.name}, which is in .{chosen.space} in one module and in .{variable.space} in another")
        if not variable.size:
            if variable.space == "shared":  # nvlink gives it no address
                raise Refused(f"the dynamic shared memory {variable.name}, which another module defines with a size")
            return
        if variable.size > chosen.size or (variable.size < chosen.size and variable.linkage != "common"):
            raise Refused(f"{variable.name}, which has {chosen.size} bytes in one module and {variable.size} in another")

    def find_entry(self, name: str) -> int | None:
        """Return the number of the module that defines a kernel."""
        if name in self._functions:
            return self._functions[name][0]
        return next((number for number, module in enumerate(self.modules) if name in module.entries), None)

    def find_function(self, module: int, name: str) -> tuple[int, str] | None:
        """Return the module and name of the function that a name means in a module."""
        name = self.modules[module].aliases.get(name, name)
        if (module, name) in self._numbers and not self.modules[module].linkage(name):
            return module, name
        return self._functions.get(name)

    def find_variable(self, module: int, name: str) -> tuple[int, Variable] | None:
        """Return the variable that a name means in a module, and its module."""
        variable = self.modules[module].variables.get(name)
        if variable is None or not variable.linkage:
            return (module, variable) if variable is not None else None
        if name in self._variables:
            return self._variables[name]
        is_dynamic = variable.space == "shared" and (not variable.size or len(self.modules) == 1)
        return (module, variable) if is_dynamic else None

    def constants(self) -> list[tuple[int, Variable]]:
        """Return the constant variables, and the module of each."""
        return [
            (number, variable)
            for number, module in enumerate(self.modules)
            for variable in module.variables.values()
            if variable.space == "const" and self.find_variable(number, variable.name) == (number, variable)
        ]

    def function_number(self, module: int, name: str) -> int:
        """Return the number that stands for a function's address, the same in all kernels of the program."""
        return self._numbers[module, name]

    def functions_with_address(self) -> list[tuple[int, str]]:
        """Return the functions whose address is taken, which an indirect call may mean."""
        found: list[tuple[int, str]] = []
        for number, module in enumerate(self.modules):
            texts = [module.body_text(name) for name in module.function_names]
            names = {name for text in texts for name in _TAKEN_ADDRESS.findall(text)}
            for variable in module.variables.values():
                names.update(_NAME.findall(variable.initializer))
            for name in sorted(names):
                function = self.find_function(number, name)
                if function is not None and function not in found:
                    found.append(function)
        return found

    def variable_label(self, module: int, variable: Variable, owner: str) -> str:
        """Return the name by which the host knows a variable; those that others may not see get their module's number."""
        name = f"{owner}::{variable.name}" if owner else variable.name
        return name if variable.linkage or len(self.modules) == 1 else f"{module}:{name}"


def _is_stronger(linkage: str, known: str, name: str) -> bool:
    """Return whether a definition replaces the one of another module."""
    if linkage == known == "visible":
        raise Refused(f"a second definition of {name}")
    return _STRENGTHS.index(linkage) > _STRENGTHS.index(known)


class Kernel:
    """What the code of a kernel refers to, numbered as the code first does."""

    def __init__(self, program: Program, module: int, function: Function) -> None:
        self.program = program
        self.module = module
        self.function = function
        self.accesses: dict[tuple[str, str, int], int] = {}
        self.shared: dict[str, Variable] = {}
        self.variables: dict[tuple[int, str], int] = {}
        self.range_groups: dict[tuple[str, str, int], int] = {}
        self.handles: set[tuple[int, str]] = set()
        self.called: dict[tuple[int, str], None] = {}
        self.calls: dict[tuple[int, str], set[tuple[int, str]]] = {}
        self.uses_matrices = False
        self.points: list[str] = []
        self.details: list[str] = []
        self.parameter_size = 0
        self.parameters: list[tuple[int, int]] = []
        for variable in function.parameters:
            offset = align(self.parameter_size, variable.alignment)
            self.parameters.append((offset, variable.size))
            self.parameter_size = offset + variable.size
        self.constant_size = 0
        self._sizes: dict[tuple[int, str], int] = {}

    def access(self, instruction: Instruction) -> int:
        """Return the number of an instruction in the table for reports."""
        key = (instruction.text, instruction.file, instruction.line)
        return self.accesses.setdefault(key, len(self.accesses))

    def range_group(self, function: str, root: str, size: int) -> int:
        """Return the number of the accesses of one size through one pointer."""
        return self.range_groups.setdefault((function, root, size), len(self.range_groups))

    def shared_name(self, module: int, owner: str, variable: Variable) -> str:
        """Return the name of a constant: the offset of a variable in shared memory."""
        name = f"SHARED_{module}_{identifier(owner)}_{identifier(variable.name)}"
        self.shared[name] = variable
        return name

    def find_variable(self, module: int, name: str) -> tuple[int, Variable] | None:
        return self.program.find_variable(module, name)

    def variable(self, module: int, variable: Variable, owner: str) -> int:
        """Return the number of a global variable in the kernel's table."""
        key = (module, self.program.variable_label(module, variable, owner))
        if key not in self.variables and variable.space == "const":
            self.constant_size += variable.size
        self._sizes[key] = variable.size
        return self.variables.setdefault(key, len(self.variables))

    def variable_table(self) -> list[tuple[str, int]]:
        return [(label, self._sizes[module, label]) for module, label in self.variables]

    def function_handle(self, module: int, name: str) -> int:
        """Return the number that stands for a function's address."""
        found = self.program.find_function(module, name)
        if found is None:
            raise Refused(f"the address of {name}, which no module defines")
        self.handles.add(found)
        return self.program.function_number(*found)

    def call(self, module: int, caller: str, name: str) -> tuple[int, str] | None:
        """Note a call; return the function, or None if no module defines it."""
        found = self.program.find_function(module, name)
        if found is not None:
            self.called[found] = None
            self.calls.setdefault((module, caller), set()).add(found)
        return found

    def is_recursive(self) -> bool:
        """Return whether the depth of calls is unknown: a function may call itself, or be called through a pointer."""
        if self.handles:
            return True
        reachable = {caller: set(callees) for caller, callees in self.calls.items()}
        for middle in reachable:
            for callees in reachable.values():
                if middle in callees:
                    callees |= reachable[middle]
        return any(caller in callees for caller, callees in reachable.items())

    def stack_size(self, frames: dict[tuple[int, str], int], caller: tuple[int, str]) -> int:
        """Return the bytes of the frames below a function, of the calls that need most; a recursive one counts once."""
        deepest: dict[tuple[int, str], int] = {}

        def below(function: tuple[int, str]) -> int:
            if function not in deepest:
                deepest[function] = 0
                callees = self.calls.get(function, set()) | self.handles
                deepest[function] = max((frames.get(callee, 0) + below(callee) for callee in callees), default=0)
            return deepest[function]

        return below(caller)

    def add_point(self, wait: str, operation: str, access: int, detail: str) -> int:
        """Return the number of a new point at which lanes wait."""
        number = len(self.points) + 1
        self.uses_matrices = self.uses_matrices or operation.startswith("MATRIX")
        if detail:
            type, _, initializer = detail.partition(" {")
            self.details.append(f"static const {type} detail_{number} = {{{initializer};")
        pointer = f"&detail_{number}" if detail else "NULL"
        self.points.append(f"{{{wait}, {operation}, 0, {access}, {pointer}}}")
        return number

    def layout_of_shared_memory(self) -> tuple[dict[str, int], int]:
        """Return the offset of each variable and the size of all. Those of unknown size begin where the others end."""
        offsets: dict[str, int] = {}
        end = 0
        for name, variable in self.shared.items():
            if variable.size:
                end = align(end, variable.alignment)
                offsets[name] = end
                end += variable.size
        declared = 0
        for variable in self.shared.values():
            if variable is not RESERVED:
                declared = align(declared, variable.alignment) + variable.size
        if declared > _SHARED_LIMIT:
            raise Refused(f"{declared} bytes of static shared memory; ptxas takes at most {_SHARED_LIMIT}")
        sizeless = {name: variable for name, variable in self.shared.items() if not variable.size}
        alignment = max((variable.alignment for variable in sizeless.values()), default=16)
        end = align(end, max(alignment, 16))
        offsets.update(dict.fromkeys(sizeless, end))
        return offsets, end
