"""Texts in the libraries of the installed torch, which tell what its CUDA kernels refuse.

An error that torch no longer raises leaves its library with its text, so no table of versions is needed.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from pathlib import Path

import torch

_FOLDER = Path(torch.__file__).parent / "lib"
_HEADER = struct.Struct("<40xQ10xHHH")  # of an ELF file: offset of the section headers, their size, their number, that of names
_SECTION = struct.Struct("<IIQ8xQQ24x")  # name, type, flags, offset, size
_PROGRAM_DATA, _LOADED, _WRITABLE_OR_CODE = 1, 2, 5
_KERNELS = b"fatbin"  # in the names of sections that hold kernels, which are most of the library
_WRAPPER = b"\0wrapper_"


@functools.cache
def has_text(library: str, text: str) -> bool:
    """Return whether a library of torch contains a text. The first call for a text reads up to 18 MB: about 10 ms."""
    return any(text.encode() in data for data in _constants(_FOLDER / library))


@functools.cache
def has_string(library: str, text: str) -> bool:
    """Return whether a library of torch contains a text as a whole string, not as a part of another."""
    return any(b"\0" + text.encode() + b"\0" in data for data in _constants(_FOLDER / library))


@functools.cache
def device_checks() -> frozenset[str]:
    """Return the names of the functions that refuse tensors on several devices, before they call a CUDA kernel.

    A name is "wrapper_", a dispatch key, and an op's name after or before that of its overload: "wrapper_CUDA_clamp_Tensor".
    The first call takes about 10 ms.
    """
    names: set[str] = set()
    for data in _constants(_FOLDER / "libtorch_cuda.so"):
        start = data.find(_WRAPPER)
        while start >= 0:
            end = data.index(b"\0", start + 1)
            names.add(data[start + 1 : end].decode())
            start = data.find(_WRAPPER, end)
    return frozenset(names)


def _constants(library: Path) -> Iterator[bytes]:
    """Yield the sections of read-only data but those of kernels: a hundredth of the library."""
    with library.open("rb") as file:
        offset, size, count, names_index = _HEADER.unpack(file.read(_HEADER.size))
        file.seek(offset)
        headers = file.read(size * count)
        sections = [_SECTION.unpack_from(headers, index * size) for index in range(count)]
        _, _, _, names_start, names_length = sections[names_index]
        file.seek(names_start)
        names = file.read(names_length)
        for name, kind, flags, start, length in sections:
            is_constant = kind == _PROGRAM_DATA and flags & _LOADED and not flags & _WRITABLE_OR_CODE
            if is_constant and _KERNELS not in names[name : names.index(b"\0", name)]:
                file.seek(start)
                yield file.read(length)
