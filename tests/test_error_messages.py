"""No error message in the source of the package ends with a period, except for messages of torch that it repeats."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support import ROOT

pytestmark = pytest.mark.torch_free

# The ends of torch's messages that the package repeats.
OF_TORCH = (
    " doesn't match the current accelerator .",
    "Both events must be created with argument 'enable_timing=True' to measure elapsed time.",
    "Both events must be recorded before calculating elapsed time.",
    "Attempt to increase offset for a CUDA generator not in capture mode.",
    "please report a bug to PyTorch.",
    "You can make a clone to get a normal tensor before doing inplace update.",
)


def read_messages() -> Iterator[tuple[str, str]]:
    """Yield the place of each ``raise`` statement and the text of its message, without the inserted values."""
    for file in sorted((ROOT / "accelerator").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                texts = [each for each in ast.walk(node.exc.args[0]) if isinstance(each, (ast.Constant, ast.JoinedStr))]
                if texts:
                    yield f"{file.relative_to(ROOT)}:{node.lineno}", literal(texts[0])


def literal(text: ast.Constant | ast.JoinedStr) -> str:
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    return "".join(str(each.value) for each in parts if isinstance(each, ast.Constant))


def test_messages_do_not_end_with_a_period() -> None:
    messages = list(read_messages())
    assert len(messages) > 200
    assert [each for each in messages if each[1].endswith(".") and not each[1].endswith(OF_TORCH)] == []
