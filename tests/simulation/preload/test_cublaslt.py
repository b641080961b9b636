"""cuBLASLt, as libraries call it themselves: in a rehearsal its products succeed and compute nothing."""

from __future__ import annotations

import pytest

from tests import support
from tests.support import simulated_environment
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = needs_cuda_torch

CALLS = """
    import torch
    import ctypes
    # The real library, as the libraries of torch load it.
    [path] = {{line.split()[-1] for line in open("/proc/self/maps") if "/libcublasLt.so" in line}}
    lt, real = ctypes.CDLL(None), ctypes.CDLL(path)
    handle, layout = ctypes.c_void_p(), ctypes.c_void_p()
    assert real.cublasLtMatrixLayoutCreate(ctypes.byref(layout), 0, 64, 64, 64) == 0  # needs no GPU
    created = lt.cublasLtCreate(ctypes.byref(handle))
    if not {rehearses}:
        # The real library: its static CUDA runtime finds no GPU.
        assert created != 0, created
        raise SystemExit
    results, found = (ctypes.c_char * 96)(*[1] * 96), ctypes.c_int()
    nothing = ctypes.c_void_p()
    statuses = [
        lt.cublasLtMatmulAlgoGetHeuristic(handle, *[nothing] * 6, 1, results, ctypes.byref(found)),
        lt.cublasLtMatmul(handle, *[nothing] * 12, nothing, ctypes.c_size_t(0), nothing),
        lt.cublasLtMatrixTransform(handle, *[nothing] * 10),
        lt.cublasLtDestroy(handle),
    ]
    assert (created, statuses, found.value, bytes(results)) == (0, [0] * 4, 1, bytes(96)), (created, statuses)
"""


@pytest.mark.parametrize("rehearses", [True, False])
def test_calls_of_libraries(rehearses: bool) -> None:
    support.run(CALLS.format(rehearses=rehearses), simulated_environment(gpus=1, compute=not rehearses))
