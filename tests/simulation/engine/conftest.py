"""Fixtures for tests of the engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

Call = Callable[..., Any]


@pytest.fixture
def by_engine() -> Call:
    """Return a function that calls an op with tensors so that the engine handles the call, and checks that it does.

    Python handles the first call of an op in a process, so a test that calls once tests Python if it runs alone. The function
    first calls the op with clones of the tensors.
    """

    def call(function: Call, *tensors: torch.Tensor) -> Any:
        for _ in range(2):
            function(*(tensor.clone(memory_format=torch.preserve_format) for tensor in tensors))
        in_python: set[str] = set()

        def note(frame: FrameType, event: str, argument: object) -> None:
            if event == "call" and "simulation/_inside/ops" in frame.f_code.co_filename:
                in_python.add(frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name)

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            result = function(*tensors)
        finally:
            sys.setprofile(before)
        assert not in_python, f"Python handled the call: {in_python}"
        return result

    return call
