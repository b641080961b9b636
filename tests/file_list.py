"""``python -m tests.file_list [WORD...]``: print the source files that mention all words, each with its first sentence."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support import ROOT

PACKAGE = ROOT / "accelerator"
SUFFIXES = {".py", ".c", ".h", ".cpp", ".hpp"}


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
    files = (path for path in PACKAGE.rglob("*.*") if path.suffix in SUFFIXES and path.parent.name != "exported")
    return sorted(files, key=lambda path: (path.parent.as_posix(), path.name))


def lines() -> Iterator[str]:
    """Yield a line for each file: its path, and the first sentence that it says of itself."""
    for path in sources():
        yield f"{path.relative_to(PACKAGE).as_posix()}: {first_sentence(read_comment(path)) or '(nothing)'}"


if __name__ == "__main__":
    words = [word.lower() for word in sys.argv[1:]]
    print(*(line for line in lines() if all(word in line.lower() for word in words)), sep="\n")
