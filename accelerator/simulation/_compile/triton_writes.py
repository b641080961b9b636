"""Finds the parameters of a Triton kernel whose memory it may write, by reading its code.

On a GPU, torch compiles the kernel to Triton's intermediate code and looks there. That needs the
kernels of Triton's own library in compiled form, which a process with the interpreter does not have.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["written_parameters"]

_UNKNOWN: Any = object()
_BUILTINS = (range, len, min, max, abs, print, int, float, bool, isinstance)
_WRITES = re.compile("store|atomic|scatter")
_BINDING = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.withitem, ast.comprehension)


def written_parameters(function: Callable[..., Any], callers: tuple[Callable[..., Any], ...] = ()) -> frozenset[str]:
    """Return the parameters through which a kernel may write. What is not understood counts as a write.

    Args:
        function: The Python function of the kernel.
        callers: The kernels that call it, to find recursions.
    """
    names = frozenset(inspect.signature(function).parameters)
    if function in callers:
        return names
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError, ValueError):
        return names
    return names & _Reader(function, definition, callers).written()


class _Reader:
    """Reads one function. Each variable has the parameters that its value may point into, wherever it was assigned."""

    def __init__(self, function: Callable[..., Any], definition: ast.AST, callers: tuple[Callable[..., Any], ...]) -> None:
        self._definition = definition
        self._language: Any = sys.modules["triton.language"]
        self._callers = (*callers, function)
        self._sources = {name: {name} for name in inspect.signature(function).parameters}
        self._scope = {**vars(builtins), **function.__globals__, **inspect.getclosurevars(function).nonlocals}

    def written(self) -> set[str]:
        bindings = [pair for node in ast.walk(self._definition) if isinstance(node, _BINDING) for pair in _bindings(node)]
        has_changed = True
        while has_changed:
            has_changed = False
            for target, value in bindings:
                sources = self._sources_of(value)
                for name in _names(target):
                    known = self._sources.setdefault(name, set())
                    has_changed = has_changed or not sources <= known
                    known |= sources
        written: set[str] = set()
        for node in ast.walk(self._definition):
            if isinstance(node, ast.Call):
                written |= self._written_by(node)
        return written

    def _sources_of(self, value: ast.AST) -> set[str]:
        """Return the parameters that a value may point into. What was loaded from memory points into none of them."""
        if isinstance(value, ast.Name):
            return self._sources.get(value.id, set())
        if isinstance(value, ast.Call) and _is_load(value):
            return set()
        return set[str]().union(*(self._sources_of(child) for child in ast.iter_child_nodes(value)))

    def _written_by(self, call: ast.Call) -> set[str]:
        name, called = _called_name(call), self._resolve(call.func)
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        if _WRITES.search(name):  # a function of Triton, or a method of a tensor or a descriptor
            return set[str]().union(*map(self._sources_of, (call.func, *(call.args[:1] or arguments))))
        kernel = getattr(called, "fn", None)
        is_of_triton = self._is_of_triton(call.func, called) and name != "inline_asm_elementwise"
        is_method = called is _UNKNOWN and isinstance(call.func, ast.Attribute) and hasattr(self._language.tensor, name)
        if _is_load(call) or is_of_triton or is_method or any(called is each for each in _BUILTINS):
            return set()
        if inspect.isfunction(kernel) and not any(isinstance(each, ast.Starred) for each in call.args):
            return self._written_by_kernel(kernel, call)
        return set[str]().union(*map(self._sources_of, (*arguments, call.func)))

    def _written_by_kernel(self, kernel: Callable[..., Any], call: ast.Call) -> set[str]:
        parameters = list(inspect.signature(kernel).parameters)
        values = {**dict(zip(parameters, call.args, strict=False)), **{str(each.arg): each.value for each in call.keywords}}
        written = written_parameters(kernel, self._callers)
        return set[str]().union(*(self._sources_of(value) for name, value in values.items() if name in written))

    def _is_of_triton(self, expression: ast.AST, called: Any) -> bool:
        """Return whether a function belongs to ``triton.language``. The interpreter replaces the functions there by its own."""
        owner = self._resolve(expression.value) if isinstance(expression, ast.Attribute) else called
        name = owner.__name__ if inspect.ismodule(owner) else getattr(getattr(owner, "fn", owner), "__module__", None)
        return str(name).startswith("triton.language")

    def _resolve(self, expression: ast.AST) -> Any:
        """Return the object that an expression names outside the kernel, or _UNKNOWN."""
        if isinstance(expression, ast.Name) and expression.id not in self._sources:
            return self._scope.get(expression.id, _UNKNOWN)
        if isinstance(expression, ast.Attribute):
            owner = self._resolve(expression.value)
            return _UNKNOWN if owner is _UNKNOWN else getattr(owner, expression.attr, _UNKNOWN)
        return _UNKNOWN


def _bindings(node: Any) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield the targets and values of a statement or expression that binds names."""
    if isinstance(node, ast.withitem):
        if node.optional_vars is not None:
            yield node.optional_vars, node.context_expr
        return
    value = node.iter if isinstance(node, (ast.For, ast.comprehension)) else node.value
    if value is None:  # an annotation alone
        return
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            yield from zip(target.elts, value.elts, strict=True)
        else:
            yield target, value


def _names(target: ast.AST) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]


def _called_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _is_load(call: ast.Call) -> bool:
    return _called_name(call).startswith("load")
