"""Connects the package cuda-bindings (``cuda.bindings.runtime``) with the simulated CUDA runtime.

The package is linked with the static runtime, which is not simulated. One of its modules has a C function for each of those of
that runtime, and lists their addresses. torch imports the package before this module runs, and others have taken the addresses
then, so the functions themselves are overwritten with jumps to those of the simulated runtime.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from types import ModuleType
from typing import Any

from .import_hook import after_import

__all__ = ["install"]

_JUMP = struct.Struct("<6sQ")
_TO_NEXT_WORD = b"\xff\x25\0\0\0\0"  # jmp *0(%rip), of x86-64
_READ_EXECUTE, _WRITE = mmap.PROT_READ | mmap.PROT_EXEC, mmap.PROT_WRITE
_ALIGNMENT = 16  # of functions, so each has room for a jump


def install() -> None:
    """Connect the package, now or when the program imports it."""
    after_import("cuda.bindings._internal.runtime", _replace_functions)


def _replace_functions(runtime: ModuleType) -> None:
    simulated = ctypes.CDLL("libcudart.so.13")  # the package has had this module since CUDA 13
    get_name, get_pointer = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    get_name.restype, get_name.argtypes = ctypes.c_void_p, [ctypes.py_object]
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_void_p]
    capsules: dict[str, Any] = runtime.__dict__["__pyx_capi__"]
    targets: dict[int, int | None] = {}
    for name, capsule in capsules.items():
        replacement = getattr(simulated, name.removeprefix("_"), None)
        address: int = get_pointer(capsule, get_name(capsule))
        if replacement is not None and address % _ALIGNMENT == 0:
            targets[address] = ctypes.cast(replacement, ctypes.c_void_p).value
    if targets:
        _write_jumps(targets)


def _write_jumps(targets: dict[int, int | None]) -> None:
    """Write a jump over the code at each address."""
    begin = min(targets) & -mmap.PAGESIZE
    size = max(targets) + _ALIGNMENT - begin
    protect: Any = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    if protect(begin, size, _READ_EXECUTE | _WRITE):
        return  # the system forbids it, so calls fail as those of other programs with the static runtime
    for address, target in targets.items():
        ctypes.memmove(address, _JUMP.pack(_TO_NEXT_WORD, target), _JUMP.size)
    protect(begin, size, _READ_EXECUTE)
