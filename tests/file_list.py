"""Writes ``FILES.md``: every source file of the package with the first sentence of its docstring or comment.

::

    python -m tests.file_list
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from tests.support import ROOT

PACKAGE = ROOT / "accelerator"
FILE = ROOT / "FILES.md"
SUFFIXES = {".py", ".c", ".h", ".cpp", ".hpp"}
HEADING = """# Files

Each source file of the package with the first sentence that it says of itself. `python -m tests.file_list` writes this list.
[CONTRIBUTING.md](CONTRIBUTING.md) tells how the folders work together, and which file a change belongs in.
"""


def read_comment(path: Path) -> str:
    """Return what a file says of itself before anything else, in one line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        comment = ast.get_docstring(ast.parse(text)) or ""
    elif found := re.match(r"/\*\s*(.*?)\s*\*/", text, re.DOTALL):
        comment = re.sub(r"^ \* ?", "", found[1], flags=re.MULTILINE)
    else:
        comment = "\n".join(line[2:].strip() for line in text.partition("\n\n")[0].splitlines() if line.startswith("//"))
    return " ".join(comment.partition("\n\n")[0].split()).replace("``", "`")


def first_sentence(comment: str) -> str:
    """Return the first sentence, without the name of the library at its beginning, which the folder names."""
    sentence = re.split(r"(?<=[.])(?<!e\.g\.|i\.e\.) ", f"{comment} ")[0].strip()
    named = re.match(r"(The CUDA runtime|libcuda\.so\.1|NCCL|Race detection|Faults|The simulated nvidia-smi): (?=.)", sentence)
    return sentence[named.end()].upper() + sentence[named.end() + 1 :] if named else sentence


def sources() -> list[Path]:
    return sorted(
        (
            path for path in PACKAGE.rglob("*.*") if path.suffix in SUFFIXES and path.parent.name != "exported"
        ),  # which is written
        key=lambda path: (path.parent.as_posix(), path.name),
    )


def lines() -> Iterator[str]:
    yield HEADING
    for folder, files in groupby(sources(), lambda path: path.parent):
        yield f"## {folder.relative_to(ROOT).as_posix()}/\n"
        for path in files:
            yield f"- `{path.name}`: {first_sentence(read_comment(path)) or '(nothing)'}"
        yield ""


def text() -> str:
    return "\n".join(lines())


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
    print(f"wrote {FILE.relative_to(ROOT)}")
    sys.exit(0)
