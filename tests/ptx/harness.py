"""Runs translated kernels in this process, without CUDA and without the simulated libraries of CUDA.

The PTX is in the tests. gcc compiles what the translator makes of it and the library that runs it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accelerator.simulation._ptx import compiler
from accelerator.simulation._ptx.generator import generate
from accelerator.simulation._ptx.program import Program

Array = NDArray[Any]
NATIVE = compiler.HEADERS
TIMEOUT_MS = 20_000
_FACTS_SIZE = 1024  # at least, of what the library says of a kernel


class KernelFailed(Exception):
    """A kernel ended with an error of CUDA's."""

    def __init__(self, error: int, message: str) -> None:
        super().__init__(f"{error}: {message}")
        self.error = error
        self.message = message


class _Memory(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("size", ctypes.c_uint64), ("kind", ctypes.c_char_p), ("device", ctypes.c_int)]


_Find = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_int, ctypes.c_uint64, ctypes.POINTER(_Memory))
_Nearest = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_uint64, ctypes.POINTER(_Memory))


class _Run(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("dynamic_shared", ctypes.c_uint32),
        ("is_cooperative", ctypes.c_bool),
        ("fills_with_nan", ctypes.c_bool),
        ("device", ctypes.c_int),
        ("parameters", ctypes.c_void_p),
        ("variables", ctypes.c_void_p),
        ("stack_limit", ctypes.c_uint64),
        ("heap_limit", ctypes.c_uint64),
        ("cpu_count", ctypes.c_uint32),
        ("timeout_ms", ctypes.c_uint64),
        ("timeout_setting", ctypes.c_char_p),
        ("find_memory", _Find),
        ("find_nearest", _Nearest),
        ("accesses", ctypes.c_void_p),
    ]


@functools.cache
def scratch() -> Path:
    """Return a folder of this process, which is removed at its end."""
    folder = tempfile.TemporaryDirectory(prefix="ptx-")
    scratch_folders.append(folder)
    return Path(folder.name)


scratch_folders: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def library() -> ctypes.CDLL:
    """Compile and load the library that runs kernels."""
    sources = sorted(str(path) for path in NATIVE.glob("*.c"))
    target = scratch() / "libkernels.so"
    flags = [
        "-std=gnu11",
        "-D_GNU_SOURCE",
        "-O1",
        "-fPIC",
        "-shared",
        "-pthread",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{NATIVE.parent}",
    ]
    command = [*compiler.compiler_command(), *flags, *extra_flags(), "-o", str(target), *sources, "-lm"]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(target))
    loaded.sim_kernel_connect.restype = ctypes.c_bool
    loaded.sim_kernel_connect.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    loaded.sim_kernel_run.argtypes = [ctypes.POINTER(_Run), ctypes.c_char_p, ctypes.c_uint32]
    return loaded


def extra_flags() -> list[str]:
    """Return flags for all C of the tests, such as those of sanitizers."""
    return os.environ.get("PTX_TEST_CFLAGS", "").split()


class Kernel:
    """A translated kernel."""

    def __init__(self, texts: Sequence[str], name: str, flags: Sequence[str] = ()) -> None:
        self.source = generate(Program(texts), name)
        digest = hashlib.sha256("\n".join((self.source, *flags)).encode()).hexdigest()[:24]
        path = scratch() / f"{digest}.so"
        if not path.exists():
            compiler.build(self.source, path, flags=[*flags, *extra_flags()])
        self._library = ctypes.CDLL(str(path))
        self.address = ctypes.addressof(ctypes.c_char.in_dll(self._library, "accelerator_kernel"))
        assert library().sim_kernel_connect(self.address, ctypes.create_string_buffer(_FACTS_SIZE))

    @property
    def mode(self) -> str:
        return self.source.partition(".mode = ")[2].partition(",")[0]

    def run(
        self,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        *arguments: Any,
        shared: int = 0,
        memory: Sequence[Array] = (),
        variables: Sequence[Array] = (),
        cooperative: bool = False,
        nan: bool = False,
        stack_limit: int = 1024,
        heap_limit: int = 8 << 20,
        cpus: int = 1,
        timeout_ms: int = TIMEOUT_MS,
    ) -> None:
        """Run the kernel.

        Args:
            grid: Number of blocks.
            block: Number of threads of a block.
            *arguments: An array is passed as its address, and the kernel may access it; scalars of numpy as they are.
            shared: Bytes of dynamic shared memory.
            memory: More arrays that the kernel may access.
            variables: The module's variables that the kernel uses, in the order of its table.
            cooperative: Whether all blocks run together.
            nan: Whether shared memory is filled with NaN.
            stack_limit: Bytes of each thread for what calls need.
            heap_limit: Bytes of malloc in kernels.
            cpus: Number of threads of the CPU.
            timeout_ms: The deadline.
        """
        arrays = [*(value for value in arguments if isinstance(value, np.ndarray)), *memory, *variables]
        parameters = pack(arguments)
        table = (ctypes.c_void_p * max(len(variables), 1))(*(array.ctypes.data for array in variables))
        find, nearest = _finders(arrays)
        run = _Run(
            self.address,
            (ctypes.c_uint32 * 3)(*three(grid)),
            (ctypes.c_uint32 * 3)(*three(block)),
            shared,
            cooperative,
            nan,
            0,
            ctypes.addressof(parameters),
            ctypes.addressof(table),
            stack_limit,
            heap_limit,
            cpus,
            timeout_ms,
            b"the harness",
            find,
            nearest,
        )
        message = ctypes.create_string_buffer(2048)
        error = library().sim_kernel_run(ctypes.byref(run), message, len(message))
        if error:
            raise KernelFailed(error, message.value.decode())


def three(size: int | tuple[int, ...]) -> tuple[int, int, int]:
    """Return the three sizes of a grid or block."""
    sizes = (size,) if isinstance(size, int) else size
    return (*sizes, 1, 1, 1)[:3]  # type: ignore[return-value]


PACKED_PADDING = 16
"""Bytes after packed arguments, because a translated kernel may read the last one with a wider load."""


def pack(arguments: Sequence[Any]) -> ctypes.Array[ctypes.c_char]:
    """Lay arguments out as CUDA does: each is aligned to its size. PACKED_PADDING bytes follow them."""
    packed = bytearray()
    for value in arguments:
        data = struct.pack("<Q", value.ctypes.data) if isinstance(value, np.ndarray) else value.tobytes()
        packed += bytes(-len(packed) % len(data)) + data
    return ctypes.create_string_buffer(bytes(packed), len(packed) + PACKED_PADDING)


def _finders(arrays: Sequence[Array]) -> tuple[Any, Any]:
    ranges = [(array.ctypes.data, array.nbytes) for array in arrays]

    def fill(memory: Any, low: int, size: int) -> bool:
        memory.contents.low, memory.contents.size = low, size
        memory.contents.kind, memory.contents.device = b"device memory", 0
        return True

    def find(device: int, address: int, memory: Any) -> bool:
        return any(low <= address < low + size and fill(memory, low, size) for low, size in ranges)

    def nearest(address: int, memory: Any) -> bool:
        if not ranges:
            return False
        low, size = min(ranges, key=lambda part: max(part[0] - address, address - part[0] - part[1]))
        return fill(memory, low, size)

    return _Find(find), _Nearest(nearest)


@contextmanager
def captured(descriptor: int) -> Iterator[list[str]]:
    """Capture what C writes to a file descriptor; the list gets one text."""
    found: list[str] = []
    saved = os.dup(descriptor)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), descriptor)
        try:
            yield found
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(saved, descriptor)
            os.close(saved)
            file.seek(0)
            found.append(file.read().decode())
