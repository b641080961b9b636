"""Runs the kernels of the tests by the CUDA driver, which compiles their PTX: on a real GPU, or on a simulated one."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tests.ptx import matrix_cases, test_opcodes
from tests.ptx.cases import batches, failures
from tests.ptx.harness import PACKED_PADDING, KernelFailed, pack, three
from tests.ptx.programs import Program

OLDEST_CUDA = (12, 9)
"""The oldest version of CUDA whose driver reads the PTX of the tests, which is of version 8.8."""

_MAJOR, _MINOR = 75, 76  # attributes of a device
_JIT_ERROR_LOG, _JIT_ERROR_LOG_SIZE = 5, 6


@functools.cache
def _library() -> ctypes.CDLL:
    """Load the driver, and make a context current."""
    library = ctypes.CDLL("libcuda.so.1")
    context = ctypes.c_void_p()
    _check(library.cuInit(0))
    _check(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
    _check(library.cuCtxSetCurrent(context))
    return library


def _check(error: int, message: str = "") -> None:
    if error:
        raise KernelFailed(error, message)


def capability() -> int:
    """Return the compute capability of the first GPU, such as 90."""
    found = [ctypes.c_int(), ctypes.c_int()]
    for value, attribute in zip(found, (_MAJOR, _MINOR), strict=True):
        _check(_library().cuDeviceGetAttribute(ctypes.byref(value), attribute, 0))
    return 10 * found[0].value + found[1].value


def wait() -> int:
    """Wait for the GPU, and return the error."""
    error: int = _library().cuCtxSynchronize()
    return error


class DriverKernel:
    """A kernel that the driver has compiled. It has the interface of `harness.Kernel`."""

    def __init__(self, texts: Sequence[str], name: str) -> None:
        (text,) = texts
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        log = ctypes.create_string_buffer(4096)
        options = (ctypes.c_int * 2)(_JIT_ERROR_LOG, _JIT_ERROR_LOG_SIZE)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
        error = _library().cuModuleLoadDataEx(ctypes.byref(module), text.encode(), 2, options, values)
        _check(error, log.value.decode())
        _check(_library().cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()))

    def launch(self, grid: Any, block: Any, *arguments: Any, shared: int = 0) -> None:
        """Run the kernel on numbers and addresses of the GPU, and wait for it."""
        packed = pack(arguments)
        size = ctypes.c_size_t(len(packed) - PACKED_PADDING)  # a GPU refuses to launch with more than the parameters
        # The parameters in one buffer: CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE and CU_LAUNCH_PARAM_END.
        extra = (ctypes.c_void_p * 5)(1, ctypes.cast(packed, ctypes.c_void_p).value, 2, ctypes.addressof(size), 0)
        _check(_library().cuLaunchKernel(self._function, *three(grid), *three(block), shared, None, None, extra))
        _check(wait())

    def run(self, grid: Any, block: Any, *arguments: Any, shared: int = 0, memory: Sequence[Any] = ()) -> None:
        """Run the kernel on copies of the arrays, and copy their contents back."""
        library, copies = _library(), dict[int, ctypes.c_uint64]()
        arrays = [*(value for value in arguments if isinstance(value, np.ndarray)), *memory]
        for array in arrays:
            address = copies[id(array)] = ctypes.c_uint64()
            _check(library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(array.nbytes)))
            _check(library.cuMemcpyHtoD_v2(address, ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)))
        on_device = [np.uint64(copies[id(value)].value) if isinstance(value, np.ndarray) else value for value in arguments]
        self.launch(grid, block, *on_device, shared=shared)
        for array in arrays:
            address = copies[id(array)]
            _check(library.cuMemcpyDtoH_v2(ctypes.c_void_p(array.ctypes.data), address, ctypes.c_size_t(array.nbytes)))
            _check(library.cuMemFree_v2(address))


def _runs_here(target: str) -> bool:
    """Return whether the GPU has the instructions of an architecture, such as sm_90 or sm_90a, which only that GPU has."""
    match = re.fullmatch(r"sm_(\d+)([af]?)", target)
    assert match
    return int(match[1]) == capability() if match[2] else int(match[1]) <= capability()


def programs() -> list[Program]:
    """Return the programs that run by the driver alone: without variables of the module, which the harness passes.

    The driver of CUDA 13.0 compiles parameters of 128 bits wrong: their high half is zero.
    """
    return [
        each
        for each in test_opcodes.all_programs()
        if _runs_here(each.target) and "variables" not in (each.options or {}) and "ld.param.b128" not in each.variants
    ]


def find_failures(part: int, step: int) -> Iterator[str]:
    """Run every so many variants of instructions and every so many programs, and describe each wrong result."""
    cases = sorted(test_opcodes.all_cases(), key=lambda case: case.variant)[part::step]
    for batch in batches(case for case in cases if _runs_here(case.target)):
        yield from failures(batch, DriverKernel)
    for program in [each for each in programs() if not each.error][part::step]:
        yield from program.failures(DriverKernel)
    for wmma in list(matrix_cases.wmmas())[part::step] if capability() >= 90 else ():
        yield from matrix_cases.WmmaProgram(wmma).run(DriverKernel)


def run_failing(name: str) -> list[int]:
    """Run a program that fails, and return its error and that of the next wait."""
    (program,) = (each for each in programs() if each.name == name)
    assert program.error
    try:
        kernel = DriverKernel([program.full_text()], "main")
        kernel.run(program.blocks, program.threads, program.inputs.copy(), np.zeros(1024, np.uint8))
    except KernelFailed as failure:
        return [failure.error, wait()]
    return [0, wait()]
