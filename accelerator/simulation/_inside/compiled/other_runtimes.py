"""Connects programs that bring a CUDA runtime of their own with the simulated one.

torch loads the real runtime by its path beside the simulated one. Libraries such as FlashInfer look for a loaded one in
/proc/self/maps and load the file that they find. The name of the file is then used without its folder.

The package cuda-bindings is linked with the static runtime, which is not simulated. One of its modules has a C function for
each one of that runtime, and lists their addresses. torch imports the package before this module runs. Others have taken the
addresses then, so the functions themselves are overwritten with jumps to those of the simulated runtime.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import re
import struct
from types import ModuleType
from typing import Any

from ..import_hook import after_import

_RUNTIME = re.compile(r".*/libcudart\.so\.1[23]")
_JUMP = struct.Struct("<6sQ")
_TO_NEXT_WORD = b"\xff\x25\0\0\0\0"  # jmp *0(%rip), of x86-64
_READ_EXECUTE, _WRITE = mmap.PROT_READ | mmap.PROT_EXEC, mmap.PROT_WRITE
_ALIGNMENT = 16  # of functions, so each has room for a jump


def install() -> None:
    """Connect the package, now or when the program imports it, and what loads a runtime from now on."""
    init = ctypes.CDLL.__init__

    @functools.wraps(init)
    def load(self: Any, name: Any, *arguments: Any, **options: Any) -> None:
        is_runtime = isinstance(name, str) and _RUNTIME.fullmatch(name) is not None
        init(self, os.path.basename(name) if is_runtime else name, *arguments, **options)

    ctypes.CDLL.__init__ = load  # type: ignore[method-assign]
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
