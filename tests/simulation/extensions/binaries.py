"""Programs with kernels, as nvcc makes them, from PTX texts: fat binaries, their registration, and launches."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from tests.simulation.extensions.fat_binaries import WRAPPER_MAGIC, Entry, Wrapper, fat_binary
from tests.simulation.runtime.test_launches_simulated import Dim3
from tests.support.simulation_driver import loaded_runtime

_addresses = itertools.count(0x7000_0000, 16)  # that stand for host functions and variables; nothing calls or reads them
_kept: list[Any] = []  # what the runtime keeps pointers to


class Binary:
    """A program's kernels and variables, registered with the runtime."""

    def __init__(self, *entries: Entry | str, linked: Sequence[str] = ()) -> None:
        """Register a fat binary.

        Args:
            *entries: Its entries; a text is PTX for 8.0.
            linked: The texts of which it was linked (-rdc); the binary itself has machine code then.
        """
        self.runtime = loaded_runtime()
        data = fat_binary(*(entry if isinstance(entry, Entry) else Entry(80, entry) for entry in entries))
        parts = [fat_binary(Entry(80, text)) for text in linked]
        pointers = (ctypes.c_void_p * (len(parts) + 1))(*(ctypes.addressof(part) for part in parts), None)
        version, prelinked = (2, ctypes.addressof(pointers)) if linked else (1, None)
        wrapper = Wrapper(WRAPPER_MAGIC, version, ctypes.addressof(data), prelinked)
        _kept.extend((data, parts, pointers, wrapper))
        register = self.runtime["__cudaRegisterFatBinary"]
        register.restype = ctypes.c_void_p
        self.handle = ctypes.c_void_p(register(ctypes.byref(wrapper)))

    def unregister(self) -> None:
        self.runtime["__cudaUnregisterFatBinary"](self.handle)

    def kernel(self, name: str) -> Kernel:
        function, text = ctypes.c_void_p(next(_addresses)), ctypes.create_string_buffer(name.encode())
        _kept.append(text)
        self.runtime["__cudaRegisterFunction"](self.handle, function, text, text, -1, None, None, None, None, None)
        return Kernel(self.runtime, function)

    def variable(self, name: str, size: int) -> ctypes.c_void_p:
        symbol, text = ctypes.c_void_p(next(_addresses)), ctypes.create_string_buffer(name.encode())
        _kept.append(text)
        self.runtime["__cudaRegisterVar"](self.handle, symbol, text, text, 0, ctypes.c_size_t(size), 0, 0)
        return symbol

    def managed(self, name: str, size: int) -> Any:
        """Return where the host finds the address of a managed variable."""
        pointer, text = ctypes.c_void_p(), ctypes.create_string_buffer(name.encode())
        _kept.extend((pointer, text))
        arguments = (self.handle, ctypes.byref(pointer), text, text, 0, ctypes.c_size_t(size), 0, 0)
        self.runtime["__cudaRegisterManagedVar"](*arguments)
        assert self.runtime["__cudaInitModule"](self.handle) & 0xFF == 1
        return pointer


class Kernel:
    def __init__(self, runtime: ctypes.CDLL, function: ctypes.c_void_p) -> None:
        self.runtime = runtime
        self.function = function
        self.read_error = runtime.cudaGetLastError
        """Called after each launch."""

    def __call__(
        self, grid: int | Sequence[int], block: int | Sequence[int], *arguments: Any, shared: int = 0, cooperative: bool = False
    ) -> int:
        """Launch it on the current stream of the current device, and return CUDA's error.

        Args:
            grid: Number of blocks.
            block: Number of threads of a block.
            *arguments: Tensors are passed as their addresses.
            shared: Bytes of dynamic shared memory.
            cooperative: Whether all blocks run together.
        """
        values = [ctypes.c_uint64(value.data_ptr()) if isinstance(value, torch.Tensor) else value for value in arguments]
        pointers = (ctypes.c_void_p * max(len(values), 1))(*(ctypes.addressof(value) for value in values))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        launch = self.runtime.cudaLaunchCooperativeKernel if cooperative else self.runtime.cudaLaunchKernel
        error = launch(self.function, _dim3(grid), _dim3(block), pointers, ctypes.c_size_t(shared), stream)
        self.read_error()
        return int(error)


def _dim3(size: int | Sequence[int]) -> Dim3:
    sizes = (size,) if isinstance(size, int) else size
    return Dim3(*(*sizes, 1, 1)[:3])
