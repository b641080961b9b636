"""Attributes of devices, which ``cuDeviceGetAttribute`` and ``cudaGetDeviceProperties`` return."""

from __future__ import annotations

import textwrap

import pytest

from tests.support.simulation import evaluate, linux_only
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = linux_only

ATTRIBUTES = """
cuda, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
cuda.cuInit(0)
def read(number):
    assert cuda.cuDeviceGetAttribute(ctypes.byref(value), number, 0) == 0
    return value.value
"""

# Limits of textures and surfaces, in the order of cudaDeviceProp, read on an H100. They are the same from capability 7.0 on.
LIMITS = {
    "1D": {21: 131072, 77: 32768, 69: 268435456},
    "2D": {22: 131072, 23: 65536, 73: 32768, 74: 32768, 70: 131072, 71: 65000, 72: 2097120, 45: 32768, 46: 32768},
    "3D": {24: 16384, 25: 16384, 26: 16384, 47: 8192, 48: 8192, 49: 32768},
    "cubes and layers": {52: 32768, 42: 32768, 43: 2048, 27: 32768, 28: 32768, 29: 2048, 53: 32768, 54: 2046},
    "surfaces": {55: 32768, 56: 131072, 57: 65536, 58: 16384, 59: 16384, 60: 16384, 61: 32768, 62: 2048},
    "layered surfaces": {63: 32768, 64: 32768, 65: 2048, 66: 32768, 67: 32768, 68: 2046},
}
ALL_LIMITS = {number: value for group in LIMITS.values() for number, value in group.items()}
# What is not simulated: gathers from textures, cooperative launches on several GPUs, compression, persisting L2, GPUDirect,
# sparse arrays, semaphores, flushes of writes, deferred arrays, waits for values, DMA buffers, fabric handles, function
# pointers, multicast, decompression, pools of the host.
REFUSED = (44, 96, 107, 108, 110, 112, 114, 116, 117, 121, 123, 124, 128, 129, 132, 136, 141, 142, 144, 145)


def test_limits_of_textures_and_surfaces() -> None:
    assert evaluate(f"{ATTRIBUTES}\nreport([read(number) for number in {list(ALL_LIMITS)}])") == list(ALL_LIMITS.values())


@pytest.mark.slow
@needs_cuda_torch
def test_properties_have_the_limits() -> None:
    program = """
        import torch
        import struct
        torch.cuda.init()
        properties = ctypes.create_string_buffer(2048)
        assert ctypes.CDLL(None).cudaGetDeviceProperties(properties, 0) == 0
        report([properties.raw.count(struct.pack(f"{len(limits)}i", *limits)) for limits in LIMITS])
    """
    without_linear = [value for number, value in ALL_LIMITS.items() if number != 69]  # which CUDA 13 has no more
    limits = f"LIMITS = {list(ALL_LIMITS.values()), without_linear}\n"
    assert sorted(evaluate(limits + textwrap.dedent(program))) == [0, 1]


def test_what_is_refused_is_not_claimed() -> None:
    assert evaluate(f"{ATTRIBUTES}\nreport([number for number in {REFUSED} if read(number)])") == []


def test_host_memory_can_be_registered_read_only() -> None:
    program = """
        context = ctypes.c_void_p()
        assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
        assert cuda.cuCtxSetCurrent(context) == 0
        memory = ctypes.create_string_buffer(4096)
        READ_ONLY = 8
        report([read(113), cuda.cuMemHostRegister_v2(memory, ctypes.c_size_t(4096), READ_ONLY)])
    """
    assert evaluate(ATTRIBUTES + "\n".join(line[8:] for line in program.splitlines())) == [1, 0]


@pytest.mark.parametrize(("capability", "domains"), [("8.0", 1), ("9.0", 4)])
def test_memory_synchronization_domains(capability: str, domains: int) -> None:
    assert evaluate(f"{ATTRIBUTES}\nreport(read(126))", capability=capability) == domains


def test_pci_ids_are_those_of_a_known_model() -> None:
    program = f"{ATTRIBUTES}\nreport([read(139), read(140)])"
    assert evaluate(program, name="NVIDIA H100 80GB HBM3") == [0x233010DE, 0x16C110DE]
    assert evaluate(program) == [0, 0]
