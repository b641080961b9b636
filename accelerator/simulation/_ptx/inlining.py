"""Replaces calls of functions at which lanes wait by their bodies, so that a kernel's points are all in one function."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

from . import opcodes
from .control_flow import Flow
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
    Statement,
    Symbol,
    Variable,
    Vector,
)

if TYPE_CHECKING:
    from .program import Program

_LARGEST_BODY = 20_000
"""Of statements. A kernel that would be longer runs its threads in fibers."""


class Calls:
    """Which functions of a program call which, and at which lanes may wait."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._waiting: dict[tuple[int, str], bool] = {}
        self._reading: dict[tuple[int, str], bool] = {}

    def waits(self, module: int, function: Function) -> bool:
        """Return whether lanes may wait in a function or in one that it calls, also for what others write to memory."""
        key = (module, function.name)
        if key not in self._waiting:
            self._waiting[key] = False  # of a recursive function: what the rest of it says
            self._waiting[key] = any(
                self.instruction_waits(module, statement) for statement in function.body if isinstance(statement, Instruction)
            ) or bool(self.polls(module, Flow(function)))
        return self._waiting[key]

    def polls(self, module: int, flow: Flow) -> set[int]:
        """Return the ids of a function's instructions that may wait for other threads in a loop."""
        return flow.polls(lambda instruction: self._reads(module, instruction))

    def _reads(self, module: int, instruction: Instruction) -> bool:
        """Return whether an instruction calls a function that reads what others write."""
        if not instruction.opcode.startswith("call"):
            return False
        callee = self.callee(module, instruction)
        if callee is None:
            return self._is_indirect(instruction) and any(self._function_reads(*each) for each in self._with_address)
        return self._function_reads(*callee)

    def _function_reads(self, module: int, function: Function) -> bool:
        key = (module, function.name)
        if key not in self._reading:
            self._reading[key] = False
            self._reading[key] = any(
                opcodes.find(statement.opcode).polls or self._reads(module, statement)
                for statement in function.body
                if isinstance(statement, Instruction)
            )
        return self._reading[key]

    def instruction_waits(self, module: int, instruction: Instruction) -> bool:
        if not instruction.opcode.startswith("call"):
            return bool(opcodes.find(instruction.opcode).waits)
        callee = self.callee(module, instruction)
        if callee is None:
            return self._is_indirect(instruction) and self._any_waits()
        return self.waits(*callee)

    def callee(self, module: int, instruction: Instruction) -> tuple[int, Function] | None:
        """Return the function of a direct call; None for indirect calls and for functions of the system."""
        target = instruction.operands[0]
        if not isinstance(target, Symbol):
            return None
        found = self._program.find_function(module, target.name)
        return (found[0], self._program.modules[found[0]].function(found[1])) if found else None

    def _is_indirect(self, instruction: Instruction) -> bool:
        return isinstance(instruction.operands[0], Register)

    def _any_waits(self) -> bool:
        return any(self.waits(*each) for each in self._with_address)

    @functools.cached_property
    def _with_address(self) -> list[tuple[int, Function]]:
        """The functions that an indirect call may mean."""
        modules = self._program.modules
        return [(number, modules[number].function(name)) for number, name in self._program.functions_with_address()]


def inline_waiting(calls: Calls, module: int, function: Function) -> Function | None:
    """Return a copy of a function in which no call waits.

    Returns:
        None if that is impossible: a function that waits is recursive, called through a pointer or in another module, or the
        result is too long.
    """
    result = replace(function, body=[], variables=dict(function.variables))
    inliner = _Inliner(calls, module, result)
    return result if inliner.copy(function, {}, (function.name,), "") else None


class _Inliner:
    def __init__(self, calls: Calls, module: int, result: Function) -> None:
        self._calls = calls
        self._module = module
        self._result = result
        self._count = 0

    def copy(self, function: Function, names: dict[str, str], path: tuple[str, ...], end: str) -> bool:
        """Append a function's body.

        Args:
            function: The function.
            names: New names of its parameters and variables.
            path: The functions that are being copied.
            end: The label to which it returns; "" for the kernel itself.
        """
        prefix = f"i{self._count}_" if end else ""
        body = self._result.body
        for statement in function.body:
            if len(body) > _LARGEST_BODY:
                return False
            if not isinstance(statement, Instruction):
                body.append(_rename_label(statement, prefix))
                continue
            renamed = _rename(statement, names, prefix)
            if end and statement.opcode.startswith("ret"):
                body.append(replace(renamed, opcode="bra", operands=(Symbol(end),)))
            elif end and statement.opcode == "exit":
                raise Refused(f"exit in the function {function.name}")
            elif statement.opcode.startswith("call") and self._calls.instruction_waits(self._module, statement):
                if not self._inline(renamed, path):
                    return False
            else:
                body.append(renamed)
        return True

    def _inline(self, call: Instruction, path: tuple[str, ...]) -> bool:
        found = self._calls.callee(self._module, call)
        if found is None or found[0] != self._module or found[1].name in path:
            return False
        callee = found[1]
        self._count += 1
        prefix, end = f"i{self._count}_", f"L_end_{self._count}"
        parameters = dict(zip((v.name for v in callee.parameters), call.arguments, strict=True))
        parameters.update(zip((v.name for v in callee.results), call.results, strict=True))
        for name, variable in callee.variables.items():
            parameters[name] = self._add_variable(callee.name, name, variable, prefix)
        body = self._result.body
        if call.guard is not None:
            skipped = not call.is_guard_negated
            body.append(Instruction("bra", (Symbol(end),), call.text, call.guard, skipped))
        is_copied = self.copy(callee, parameters, (*path, callee.name), end)
        body.append(Label(end))
        return is_copied

    def _add_variable(self, function: str, name: str, variable: Variable, prefix: str) -> str:
        """Add a variable of a callee: its own for each call, or one for all if threads share it."""
        new = f"{prefix}{name}" if variable.space in ("local", "param") else f"{function}::{name}"
        self._result.variables[new] = replace(variable, name=new)
        return new


def _rename_label(statement: Statement, prefix: str) -> Statement:
    if isinstance(statement, Label):
        return Label(prefix + statement.name)
    assert isinstance(statement, Directive)
    return Directive(prefix + statement.label, tuple(prefix + target for target in statement.targets))


def _rename(instruction: Instruction, names: dict[str, str], prefix: str) -> Instruction:
    if not prefix:
        return instruction
    is_branch = instruction.opcode.startswith(("bra", "brx"))
    is_call = instruction.opcode.startswith("call")

    def rename(operand: Operand) -> Operand:
        match operand:
            case Register():
                return Register(prefix + operand.name, operand.type)
            case Symbol():
                if is_branch:
                    return Symbol(prefix + operand.name)
                return operand if is_call else Symbol(names.get(operand.name, operand.name), operand.offset)
            case Negated():
                return Negated(Register(prefix + operand.operand.name, operand.operand.type))
            case Vector():
                return Vector(tuple(rename(part) for part in operand.parts))
            case Pair():
                return Pair(rename(operand.first), rename(operand.second))
            case Address():
                return Address(rename(operand.base), operand.offset)
            case _:
                return operand

    guard = instruction.guard
    return replace(
        instruction,
        operands=tuple(rename(operand) for operand in instruction.operands),
        guard=Register(prefix + guard.name, guard.type) if guard is not None else None,
        results=tuple(names.get(name, name) for name in instruction.results),
        arguments=tuple(names.get(name, name) for name in instruction.arguments),
    )
