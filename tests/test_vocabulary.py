"""The vocabulary: some words may appear in no text of the project, others in no identifier.

``python -m tests.test_vocabulary`` prints each occurrence; with ``--count`` it prints their number in each folder.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support import ROOT

pytestmark = pytest.mark.torch_free

THIS_FILE = Path(__file__).resolve()

# These may appear in no text, neither as words nor as parts of an identifier.
_WORDS = r"rooms?|houses?|front[\s_-]doors?|poison(?:s|ed|ing)?|veto(?:s|es|ed)?|anew"
_PHRASES = r"CPU(?: that)?\s+stands\s+in|nobody\s+can\s+tell|there\s+is\s+no\s+telling"
TEXT = re.compile(rf"(?i)(?<![a-z])(?:{_WORDS})(?![a-z])|\bfloors?\b|\b(?:{_PHRASES})\b")

# These may not be parts of an identifier.
PARTS = frozenset(
    """question look seen lasting answer ask trial forget surrounding blind maker stand
    room house poisoned veto anew""".split()
)
# These are too vague as identifiers. They may be parts of one, as in ``sign_bit``.
WHOLE = frozenset("action up kind number given found sign".split())
# Identifiers that other projects have chosen. The keys: the end of the path, or "" for all files, and the identifier.
FOREIGN = {
    ("", "action"): "argparse's keyword and the parameter of its add_argument",
    ("", "given"): "hypothesis.given",
    ("tests/runtime/test_types.py", "kind"): "inspect.Parameter.kind",
    ("_compile/triton_libdevice.py", "floor"): "the mathematical function",
}


class Occurrence(NamedTuple):
    path: str
    line: int
    text: str


def read_texts() -> Iterator[tuple[str, str]]:
    """Yield the path and the content of every text file of the project."""
    tops = (ROOT / name for name in ("accelerator", "docs", "tests", "README.md", "CONTRIBUTING.md", "pyproject.toml", ".ci"))
    for top in tops:
        for file in sorted(top.rglob("*")) if top.is_dir() else [top]:
            path = file.relative_to(ROOT).as_posix()
            if not file.is_file() or file == THIS_FILE or re.search(r"__pycache__|^docs/(_build|reference)/", path):
                continue
            try:
                yield path, file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def find_in_texts() -> list[Occurrence]:
    """Return the occurrences of words that may appear in no text."""
    return [
        Occurrence(path, text.count("\n", 0, match.start()) + 1, match[0])
        for path, text in read_texts()
        for match in TEXT.finditer(text)
        if not is_foreign(path, match[0])
    ]


def is_foreign(path: str, word: str) -> bool:
    """Return whether another project has chosen a word that a file uses."""
    return any(path.endswith(suffix) and word == foreign for suffix, foreign in FOREIGN)


def find_identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each name, attribute, parameter, function and class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname
        elif isinstance(node, (ast.MatchAs, ast.MatchStar, ast.ExceptHandler)) and node.name:
            yield node.lineno, node.name


def split(identifier: str) -> list[str]:
    """Return the words of an identifier, singular and in lower case: ``HTTPAnswers_of`` gives http, answer, of."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)
    return [re.sub(r"(?<=[^s])s$", "", word.lower()) for word in words]


def is_private(identifier: str) -> bool:
    """Return whether an identifier is a private word or contains one."""
    words = split(identifier)
    return not PARTS.isdisjoint(words) or (len(words) == 1 and words[0] in WHOLE)


def find_in_identifiers() -> list[Occurrence]:
    """Return the identifiers and names of modules that are or contain private words."""
    found: list[Occurrence] = []
    for path, text in read_texts():
        if not path.endswith((".py", ".pyi")):
            continue
        identifiers = [(0, Path(path).stem), *find_identifiers(ast.parse(text))]
        found += [Occurrence(path, line, name) for line, name in identifiers if is_private(name) and not is_foreign(path, name)]
    return found


def test_texts_use_no_private_word() -> None:
    assert find_in_texts() == []


def test_identifiers_are_no_private_words() -> None:
    assert find_in_identifiers() == []


@pytest.mark.parametrize(
    "text", ["a Room of", "NAMES_OF_ROOM", "the front\ndoor", "poisoned=True", "where the CPU\nstands in", "is read anew"]
)
def test_private_words_are_recognized(text: str) -> None:
    assert TEXT.search(text)


@pytest.mark.parametrize("text", ["bathroom", "torch.floor_divide", "the op stands in the list"])
def test_ordinary_words_are_not_recognized(text: str) -> None:
    assert not TEXT.search(text)


@pytest.mark.parametrize(
    ("identifier", "expected"),
    [
        ("kind", True),
        ("_kinds", True),
        ("kind_of_memory", False),
        ("asked_twice", False),
        ("ask_driver", True),
        ("FirstAnswers", True),
        ("lookup", False),
        ("sign_bit", False),
        ("test_what_is_seen", True),
    ],
)
def test_private_identifiers_are_recognized(identifier: str, expected: bool) -> None:
    assert is_private(identifier) is expected


def main() -> None:
    texts, identifiers = find_in_texts(), find_in_identifiers()
    if "--count" in sys.argv:
        for title, occurrences in (("in texts", texts), ("as identifiers", identifiers)):
            print(f"{len(occurrences)} {title}")
            areas = Counter("/".join(each.path.split("/")[:2]) for each in occurrences)
            for area, count in areas.most_common():
                print(f"    {count:5} {area}")
    else:
        for path, line, text in (*texts, *identifiers):
            print(f"{path}:{line}: {text}")


if __name__ == "__main__":
    main()
