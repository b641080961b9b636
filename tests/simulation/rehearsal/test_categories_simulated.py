"""What memory is for, by the frames of the code that allocated it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accelerator.simulation._inside.rehearsal import peaks

TORCH = Path(torch.__path__[0])


@pytest.mark.parametrize(
    ("file", "category"),
    [
        ("nn/modules/module.py", "activations"),
        ("autograd/function.py", "activations"),
        ("optim/adamw.py", "optimizer state"),
        ("nn/functional.py", "other"),
    ],
)
def test_category_of_what_the_program_calls(file: str, category: str) -> None:
    frames = [{"filename": str(TORCH / file)}, {"filename": "/home/user/program.py"}]
    assert peaks.category_of(frames) == category


def test_what_torch_alone_allocates_is_an_activation() -> None:
    assert peaks.category_of([{"filename": str(TORCH / "nn/functional.py")}]) == "activations"
