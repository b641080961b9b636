"""The kernels of the tests, spelled in other ways that ptxas takes, mean the same."""

from __future__ import annotations

import itertools
import random
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from accelerator.simulation._ptx.errors import Refused
from accelerator.simulation._ptx.generator import generate
from accelerator.simulation._ptx.opcodes import OPERATIONS, find
from accelerator.simulation._ptx.program import Program
from tests.ptx.cases import Case, kernel_text
from tests.ptx.test_opcodes import all_cases, numbered_batches
from tests.support.simulation import linux_only

pytestmark = [linux_only, pytest.mark.torch_free, pytest.mark.xdist_group("ptx")]

needs_ptxas = pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs ptxas of the CUDA toolkit")

TOKEN = re.compile(
    r"""(?P<line>^\.(?:version|target|address_size)[^\n]*\n)
      | (?P<modifier>\.[A-Za-z]\w*(?:::\w+)*)
      | (?P<name>%?[A-Za-z_$][\w$]*(?:\.[xyzw]\b)?)
      | (?P<float>0[fFdD][0-9a-fA-F]+|\d+\.\d*|\.\d+)
      | (?P<number>\d\w*)
      | (?P<other>\S)""",
    re.VERBOSE | re.MULTILINE,
)
FILLERS = ("", " ", "\n", "\t ", ' /* ; } { " */ ', ' // ; } { "\n')
REPORTS = re.compile(
    r"static const struct access accesses.*|(?<=[\dt]), \d+(?=\))|(?<=, 0), \d+(?=, (?:&|NULL))|\.access_count = \d+"
)


def respelled(text: str, generator: random.Random) -> str:
    """Write a kernel with other blanks, comments and numbers."""
    pieces: list[str] = []
    before, is_size = "", False
    for token in TOKEN.finditer(text):
        kind, word = token.lastgroup, token[0]
        filler = generator.choice(FILLERS)
        if kind == "line" or before.endswith("\n") or (kind == "modifier" and before[:1].isalpha()) or word == ".popc":
            filler = ""  # ptxas wants some opcodes in one piece
        elif before[-1:] + word[0] in ("//", "/*") or (re.match(r"[\w$]", before[-1:]) and re.match(r"[\w$.]", word[0])):
            filler = filler or " "
        # The sizes of arrays, the numbers of registers and alignments are literals.
        is_size = (word == "[" and re.match(r"[\w$]", before[-1:]) is not None) or word == "<" or (is_size and word not in "]>")
        if kind == "number" and word.isdigit():
            word = _number(int(word), generator, is_literal=is_size or before == ".align")
        pieces += [filler, word]
        before = word
    return "".join(pieces)


def _number(value: int, generator: random.Random, *, is_literal: bool) -> str:
    spellings = [str(value), f"{value:#x}", f"{value:#b}", f"0{value:o}" if value else "0", f"0X{value:X}"]
    if not is_literal:
        spellings += [f"({value}+0)", f"({value + 3} - 3)", f"({value}*1)"]
    return generator.choice(spellings)


def translated(text: str, name: str = "cases") -> str:
    """Return the C of a kernel, without the texts of instructions for reports."""
    return REPORTS.sub("", generate(Program([text]), name))


def _code(cubin: bytes) -> list[bytes]:
    """Return the machine code and constants in an ELF file: its sections but for names and notes."""
    (start,), (size, count, names) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, start + number * size) for number in range(count)]

    def name(header: tuple[int, ...]) -> bytes:
        at = headers[names][4] + header[0]
        return cubin[at : cubin.index(b"\0", at)]

    kept = [header for header in headers if name(header).startswith((b".text", b".nv.constant"))]
    return [cubin[header[4] : header[4] + header[5]] for header in kept]


def assembled(text: str, folder: Path, target: str = "sm_90") -> list[bytes] | None:
    """Return the machine code that ptxas makes of a text; None if it refuses it."""
    output = folder / "spelled.cubin"
    command = [str(shutil.which("ptxas")), f"-arch={target}", "-o", str(output), "-"]
    done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    return _code(output.read_bytes()) if done.returncode == 0 else None


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_blanks_comments_and_numbers(seed: int) -> None:
    generator = random.Random(seed)
    for batch in numbered_batches()[seed::20]:
        text = kernel_text(batch)
        assert translated(respelled(text, generator)) == translated(text)


@pytest.mark.slow
@pytest.mark.exhaustive
@needs_ptxas
@pytest.mark.parametrize("part", range(4))
def test_that_ptxas_takes_these_spellings(part: int, tmp_path: Path) -> None:
    """It makes the same machine code of both spellings, and the translator the same C."""
    generator = random.Random(part)
    wrong: list[str] = []
    for number, batch in list(enumerate(numbered_batches()))[part::4]:
        target = "sm_90" if batch[0].target == "sm_60" else batch[0].target
        text = kernel_text(batch)
        other = respelled(text, generator)
        if assembled(text, tmp_path, target) != assembled(other, tmp_path, target):
            wrong.append(f"ptxas makes another kernel of batch {number}")
        if translated(text) != translated(other):
            wrong.append(f"the translator makes another kernel of batch {number}")
    assert wrong == []


def orders(variant: str, generator: random.Random, count: int) -> list[str]:
    """Return so many other orders of a variant's modifiers."""
    name, *words = variant.split(".")
    if len(words) < 2:
        return []
    shuffled = (tuple(generator.sample(words, len(words))) for _ in range(100))
    every = itertools.permutations(words) if len(words) < 6 else shuffled
    found = [".".join((name, *each)) for each in every if list(each) != words]
    return generator.sample(found, min(count, len(found)))


def reordered(case: Case, spelled: str) -> Case | None:
    if case.variant not in case.statement:
        return None
    return Case(**{**case.__dict__, "statement": case.statement.replace(case.variant, spelled)})


@pytest.mark.slow
@pytest.mark.exhaustive
@needs_ptxas
@pytest.mark.parametrize("part", range(8))
def test_that_orders_of_modifiers_mean_what_ptxas_takes_them_for(part: int, tmp_path: Path) -> None:
    """An order that ptxas compiles to the code of the usual one is the same variant here. One case in eleven is tried."""
    generator = random.Random(f"orders {part}")
    wrong, tried, taken = list[str](), 0, 0
    for case in sorted(all_cases(), key=lambda case: case.variant)[11 * part :: 88]:
        target = "sm_90" if case.target == "sm_60" else case.target
        usual = assembled(kernel_text([case]), tmp_path, target)
        for spelled in orders(case.variant, generator, 2):
            other = reordered(case, spelled)
            if usual is None or other is None:
                continue
            tried += 1
            code = assembled(kernel_text([other]), tmp_path, target)
            taken += code is not None
            try:
                is_same = find(spelled) is find(case.variant)
            except Refused:
                is_same = False
            if (code == usual and not is_same and has_same_types(spelled, case.variant)) or (
                code is not None and code != usual and is_same
            ):
                wrong.append(f"{spelled}: {'refused' if code == usual else 'taken'}")
    print(f"{tried} orders tried, ptxas takes {taken}, differences {len(wrong)}")
    assert wrong == []


def test_orders_of_modifiers() -> None:
    """All but the order of types and of layouts means the same; a sample of the variants."""
    generator = random.Random("orders")
    for variant in generator.sample(sorted(OPERATIONS), 300):
        for spelled in orders(variant, generator, 4):
            if has_same_types(spelled, variant):
                assert find(spelled).variant == variant or variant.startswith("createpolicy")


def has_same_types(spelled: str, variant: str) -> bool:
    """Return whether the types, and the layouts of matrices, are in the same order."""
    patterns = (r"(?:[busf]|bf|tf)\d+(?:x\d)?|e\dm\d(?:x\d)?|pred", "row|col")
    return all(
        [word for word in spelled.split(".") if re.fullmatch(pattern, word)]
        == [word for word in variant.split(".") if re.fullmatch(pattern, word)]
        for pattern in patterns
    )
