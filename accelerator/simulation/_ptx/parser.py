"""Parses PTX: the functions and variables of a module, without comments.

Modules of libraries have thousands of functions, and a launch needs one: a module's text is searched for functions and
variables, and a function's body is parsed when somebody asks for it.
"""

from __future__ import annotations

import re
import struct
from typing import NamedTuple

from .errors import Refused
from .syntax import (
    Address,
    Directive,
    Function,
    Immediate,
    Instruction,
    Label,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Statement,
    Symbol,
    Variable,
    Vector,
)
from .types import PREDICATE, TYPES, is_type

__all__ = ["Module", "identifier", "parse_constant", "parse_variables"]

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_MISLEADING_COMMENT = re.compile(r"/\*|//[^\n]*[{};]")  # which may have braces, or a function
_HEADER = re.compile(r"^[ \t]*((?:\.(?:visible|weak|extern|common)\s+)*)\.(entry|func)\b", re.MULTILINE)
_SECTION = re.compile(r"^[ \t]*\.section\b[^{]*\{[^}]*\}", re.MULTILINE)
_LINE_DIRECTIVE = re.compile(r"^[ \t]*\.(?:version|target|address_size|file|loc)\b[^\n]*", re.MULTILINE)
_FILE = re.compile(r'^[ \t]*\.file\s+(\d+)\s+"((?:[^"\\]|\\.)*)"', re.MULTILINE)
_TARGET = re.compile(r"^[ \t]*\.target\s+(sm_(\d+)\w*)", re.MULTILINE)
_NAME = r"[A-Za-z_$%][\w$]*"
_VARIABLE = re.compile(r"((?:\.(?:extern|visible|weak|common)\s+)*)\.(global|const|shared|local|param|reg)\s+(.*)", re.DOTALL)
_ATTRIBUTES = re.compile(
    r"\s*\.(?:attribute\s*\([^)]*\)|ptr(?:\s+\.(?:global|shared|const|local|generic))?(?:\s+\.align\s+\d+)?)\s*"
)
_ALIGNMENT = re.compile(r"\s*\.align\s+(\d+)\s*")
_DECLARED = re.compile(rf"\s*({_NAME})\s*(?:<(\d+)>)?\s*((?:\[[^]]*\]\s*)*)")
_VECTOR_SIZES = {"v2": 2, "v4": 4}

# The statements of a body. A brace that opens a scope begins a statement; those of vectors are inside one.
_STATEMENT = re.compile(
    rf"""\s*(?:
        \.loc\s+(?P<file>\d+)\s+(?P<line>\d+)[^\n]*
      | \.file\b[^\n]*
      | (?P<label>{_NAME}|\$[\w$]+)\s*:(?!:)
      | (?P<open>\{{)
      | (?P<close>\}})
      | (?P<text>[^;{{}}]*(?:\{{[^}}]*\}}[^;{{}}]*)*);
    )""",
    re.VERBOSE,
)
_INSTRUCTION = re.compile(rf"(?:@(!?)\s*({_NAME})\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_CALL = re.compile(
    rf"(?:\(\s*(?P<results>[\w$%,\s]*)\)\s*,\s*)?(?P<target>{_NAME})\s*(?:,\s*\((?P<arguments>[^)]*)\))?\s*(?:,\s*(?P<prototype>{_NAME}))?\s*$"
)
_DECLARATION = re.compile(r"\.(?:visible|extern|weak|reg|local|shared|param|global|const)\b")
_IGNORED = re.compile(r"\.(?:callprototype|calltargets|pragma|noreturn|abi_preserve\w*)\b")
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_FLOAT_BITS = re.compile(r"0([fFdD])([0-9a-fA-F]+)$")
_DECIMAL = re.compile(r"-?\d+\.\d*(?:[eE][-+]?\d+)?$")
_SUM = re.compile(rf"({_NAME}(?:\.[xyzw])?)\s*([+-])\s*(-?\w+)$")
_REGISTER_NAME = re.compile(r"%\w+(?:\.\w+)?$")


def identifier(name: str) -> str:
    """Return a C identifier for a PTX name."""
    return re.sub(r"\W", lambda match: f"_{ord(match[0]):x}_", name.removeprefix("%"))


class _Part(NamedTuple):
    """A function that has not been parsed: its header and its body's place in the text."""

    header: str
    start: int
    end: int
    is_visible: bool


class Module:
    """A PTX module.

    Attributes:
        architecture: 80 for ``.target sm_80``.
        target: ``sm_80``.
        variables: The module's variables, by name.
        declared: Names of the functions that other modules define.
        entries: Names of the kernels.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._parts: dict[str, _Part] = {}
        self._functions: dict[str, Function] = {}
        target = _TARGET.search(text)
        self.target = target[1] if target else ""
        self.architecture = int(target[2]) if target else 0
        self.files = {int(match[1]): match[2] for match in _FILE.finditer(text)}
        self.entries: list[str] = []
        self.declared: set[str] = set()
        self.aliases: dict[str, str] = {}
        self.variables: dict[str, Variable] = {}
        self._read_declarations(self._find_functions())

    def _find_functions(self) -> str:
        """Record the functions, and return the text outside them."""
        outside: list[str] = []
        end = 0
        if _MISLEADING_COMMENT.search(self._text):
            self._text = _COMMENT.sub(lambda comment: "\n" * comment[0].count("\n") or " ", self._text)
        text = self._text
        braces = re.compile(r"[{}]")
        for match in _HEADER.finditer(text):
            if match.start() < end:
                continue
            outside.append(text[end : match.start()])
            stop = re.compile(r"[{;]").search(text, match.end())
            if stop is None:
                raise Refused("a function without an end")
            header = _COMMENT.sub(" ", text[match.start() : stop.start()]).strip()
            name = _function_name(header)
            end = stop.end()
            if stop[0] == ";":
                self.declared.add(name)
                continue
            depth = 1
            for brace in braces.finditer(text, end):
                depth += 1 if brace[0] == "{" else -1
                if depth == 0:
                    self._parts[name] = _Part(header, end, brace.start(), "visible" in match[1] or "weak" in match[1])
                    end = brace.end()
                    break
            if match[2] == "entry":
                self.entries.append(name)
        outside.append(text[end:])
        return "".join(outside)

    def _read_declarations(self, text: str) -> None:
        text = _LINE_DIRECTIVE.sub("", _SECTION.sub("", _COMMENT.sub("", text)))
        for statement in text.split(";"):
            statement = statement.strip()
            if statement.startswith(".alias"):
                alias, _, target = statement[len(".alias") :].partition(",")
                self.aliases[alias.strip()] = target.strip()
                continue
            for variable in parse_variables(statement):
                known = self.variables.get(variable.name)
                if known is None or known.is_external:
                    self.variables[variable.name] = variable

    @property
    def function_names(self) -> list[str]:
        """The names of the functions that the module defines, in the order of the text."""
        return list(self._parts)

    def is_visible(self, name: str) -> bool:
        return self._parts[name].is_visible

    def body_text(self, name: str) -> str:
        part = self._parts[name]
        return self._text[part.start : part.end]

    def function(self, name: str) -> Function:
        """Parse a function."""
        if name not in self._functions:
            part = self._parts[name]
            function = _parse_header(part.header)
            _Body(function, self.files).parse(_COMMENT.sub("", self._text[part.start : part.end]))
            self._functions[name] = function
        return self._functions[name]


def _function_name(header: str) -> str:
    match = re.search(rf"\.(?:entry|func)\s*(?:\([^)]*\)\s*)?({_NAME})", header)
    if match is None:
        raise Refused(f"a function's header: {header}")
    return match[1]


def _parse_header(header: str) -> Function:
    match = re.search(
        rf"\.(entry|func)\s*(?:\(([^)]*)\)\s*)?({_NAME})\s*(?:\(((?:[^()]|\([^)]*\))*)\))?(.*)$", header, re.DOTALL
    )
    if match is None:
        raise Refused(f"a function's header: {header}")
    kind, results, name, parameters, directives = match.groups()
    function = Function(name, kind == "entry", _parse_list(parameters or ""), _parse_list(results or ""))
    for directive, values in re.findall(r"\.(\w+)\s*([\d,\s]*)", directives):
        numbers = tuple(int(value) for value in values.replace(",", " ").split())
        if directive == "maxntid":
            function.thread_limit = _product(numbers)
        elif directive == "reqntid":
            function.required_block = (*numbers, 1, 1)[:3]
            function.thread_limit = _product(numbers)
        elif directive in ("reqnctapercluster", "explicitcluster"):
            function.uses_clusters = function.uses_clusters or _product(numbers) != 1
    return function


def _product(numbers: tuple[int, ...]) -> int:
    product = 1
    for number in numbers:
        product *= number
    return product


def _parse_list(text: str) -> list[Variable]:
    return [variable for piece in _split(text) for variable in parse_variables(piece)]


def _split(text: str) -> list[str]:
    """Split at the commas outside brackets."""
    if "," not in text:
        return [text.strip()] if text.strip() else []
    parts: list[str] = []
    depth = start = 0
    for at, character in enumerate(text):
        if character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:at].strip())
            start = at + 1
    parts.append(text[start:].strip())
    return parts


def parse_variables(statement: str) -> list[Variable]:
    """Parse a declaration; return nothing for other statements."""
    match = _VARIABLE.match(statement)
    if match is None:
        return []
    linkage, space, rest = match.groups()
    alignment, vector = 0, 1
    type_name = ""
    is_managed = False
    while rest.startswith("."):
        if found := _ATTRIBUTES.match(rest):
            is_managed = is_managed or "managed" in found[0]
            rest = rest[found.end() :]
        elif found := _ALIGNMENT.match(rest):
            alignment = int(found[1])
            rest = rest[found.end() :]
        else:
            word, _, rest = rest[1:].partition(" ") if " " in rest else (rest[1:], "", "")
            word = word.strip()
            rest = rest.strip()
            if word in _VECTOR_SIZES:
                vector = _VECTOR_SIZES[word]
            elif is_type(word):
                type_name = word
            else:
                raise Refused(f"a variable of the type {word}")
    if space == "reg" and vector > 1:
        raise Refused("a vector register")
    variables = [
        variable for piece in _split(rest) for variable in _declared(piece, space, type_name, vector, alignment, linkage)
    ]
    for variable in variables:
        variable.is_managed = is_managed
    return variables


def _declared(piece: str, space: str, type_name: str, vector: int, alignment: int, linkage: str) -> list[Variable]:
    piece, _, initializer = piece.partition("=")
    match = _DECLARED.match(piece)
    if match is None or not type_name:
        raise Refused(f"a declaration: {piece}")
    name, count, dimensions = match.groups()
    type = TYPES[type_name]
    if count is not None:
        return [Variable(f"{name}{number}", space, type, 1, type.bytes) for number in range(int(count))]
    elements = vector
    for dimension in re.findall(r"\[([^]]*)\]", dimensions):
        elements *= int(dimension.strip() or "0", 0)
    return [
        Variable(
            name,
            space,
            type,
            elements,
            alignment or type.bytes * vector,
            initializer.strip(),
            is_external="extern" in linkage,
            is_visible="visible" in linkage or "weak" in linkage or "common" in linkage,
        )
    ]


def _scoped(name: str, scope: int) -> str:
    """Return the name in a function of what one of its scopes declares. Names of PTX have no point."""
    return f"{name}.{scope}" if scope else name


class _Body:
    """Parses a function's body. Scopes may declare a name again, so registers, variables and labels get unique names."""

    def __init__(self, function: Function, files: dict[int, str]) -> None:
        self._function = function
        self._files = files
        self._scopes: list[dict[str, Register | str]] = [{}]
        self._scope_numbers = [0]
        self._scope_count = 0
        self._labels: list[dict[str, str]] = [{}]
        self._operands: dict[str, Operand] = {}
        for variable in (*function.parameters, *function.results):
            if variable.space == "reg":
                raise Refused("parameters in registers")
            self._scopes[0][variable.name] = variable.name

    def parse(self, text: str) -> None:
        self._find_labels(text)
        body = self._function.body
        self._scope_count = 0
        file, line = "", 0
        last_label = ""
        for match in _STATEMENT.finditer(text):
            kind = match.lastgroup
            if kind == "line":
                file, line = self._files.get(int(match["file"]), ""), int(match["line"])
            elif kind == "label":
                last_label = self._label(match["label"])
                body.append(Label(last_label))
            elif kind == "open":
                self._enter()
            elif kind == "close":
                self._scopes.pop()
                self._scope_numbers.pop()
                self._operands.clear()
            elif kind == "text":
                statement = self._statement(match["text"].strip(), last_label)
                if isinstance(statement, Instruction):
                    statement.file, statement.line = file, line
                if statement is not None:
                    body.append(statement)

    def _find_labels(self, text: str) -> None:
        """Name the labels of each scope, because branches go forward too."""
        numbers = [0]
        for match in _STATEMENT.finditer(text):
            kind = match.lastgroup
            if kind == "open":
                self._scope_count += 1
                numbers.append(self._scope_count)
                self._labels.append({})
            elif kind == "close":
                numbers.pop()
            elif kind == "label":
                self._labels[numbers[-1]][match["label"]] = f"L_{identifier(_scoped(match['label'], numbers[-1]))}"

    def _enter(self) -> None:
        self._scope_count += 1
        self._scope_numbers.append(self._scope_count)
        self._scopes.append({})
        self._operands.clear()

    def _label(self, name: str) -> str:
        for number in reversed(self._scope_numbers):
            if name in self._labels[number]:
                return self._labels[number][name]
        raise Refused(f"a branch to {name}, which is no label")

    def _statement(self, text: str, last_label: str) -> Statement | None:
        if not text or _IGNORED.match(text):
            return None
        if text.startswith(".branchtargets"):
            targets = tuple(self._label(name) for name in _split(text[len(".branchtargets") :]))
            return Directive(last_label, targets)
        if _DECLARATION.match(text):
            self._declare(text)
            return None
        return self._instruction(text)

    def _declare(self, text: str) -> None:
        scope, number = self._scopes[-1], self._scope_numbers[-1]
        self._operands.clear()
        for variable in parse_variables(text):
            if variable.space == "reg":
                kind = "v" if variable.name.startswith("%") else "n"
                scope[variable.name] = Register(f"{kind}_{identifier(_scoped(variable.name, number))}", variable.type)
                continue
            # In its function, a declared name hides that of the module.
            unique = _scoped(variable.name, number)
            scope[variable.name] = unique
            variable.name = unique
            self._function.variables[unique] = variable

    def _find(self, name: str) -> Register | str | None:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        return None

    def _register(self, name: str) -> Register:
        found = self._find(name)
        if not isinstance(found, Register):
            raise Refused(f"{name}, which is no register")
        return found

    def _instruction(self, text: str) -> Instruction:
        match = _INSTRUCTION.match(text)
        if match is None:
            raise Refused(text)
        negation, guard, opcode, rest = match.groups()
        instruction = Instruction(opcode, (), " ".join(text.split()))
        if guard is not None:
            instruction.guard = self._register(guard)
            instruction.is_guard_negated = bool(negation)
            if instruction.guard.type is not PREDICATE:
                raise Refused(f"a guard that is no predicate: {text}")
        try:
            if opcode.split(".", 1)[0] == "call":
                self._parse_call(instruction, rest)
            elif opcode.startswith(("bra", "brx")):
                instruction.operands = self._branch_operands(opcode, rest)
            else:
                instruction.operands = tuple(self._operand(piece) for piece in _split(rest))
        except Refused as error:
            raise Refused(f"{error} of {instruction.text}") from error
        return instruction

    def _branch_operands(self, opcode: str, rest: str) -> tuple[Operand, ...]:
        pieces = _split(rest)
        if opcode.startswith("bra"):
            return (Symbol(self._label(pieces[0])),)
        return (self._operand(pieces[0]), Symbol(self._label(pieces[1])))

    def _parse_call(self, instruction: Instruction, rest: str) -> None:
        match = _CALL.match(rest.strip())
        if match is None:
            raise Refused(instruction.text)
        instruction.operands = (self._operand(match["target"]),)
        instruction.results = tuple(self._variable(name) for name in _split(match["results"] or ""))
        instruction.arguments = tuple(self._variable(name) for name in _split(match["arguments"] or ""))

    def _variable(self, name: str) -> str:
        found = self._find(name)
        if not isinstance(found, str):
            raise Refused(f"a call with {name}, which is no parameter")
        return found

    def _operand(self, text: str) -> Operand:
        operand = self._operands.get(text)
        if operand is None:
            operand = self._operands[text] = self._parse_operand(text)
        return operand

    def _parse_operand(self, text: str) -> Operand:
        text = text.strip()
        if text.startswith("["):
            inner = text[1:].partition("]")[0].strip()
            if "," in inner or "{" in inner:
                raise Refused(f"the address {text}")
            return self._address(inner)
        if text.startswith("{"):
            return Vector(tuple(self._operand(piece) for piece in _split(text[1:-1])))
        if text.startswith("!"):
            return Negated(self._register(text[1:].strip()))
        if "|" in text:
            first, _, second = text.partition("|")
            return Pair(self._operand(first.strip()), self._operand(second.strip()))
        if text == "_":
            return Sink()
        return parse_constant(text) or self._name(text)

    def _name(self, text: str) -> Operand:
        if match := _SUM.match(text):
            name, sign, offset = match.groups()
            base = self._name(name)
            if isinstance(base, Symbol):
                return Symbol(base.name, base.offset + int(offset, 0) * (-1 if sign == "-" else 1))
            raise Refused(f"the operand {text}")
        found = self._find(text)
        if isinstance(found, Register):
            return found
        if found is not None:
            return Symbol(found)
        if text == "WARP_SZ":
            return Immediate(32)
        if _REGISTER_NAME.match(text):
            return Special(text)
        if re.fullmatch(_NAME, text):
            return Symbol(text)
        raise Refused(f"the operand {text}")

    def _address(self, text: str) -> Address:
        constant = parse_constant(text)
        if constant is not None:
            return Address(constant, 0)
        match = re.match(rf"({_NAME})\s*(?:([+-])\s*(-?\w+))?$", text)
        if match is None:
            raise Refused(f"the address [{text}]")
        name, sign, offset = match.groups()
        number = int(offset, 0) * (-1 if sign == "-" else 1) if offset else 0
        base = self._name(name)
        if isinstance(base, Symbol):
            return Address(Symbol(base.name), base.offset + number)
        return Address(base, number)


def parse_constant(text: str) -> Immediate | None:
    """Return the value of a constant; None for other operands."""
    if _INTEGER.match(text):
        digits = text.rstrip("U")
        is_octal = re.fullmatch(r"-?0[0-7]+", digits) is not None
        return Immediate(int(digits, 8 if is_octal else 0))
    if match := _FLOAT_BITS.match(text):
        return Immediate(int(match[2], 16), 32 if match[1] in "fF" else 64)
    if _DECIMAL.match(text):
        return Immediate(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)
    return None
