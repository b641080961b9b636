"""Modules are linked as nvlink links them: which definition a name means, and what is refused."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from accelerator.simulation._ptx.errors import Refused
from accelerator.simulation._ptx.program import Program
from accelerator.simulation._ptx.variables import generate_variables
from tests.ptx.harness import Kernel
from tests.ptx.programs import HEAD, entry
from tests.support.simulation import linux_only

pytestmark = [linux_only, pytest.mark.torch_free, pytest.mark.xdist_group("ptx")]

# A declaration: its linkage, and how many elements it has.
Declaration = tuple[str, int]
DECLARATIONS: tuple[Declaration, ...] = (
    *(("", 8), ("visible", 8), ("weak", 8), ("weak", 4), ("extern", 8), ("extern", 4), ("extern", 0)),
    *(("common", 4), ("common", 8), ("common", 16)),
)
SPACES = ("global", "const", "shared")
OWN, REFUSED = -1, -2


def allowed(space: str) -> list[Declaration]:
    """Common variables are global, and constant memory of unknown size is not declared."""
    return [each for each in DECLARATIONS if (each[0] != "common" or space == "global") and (each[1] or space != "const")]


def meanings(space: str, declarations: Sequence[Declaration]) -> list[int]:
    """Return the number of the module whose variable each module means: OWN for one that others do not see.

    All are REFUSED if nvlink refuses the program or gives the variable no address.
    """
    refused = [REFUSED] * len(declarations)
    others = [(number, *each) for number, each in enumerate(declarations) if each[0]]
    defined = [each for each in others if each[1] != "extern"]
    if [each[1] for each in defined].count("visible") > 1:
        return refused
    dynamic = [each for each in others if space == "shared" and each[1:] == ("extern", 0)]
    if not defined:
        is_right = len(dynamic) == len(others)
        return [OWN] * len(declarations) if is_right else refused
    if dynamic:
        return refused
    owner, linkage, size = max(
        defined, key=lambda each: (("common", "weak", "visible").index(each[1]), each[2] * (each[1] == "common"), -each[0])
    )
    for _, other, length in others:
        is_right = length in (0, size) or (other == "common" and length < size)
        if not is_right:
            return refused
    assert linkage != "extern"
    return [owner if each[0] else OWN for each in declarations]


def module_text(space: str, declaration: Declaration, number: int) -> str:
    linkage, size = declaration
    kind = f".{linkage} " if linkage else ""
    value = f" = {{{number + 1}}}" if space != "shared" and linkage not in ("extern", "common") else ""
    return f"""{HEAD}
{kind}.{space} .align 4 .b32 g[{size or ""}]{value};
.visible .entry k{number}(.param .u64 out) {{
    .reg .b64 %p; .reg .b32 %x;
    ld.param.u64 %p, [out]; ld.{space}.u32 %x, [g]; st.global.u32 [%p], %x; ret;
}}
"""


def found_meanings(space: str, declarations: Sequence[Declaration]) -> list[int]:
    try:
        program = Program([module_text(space, each, number) for number, each in enumerate(declarations)])
    except Refused:
        return [REFUSED] * len(declarations)
    result: list[int] = []
    for number, module in enumerate(program.modules):
        found = program.find_variable(number, "g")
        if found is None:
            return [REFUSED] * len(declarations)
        is_own = found == (number, module.variables["g"]) and not (found[1].linkage and found[1].linkage != "extern")
        result.append(OWN if is_own else found[0])
    return result


def combinations(space: str, count: int) -> list[tuple[Declaration, ...]]:
    return list(itertools.product(allowed(space), repeat=count))


@pytest.mark.parametrize("space", SPACES)
def test_each_linkage_of_two_modules(space: str) -> None:
    wrong = [
        (each, found_meanings(space, each), meanings(space, each))
        for each in combinations(space, 2)
        if found_meanings(space, each) != meanings(space, each)
    ]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("space", SPACES)
def test_each_linkage_of_three_modules(space: str) -> None:
    wrong = [each for each in combinations(space, 3) if found_meanings(space, each) != meanings(space, each)]
    assert wrong == []


def nvlink_accepts(texts: Sequence[str], folder: Path) -> bool:
    """Ask nvlink. Raises: CalledProcessError: A module is no PTX."""
    objects: list[str] = []
    for number, text in enumerate(texts):
        objects.append(str(folder / f"{number}.cubin"))
        command = [str(shutil.which("ptxas")), "-arch=sm_90", "-c", "-o", objects[-1], "-"]
        subprocess.run(command, input=text, text=True, check=True, capture_output=True)
    command = [str(shutil.which("nvlink")), "-arch=sm_90", "-o", str(folder / "linked.cubin"), *objects]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.exhaustive  # a check of this file's model, not of the package
@pytest.mark.skipif(shutil.which("nvlink") is None, reason="needs nvlink of the CUDA toolkit")
@pytest.mark.parametrize("space", SPACES)
def test_that_nvlink_agrees(space: str, tmp_path: Path) -> None:
    """Its answer may depend on the order of the modules, so that some programs are right in one order of them.

    It accepts dynamic shared memory that another module defines, too, but gives it no address.
    """
    wrong: list[object] = []
    for declarations in combinations(space, 2) + combinations(space, 3)[::9]:
        is_dynamic = space == "shared" and ("extern", 0) in declarations
        if is_dynamic and any(each[0] in ("visible", "weak") for each in declarations):
            continue
        texts = [module_text(space, each, number) for number, each in enumerate(declarations)]
        answers = {nvlink_accepts(ordered, tmp_path) for ordered in itertools.permutations(texts)}
        if (REFUSED not in meanings(space, declarations)) not in answers:
            wrong.append(declarations)
    assert wrong == []


NUMBER = "{kind} .func (.param .b32 result) number(){body}\n"
CALL = "{{ .param .b32 got; call (got), {name}; ld.param.b32 %x, [got]; }}"


def function_text(linkage: str, index: int) -> str:
    """Define or declare number(), which returns index + 1, and define number<index>(), which calls it."""
    body = ";" if linkage == "extern" else f" {{ st.param.b32 [result], {index + 1}; ret; }}"
    call = f"{{ .reg .b32 %x; {CALL.format(name='number')} st.param.b32 [result], %x; ret; }}"
    number = NUMBER.format(kind=f".{linkage}" if linkage else "", body=body)
    return f"{HEAD}{number}.visible .func (.param .b32 result) number{index}() {call}"


@pytest.mark.parametrize(
    ("linkages", "expected"),
    [
        (("visible", "extern", "extern"), (1, 1, 1)),
        (("extern", "weak", "weak"), (2, 2, 2)),
        (("weak", "visible", "weak"), (2, 2, 2)),
        (("weak", "", "weak"), (1, 2, 1)),
        (("", "", ""), (1, 2, 3)),
        (("visible", "visible", ""), None),
    ],
)
def test_functions_of_several_modules(linkages: Sequence[str], expected: Sequence[int] | None) -> None:
    texts = [function_text(linkage, index) for index, linkage in enumerate(linkages)]
    calls = " ".join(
        f"{CALL.format(name=f'number{index}')} st.global.u32 [%outputs+{4 * index}], %x;" for index in range(len(linkages))
    )
    declared = "".join(f".extern .func (.param .b32 result) number{index}();\n" for index in range(3))
    texts.append(HEAD + declared + entry(calls))
    if expected is None:
        with pytest.raises(Refused, match="a second definition of number"):
            Program(texts)
        return
    outputs = np.zeros(4, np.uint32)
    Kernel(texts, "main").run(1, 1, np.zeros(4, np.uint32), outputs)
    assert tuple(outputs[:3]) == tuple(expected)


# As nvcc writes a template's static buffer, and an inline variable, into each module that uses them.
SHARED = """
{declaration}
.visible .func (.param .b32 result) add(.param .b32 addend) {{
    .reg .b32 %a, %b; ld.param.b32 %a, [addend]; ld.shared.u32 %b, [g];
    add.u32 %a, %a, %b; st.shared.u32 [g], %a; st.param.b32 [result], %b; ret;
}}
"""
ADDS = """
    st.shared.u32 [g], 41; { .param .b32 given; .param .b32 got; st.param.b32 [given], 1; call (got), add, (given);
    ld.param.b32 %x, [got]; } ld.shared.u32 %y, [g]; st.global.u32 [%outputs], %x; st.global.u32 [%outputs+4], %y;
"""
PROTOTYPE = ".extern .func (.param .b32 result) add(.param .b32 addend);\n"


@pytest.mark.parametrize("pair", [("visible", "extern"), ("extern", "visible"), ("weak", "weak"), ("weak", "extern")])
def test_shared_memory_of_two_modules_is_one(pair: Sequence[str]) -> None:
    first, second = (f".{linkage} .shared .align 4 .b8 g[32];\n.shared .b32 own_{linkage}[8];" for linkage in pair)
    outputs = np.zeros(4, np.uint32)
    texts = [HEAD + first + PROTOTYPE + entry(ADDS), HEAD + SHARED.format(declaration=second)]
    for ordered in (texts, texts[::-1]):
        Kernel(ordered, "main").run(1, 1, np.zeros(4, np.uint32), outputs)
        assert outputs[:2].tolist() == [41, 42]


def test_a_weak_variable_is_in_the_programs_table_once_and_pointers_mean_it() -> None:
    weak = HEAD + ".weak .global .align 4 .u32 counter = {};\n"
    texts = [weak.format(3), weak.format(4) + ".visible .global .align 8 .u64 pointer = generic(counter);\n"]
    table = generate_variables(Program(texts))
    rows = table.partition("accelerator_variables[]")[2]
    assert rows.count('"counter"') == 1
    assert "{3}" in table
    assert "{4}" not in table


def test_a_function_has_one_address() -> None:
    weak = ".weak .func (.param .b32 result) number() { st.param.b32 [result], 7; ret; }\n"
    texts = [
        HEAD
        + weak
        + ".extern .global .align 8 .u64 pointer;\n"
        + entry("""
            mov.u64 %in, number; ld.global.u64 %out, [pointer]; setp.eq.u64 %p, %in, %out;
            selp.u32 %x, 1, 0, %p; st.global.u32 [%outputs], %x;
        """),
        HEAD + weak + ".visible .global .align 8 .u64 pointer = number;\n",
    ]
    program = Program(texts)
    assert program.find_function(0, "number") == program.find_function(1, "number") == (0, "number")
    value = np.array([program.function_number(0, "number")], np.uint64)
    assert f"{{{value[0]}}}" in generate_variables(program)
    outputs = np.zeros(4, np.uint32)
    Kernel(texts, "main").run(1, 1, np.zeros(4, np.uint32), outputs, variables=[value])
    assert outputs[0] == 1
