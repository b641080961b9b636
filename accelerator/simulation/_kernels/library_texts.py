"""Texts in the libraries of the installed torch, which tell what its CUDA kernels refuse.

An error that torch no longer raises leaves its library with its text, so no table of versions is needed.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from pathlib import Path

import torch

__all__ = ["has_string", "has_text"]

_FOLDER = Path(torch.__file__).parent / "lib"
_HEADER = struct.Struct("<40xQ10xHH2x")  # of an ELF file: offset of the section headers, their size, their number
_SECTION = struct.Struct("<4xIQ8xQQ24x")  # type, flags, offset, size
_PROGRAM_DATA, _LOADED, _WRITABLE_OR_CODE = 1, 2, 5


@functools.cache
def has_text(library: str, text: str) -> bool:
    """Return whether a library of torch contains a text. The first call for a text reads up to 18 MB: about 10 ms."""
    return any(text.encode() in data for data in _constants(_FOLDER / library))


@functools.cache
def has_string(library: str, text: str) -> bool:
    """Return whether a library of torch contains a text as a whole string, not as a part of another."""
    return any(b"\0" + text.encode() + b"\0" in data for data in _constants(_FOLDER / library))


def _constants(library: Path) -> Iterator[bytes]:
    """Yield the sections of read-only data, a hundredth of the library."""
    with library.open("rb") as file:
        offset, size, count = _HEADER.unpack(file.read(_HEADER.size))
        file.seek(offset)
        headers = file.read(size * count)
        for index in range(count):
            kind, flags, start, length = _SECTION.unpack_from(headers, index * size)
            if kind == _PROGRAM_DATA and flags & _LOADED and not flags & _WRITABLE_OR_CODE:
                file.seek(start)
                yield file.read(length)
