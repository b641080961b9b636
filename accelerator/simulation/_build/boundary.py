"""What Python and native code must agree on: the version of the headers in ``native/interface``, and what the engine describes.

Processes on a simulated machine load this module by file name.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from collections.abc import Callable, Sequence

_BOUNDARY = "interface/boundary.h"
_INTEGERS = {4: ctypes.c_uint32, 8: ctypes.c_uint64}  # they take negative numbers too
_REMEDY = "the installation of accelerator is mixed from two versions; install it again"
_INCLUDE = re.compile(rb'^#include "(.+)"$', re.MULTILINE)


def read_with_included(read: Callable[[str], bytes], *names: str) -> dict[str, bytes]:
    """Return sources and what they include, by their paths below ``native``.

    Args:
        read: Returns the content of a source. It may be in a zip archive, whose folders cannot be listed.
        names: The paths of the sources.
    """
    sources: dict[str, bytes] = {}
    left = list(names)
    while left:
        name = left.pop()
        if name not in sources:
            sources[name] = read(name)
            left += [_path(name, included.decode()) for included in _INCLUDE.findall(sources[name])]
    return dict(sorted(sources.items()))


def _path(name: str, included: str) -> str:
    """Return the path of a file that a source includes: one of its own folder, or one by its whole path."""
    return included if "/" in included else f"{os.path.dirname(name)}/{included}"


def boundary_flag(read: Callable[[str], bytes]) -> str:
    """Return the compiler's flag that says which version of the headers in ``native/interface`` a library is compiled from."""
    digest = hashlib.sha256(repr(read_with_included(read, _BOUNDARY)).encode())
    return f'-DSIM_BOUNDARY="{digest.hexdigest()[:16]}"'


class Boundary:
    """What the engine describes: structures that Python fills in, and flags and limits that both use.

    Args:
        text: A line for each flag or limit, ``group.NAME value 0``, for each field of a structure, ``structure.field offset
            size``, and for each structure, ``structure 0 size``.
    """

    def __init__(self, text: str) -> None:
        self._lines = {name: (int(first), int(second)) for name, first, second in map(str.split, text.splitlines())}

    def numbers(self, group: str, names: Sequence[str]) -> list[int]:
        """Return the values of a group's flags or limits, which must be these."""
        return [value for value, _ in self._members(group, names)]

    def structure(self, name: str, fields: Sequence[str]) -> type[ctypes.Structure]:
        """Return the type of a structure, whose fields must be these, in this order."""
        offsets, sizes = zip(*self._members(name, fields), strict=True)
        types = [(field, _INTEGERS[size]) for field, size in zip(fields, sizes, strict=True)]
        made = type(name, (ctypes.Structure,), {"_fields_": types})
        laid_out = [getattr(made, field).offset for field in fields]
        if [*laid_out, ctypes.sizeof(made)] != [*offsets, self._lines[name][1]]:
            raise RuntimeError(f"the engine and Python lay out {name} differently: {_REMEDY}")
        return made

    def _members(self, group: str, names: Sequence[str]) -> list[tuple[int, int]]:
        described = [name.partition(".")[2] for name in self._lines if name.startswith(f"{group}.")]
        if sorted(described) != sorted(names):
            different = ", ".join(sorted(set(described) ^ set(names)))
            raise RuntimeError(f"the engine and Python disagree about {different} of {group}: {_REMEDY}")
        return [self._lines[f"{group}.{name}"] for name in names]
