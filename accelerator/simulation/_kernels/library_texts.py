"""Texts in the libraries of the installed torch, which tell what its CUDA kernels refuse.

An error that torch no longer raises leaves its library with its text, so no table of versions is needed.
"""

from __future__ import annotations

import functools
import mmap
from pathlib import Path

import torch

__all__ = ["has_string", "has_text"]

_FOLDER = Path(torch.__file__).parent / "lib"


@functools.cache
def has_text(library: str, text: str) -> bool:
    """Return whether a library of torch contains a text. The first call for a text reads the library: 0.1 to 2 s."""
    return _contains(library, text.encode())


@functools.cache
def has_string(library: str, text: str) -> bool:
    """Return whether a library of torch contains a text as a whole string, not as a part of another."""
    return _contains(library, b"\0" + text.encode() + b"\0")


def _contains(library: str, pattern: bytes) -> bool:
    with (_FOLDER / library).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(pattern) >= 0
