"""Parses PTX: the functions and variables of a module, without comments.

Modules of libraries have thousands of functions, and a launch needs one: a module's text is searched for functions and
variables, and a function's body is parsed when somebody asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from .constants import parse_constant
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

_NAME = r"[A-Za-z_$%][\w$]*"
_STRING = r'"(?:[^"\\\n]|\\.)*"'
_LINKAGE = r"(?:\.(?:visible|weak|extern|common)\b\s*)?"
_COMMENT = re.compile(rf"{_STRING}|//[^\n]*|/\*.*?\*/", re.DOTALL)
_BRACE = re.compile(rf"{_STRING}|[{{}}]")
_VARIABLE = re.compile(r"\s*(\.(?:visible|weak|extern|common)\b)?\s*\.(global|const|shared|local|param|reg)\b(.*)", re.DOTALL)
_PROPERTY = re.compile(
    r"""\s*(?:
        (?P<attribute>\.attribute\s*\([^()]*(?:\([^()]*\))?\s*\))
      | \.ptr\b(?P<pointer>(?:\s*\.(?:global|shared|const|local|generic)\b)?(?:\s*\.align\s+\d+)?)
      | \.align\s+(?P<alignment>\w+)
      | \.v(?P<vector>[248])\b
      | \.(?P<type>\w+)
    )""",
    re.VERBOSE,
)
_DECLARED = re.compile(rf"\s*({_NAME})\s*(?:<\s*(\w+)\s*>)?\s*((?:\[\s*\w*\s*\]\s*)*)")

# What a module consists of. The text of a function begins where the match ends.
_PART = re.compile(
    rf"""\s*(?:
        (?P<end>\Z)
      | ;
      | \.version\s+\d+\.\d+
      | \.target\s+(?P<target>sm_(?P<architecture>\d+)\w*)(?:\s*,\s*\w+)*
      | \.address_size\s+(?P<address_size>\d+)
      | \.file\s+(?P<file>\d+)\s+(?P<path>{_STRING})(?:\s*,\s*\w+\s*,\s*\w+)?
      | \.section\s+[\w.$]+\s*\{{[^{{}}]*\}}
      | \.pragma\s+{_STRING}(?:\s*,\s*{_STRING})*\s*;
      | \.alias\s+(?P<alias>{_NAME})\s*,\s*(?P<aliased>{_NAME})\s*;
      | (?P<header>(?P<linkage>{_LINKAGE})\.(?P<kind>entry|func)\b(?:{_STRING}\s*;|[^{{;"])*)(?P<begin>[{{;])
      | (?P<variable>{_LINKAGE}\.(?:global|const|shared)\b[^;]*);
    )""",
    re.VERBOSE,
)
_DIRECTIVES = (  # of functions; most change nothing here
    "maxntid|reqntid|reqnctapercluster|explicitcluster|blocksareclusters|maxclusterrank|maxnreg|minnctapersm|maxnctapersm"
    "|noreturn|abi_preserve|abi_preserve_control"
)
_HEADER = re.compile(
    rf"""{_LINKAGE}\.(?P<kind>entry|func)\s*(?:\.attribute\s*\(.*?\)\s*\)\s*)?
    (?:\((?P<results>[^()]*)\)\s*)?(?P<name>{_NAME})\s*(?:\((?P<parameters>(?:[^()]|\([^()]*\))*)\))?
    (?P<directives>(?:\s*(?:\.(?:{_DIRECTIVES})\b(?:\s+\d+(?:\s*,\s*\d+)*)?|\.pragma\s+{_STRING}\s*;))*)\s*""",
    re.VERBOSE | re.DOTALL,
)
_DIRECTIVE = re.compile(r'\.(\w+)\s*((?:\d[\d,\s]*)?|"[^;]*;)')

# The statements of a body. A brace that opens a scope begins a statement; those of vectors are inside one.
_STATEMENT = re.compile(
    rf"""\s*(?:
        \.loc\s+(?P<file>\d+)\s+(?P<line>\d+)\s+\d+
        (?:\s*,\s*function_name\s+{_NAME}(?:\s*\+\s*\d+)?\s*,\s*inlined_at\s+\d+\s+\d+\s+\d+)?
      | \.pragma\s+{_STRING}(?:\s*,\s*{_STRING})*\s*;
      | (?P<label>{_NAME})\s*:
      | (?P<open>\{{)
      | (?P<close>\}})
      | (?P<text>[^;{{}}"]*(?:\{{[^;{{}}"]*\}}[^;{{}}"]*)*);
    )""",
    re.VERBOSE,
)
_INSTRUCTION = re.compile(rf"(?:@\s*(!?)\s*({_NAME})\s+)?([a-z]\w*(?:\s*\.[\w:]+)*)\s*(.*)", re.DOTALL)
_CALL = re.compile(
    rf"(?:\(\s*(?P<results>[\w$%,\s]*)\)\s*,\s*)?(?P<target>{_NAME})\s*(?:,\s*\((?P<arguments>[^)]*)\))?\s*(?:,\s*(?P<prototype>{_NAME}))?\s*"
)
_DECLARATION = re.compile(r"\.(?:visible|extern|weak|common|reg|local|shared|param|global|const)\b")
_TARGETS = re.compile(rf"\.calltargets\s+{_NAME}(?:\s*,\s*{_NAME})*")
_PROTOTYPE = re.compile(rf"\.callprototype\s*(?:\(([^()]*)\)\s*)?{_NAME}\s*(?:\(([^()]*)\))?(?:\s*\.noreturn)?")
_SUM = re.compile(rf"({_NAME}(?:\.[xyzwrgba])?)\s*(?:([+-])\s*(.+))?", re.DOTALL)
_ELEMENT = re.compile(rf"({_NAME})\s*\[(.+)\]", re.DOTALL)
_PAIR = re.compile(rf"({_NAME})\s*\|\s*({_NAME})")
_REGISTER_NAME = re.compile(r"%\w+(?:\.\w+)?")
_COMPONENTS = {name: index for names in ("xyzw", "rgba") for index, name in enumerate(names)}


def identifier(name: str) -> str:
    """Return a C identifier for a PTX name."""
    return re.sub(r"\W", lambda match: f"_{ord(match[0]):x}_", name.removeprefix("%"))


class _Part(NamedTuple):
    """A function that has not been parsed: its header and its body's place in the text."""

    header: str
    start: int
    end: int
    linkage: str


class Module:
    """A PTX module.

    Attributes:
        architecture: 80 for ``.target sm_80``.
        target: ``sm_80``.
        variables: The module's variables, by name.
        entries: Names of the kernels.
    """

    def __init__(self, text: str) -> None:
        self._text = _COMMENT.sub(lambda match: match[0] if match[0][0] == '"' else " ", text)
        self._parts: dict[str, _Part] = {}
        self._functions: dict[str, Function] = {}
        self.target = ""
        self.architecture = 0
        self.files: dict[int, str] = {}
        self.entries: list[str] = []
        self.aliases: dict[str, str] = {}
        self.variables: dict[str, Variable] = {}
        self._read()

    def _read(self) -> None:
        """Find the functions and variables. Each character belongs to a part that is understood."""
        at = 0
        while (part := _match(_PART, self._text, at))["end"] is None:
            at = part.end()
            if part["target"]:
                self.target, self.architecture = part["target"], int(part["architecture"])
            elif part["address_size"] not in (None, "64"):
                raise Refused(f"addresses of {part['address_size']} bits")
            elif part["file"]:
                self.files[int(part["file"])] = part["path"][1:-1]
            elif part["alias"]:
                self.aliases[part["alias"]] = part["aliased"]
            elif part["variable"]:
                self._declare(part["variable"])
            elif part["begin"] == "{":
                at = self._add_function(part)
            elif part["header"]:
                _parse_header(part["header"])

    def _declare(self, text: str) -> None:
        for variable in parse_variables(text):
            known = self.variables.get(variable.name)
            if known is None or known.is_external:
                self.variables[variable.name] = variable
            elif not variable.is_external:
                raise Refused(f"a second variable {variable.name}")

    def _add_function(self, part: re.Match[str]) -> int:
        """Record a function, and return where its body ends."""
        name = _match_header(part["header"])["name"]
        if name in self._parts:
            raise Refused(f"a second function {name}")
        depth = 1
        for brace in _BRACE.finditer(self._text, part.end()):
            depth += {"{": 1, "}": -1}.get(brace[0], 0)
            if depth == 0:
                self._parts[name] = _Part(part["header"], part.end(), brace.start(), part["linkage"].strip(" \t\r\n."))
                if part["kind"] == "entry":
                    self.entries.append(name)
                return brace.end()
        raise Refused(f"the function {name}, which has no end")

    @property
    def function_names(self) -> list[str]:
        """The names of the functions that the module defines, in the order of the text."""
        return list(self._parts)

    def linkage(self, name: str) -> str:
        """Return how other modules see a function: "", "visible" or "weak"."""
        return self._parts[name].linkage

    def body_text(self, name: str) -> str:
        part = self._parts[name]
        return self._text[part.start : part.end]

    def function(self, name: str) -> Function:
        """Parse a function."""
        if name not in self._functions:
            function = _parse_header(self._parts[name].header)
            _Body(function, self).parse(self.body_text(name))
            self._functions[name] = function
        return self._functions[name]


def _match(pattern: re.Pattern[str], text: str, at: int) -> re.Match[str]:
    """Match what is at a place of a text, or refuse it."""
    match = pattern.match(text, at)
    if match is None:
        raise Refused(" ".join(text[at:].split())[:60])
    return match


def _match_header(header: str) -> re.Match[str]:
    match = _HEADER.fullmatch(header)
    if match is None:
        raise Refused(f"a function's header: {' '.join(header.split())}")
    return match


def _parse_header(header: str) -> Function:
    match = _match_header(header)
    lists = (_parse_list(match["parameters"] or ""), _parse_list(match["results"] or ""))
    function = Function(match["name"], match["kind"] == "entry", *lists)
    for directive, values in _DIRECTIVE.findall(match["directives"]):
        numbers = tuple(int(value) for value in values.replace(",", " ").split()) if directive != "pragma" else ()
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
    if "" in parts:
        raise Refused(f"nothing before or after a comma in {' '.join(text.split())}")
    return parts


def parse_variables(statement: str) -> list[Variable]:
    """Parse a declaration."""
    match = _VARIABLE.fullmatch(statement)
    if match is None:
        raise Refused(f"a declaration: {statement}")
    linkage, space, rest = match.groups()
    properties: dict[str, str] = {}
    at = 0
    while found := _PROPERTY.match(rest, at):
        at = found.end()
        if (name := str(found.lastgroup)) in properties:
            raise Refused(f"a declaration: {statement}")
        properties[name] = found[name] or ""
    type_name = properties.get("type", "")
    if type_name and not is_type(type_name):
        raise Refused(f"a variable of the type {type_name}")
    if not type_name or not (names := _split(rest[at:])):
        raise Refused(f"a declaration: {statement}")
    vector, alignment = int(properties.get("vector", 1)), _size(properties.get("alignment", "0"))
    variables = [variable for name in names for variable in _declared(name, space, type_name, vector, alignment)]
    for variable in variables:
        variable.is_managed = "managed" in properties.get("attribute", "")
        variable.linkage = (linkage or "").removeprefix(".")
    return variables


def _size(text: str) -> int:
    constant = parse_constant(text)
    if constant is None or constant.bits or constant.value < 0:
        raise Refused(f"the size {text}")
    return constant.value


def _declared(piece: str, space: str, type_name: str, vector: int, alignment: int) -> list[Variable]:
    name, equals, initializer = piece.partition("=")
    initializer = initializer.strip()
    match = _DECLARED.fullmatch(name)
    if match is None or (equals and not initializer) or (equals and space not in ("global", "const")):
        raise Refused(f"a declaration: {' '.join(piece.split())[:60]}")
    name, count, dimensions = match.groups()
    type = TYPES[type_name]
    names = [name] if count is None else [f"{name}{number}" for number in range(_size(count))]
    elements = vector
    for dimension in re.findall(r"\[\s*(\w*)\s*\]", dimensions):
        elements *= _size(dimension or "0")
    if equals and dimensions and not elements:  # the initial values say how many there are
        elements = len(_split(initializer.strip("{}"))) * vector
    return [Variable(each, space, type, elements, alignment or type.bytes * vector, initializer, vector) for each in names]


def _scoped(name: str, scope: int) -> str:
    """Return the name in a function of what one of its scopes declares. Names of PTX have no point."""
    return f"{name}.{scope}" if scope else name


class _Body:
    """Parses a function's body. Scopes may declare a name again, so registers, variables and labels get unique names."""

    def __init__(self, function: Function, module: Module) -> None:
        self._function = function
        self._module = module
        self._scopes: list[dict[str, Register | Vector | str]] = [{}]
        self._scope_numbers = [0]
        self._scope_count = 0
        self._labels: list[dict[str, str]] = [{}]
        self._operands: dict[str, Operand] = {}
        for variable in (*function.parameters, *function.results):
            if variable.space == "reg":
                raise Refused("parameters in registers")
            self._scopes[0][variable.name] = variable.name

    def parse(self, text: str) -> None:
        statements = list(_statements(text))
        self._find_labels(statements)
        body = self._function.body
        self._scope_count = 0
        file, line = "", 0
        last_label = ""
        for match in statements:
            kind = match.lastgroup
            if kind == "line":
                file, line = self._module.files.get(int(match["file"]), ""), int(match["line"])
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

    def _find_labels(self, statements: list[re.Match[str]]) -> None:
        """Name the labels of each scope, because branches go forward too."""
        numbers = [0]
        for match in statements:
            kind = match.lastgroup
            if kind == "open":
                self._scope_count += 1
                numbers.append(self._scope_count)
                self._labels.append({})
            elif kind == "close":
                numbers.pop()
            elif kind == "label":
                labels, name = self._labels[numbers[-1]], match["label"]
                if name in labels:
                    raise Refused(f"a second label {name}")
                labels[name] = f"L_{identifier(_scoped(name, numbers[-1]))}"

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
        if not text:
            raise Refused("a statement without an instruction")
        if _TARGETS.fullmatch(text):
            return None
        if match := _PROTOTYPE.fullmatch(text):
            for variables in match.groups(""):
                _parse_list(variables)
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
            name = variable.name
            if name in scope:
                raise Refused(f"a second {name}")
            unique = _scoped(name, number)
            if variable.space == "reg":
                unique = f"{'v' if name.startswith('%') else 'n'}_{identifier(unique)}"
                parts = tuple(Register(f"{unique}_{letter}", variable.type) for letter in "xyzw"[: variable.vector])
                scope[name] = Vector(parts) if variable.vector > 1 else Register(unique, variable.type)
                continue
            # In its function, a declared name hides that of the module.
            scope[name] = unique
            variable.name = unique
            self._function.variables[unique] = variable

    def _find(self, name: str) -> Register | Vector | str | None:
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        return None

    def _register(self, name: str) -> Register:
        found = self._name(name)
        if not isinstance(found, Register):
            raise Refused(f"{name}, which is no register")
        return found

    def _instruction(self, text: str) -> Instruction:
        match = _INSTRUCTION.fullmatch(text)
        if match is None:
            raise Refused(text)
        negation, guard, opcode, rest = match.groups()
        instruction = Instruction("".join(opcode.split()), (), " ".join(text.split()))
        if guard is not None:
            instruction.guard = self._register(guard)
            instruction.is_guard_negated = bool(negation)
            if instruction.guard.type is not PREDICATE:
                raise Refused(f"a guard that is no predicate: {text}")
        name = instruction.opcode.split(".", 1)[0]
        try:
            if name == "call":
                self._parse_call(instruction, rest)
            elif name in ("bra", "brx"):
                instruction.operands = self._branch_operands(name, rest)
            else:
                instruction.operands = tuple(self._operand_of(name, piece) for piece in _split(rest))
        except Refused as error:
            raise Refused(f"{error} of {instruction.text}") from error
        return instruction

    def _operand_of(self, name: str, text: str) -> Operand:
        """Parse an operand; ``array[2]`` is the address of an element for mov, and the element for others."""
        match = _ELEMENT.fullmatch(text)
        if match is None:
            return self._operand(text)
        found = self._find(match[1])
        variable = self._function.variables.get(found) if isinstance(found, str) else self._module.variables.get(match[1])
        number = parse_constant(match[2])
        if variable is None or number is None or number.bits:
            raise Refused(f"the address {text}")
        offset = number.value * variable.type.bytes
        return Symbol(variable.name, offset) if name == "mov" else Address(Symbol(variable.name), offset)

    def _branch_operands(self, name: str, rest: str) -> tuple[Operand, ...]:
        pieces = _split(rest)
        if len(pieces) != (1 if name == "bra" else 2):
            raise Refused("the operands")
        if name == "bra":
            return (Symbol(self._label(pieces[0])),)
        return (self._operand(pieces[0]), Symbol(self._label(pieces[1])))

    def _parse_call(self, instruction: Instruction, rest: str) -> None:
        match = _CALL.fullmatch(rest.strip())
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
        if text.startswith("["):
            inside, bracket, rest = text[1:].partition("]")
            if not bracket or rest.strip() not in ("", ".unified"):
                raise Refused(f"the address {text}")
            return self._address(inside.strip())
        if text.startswith("{") and text.endswith("}"):
            return Vector(tuple(self._operand(piece) for piece in _split(text[1:-1])))
        if text == "_":
            return Sink()
        if (constant := parse_constant(text)) is not None:
            return constant
        if text.startswith("!"):
            return Negated(self._register(text[1:].strip()))
        if match := _PAIR.fullmatch(text):
            return Pair(self._operand(match[1]), self._operand(match[2]))
        return self._name(text)

    def _name(self, text: str) -> Operand:
        match = _SUM.fullmatch(text)
        if match is None:
            raise Refused(f"the operand {text}")
        name, sign, addend = match.groups()
        if sign:
            base, number = self._name(name), parse_constant(addend)
            if isinstance(base, Symbol) and number is not None and not number.bits:
                return Symbol(base.name, base.offset + number.value * (-1 if sign == "-" else 1))
            raise Refused(f"the operand {text}")
        found = self._find(name)
        if isinstance(found, str):
            return Symbol(found)
        if found is not None:
            return found
        head, point, component = name.partition(".")
        if point and isinstance(whole := self._find(head), Vector):
            index = _COMPONENTS[component]
            if index < len(whole.parts):
                return whole.parts[index]
        if _REGISTER_NAME.fullmatch(name):
            return Special(name)
        if not point:
            return Symbol(name)
        raise Refused(f"the operand {text}")

    def _address(self, text: str) -> Address:
        constant = parse_constant(text)
        if constant is not None:
            return Address(constant, 0)
        match = _SUM.fullmatch(text)
        if match is None:
            raise Refused(f"the address [{text}]")
        name, sign, offset = match.groups()
        number = parse_constant(offset) if sign else Immediate(0)
        base = self._name(name)
        if number is None or number.bits or not isinstance(base, Register | Symbol):
            raise Refused(f"the address [{text}]")
        return Address(base, number.value * (-1 if sign == "-" else 1))


def _statements(text: str) -> Iterator[re.Match[str]]:
    """Yield the statements of a body. Each character belongs to one."""
    at, end = 0, len(text.rstrip())
    while at < end:
        statement = _match(_STATEMENT, text, at)
        yield statement
        at = statement.end()
