"""Every block of code in README and in docs/ runs, and prints what it says it prints.

A comment in front of a block says where it cannot run as it stands: ``<!-- run: never, REASON -->``, or
``<!-- run: needs MODULE -->``.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from accelerator._machine import torch_build
from tests.support import ROOT, simulated_environment

_BLOCK = re.compile(r"(?:<!-- run: (?P<how>.*?) -->\n)?```(?P<language>\w+)\n(?P<code>.*?)```", re.DOTALL)
_PRINTED = re.compile(r"^\s*print\(.*\)  # (.*)$|^# (.*)$", re.MULTILINE)


class Block(NamedTuple):
    where: str
    language: str
    code: str
    how: str


def _blocks() -> list[Block]:
    found: list[Block] = []
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("code"))
            found.append(Block(f"{path.name}:{line}", match["language"], match["code"], match["how"] or ""))
    return found


BLOCKS = _blocks()
PYTHON = [block for block in BLOCKS if block.language == "python" and not block.how.startswith("never")]


def test_there_are_blocks() -> None:
    assert len(PYTHON) > 5
    assert {block.language for block in BLOCKS} <= {"python", "sh", "text", "yaml", "toml"}


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.where)
def test_python(block: Block, tmp_path: Path) -> None:
    if block.how.startswith("needs "):
        module = block.how.removeprefix("needs ")
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    build = torch_build.read()
    if build is None or not build.cuda:
        pytest.skip("what the blocks print is what a CUDA build prints")
    program = tmp_path / "block.py"
    program.write_text(block.code, encoding="utf-8")
    command = (
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"] if "def test_" in block.code else [sys.executable]
    )
    done = subprocess.run(
        [*command, str(program)],
        cwd=tmp_path,
        env=simulated_environment(gpus=2),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    for match in _PRINTED.finditer(block.code):
        expected = match[1] or match[2]
        assert expected in done.stdout, f"{expected!r} is not in {done.stdout!r}"
