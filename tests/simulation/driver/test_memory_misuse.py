"""Memory functions return CUDA's error for wrong arguments, and neither crash nor change anything.

The programs call the driver and the runtime through ctypes, each in its own process.
"""

from __future__ import annotations

import json
import textwrap
from typing import Any

import pytest

from tests.support import run, simulated_environment
from tests.support.discovery import on_simulated_gpus
from tests.support.simulation import MIB, linux_only

pytestmark = linux_only

PRELUDE = """
import ctypes, faulthandler, json, mmap, os, sys
from ctypes import byref, c_int, c_longlong, c_size_t, c_uint, c_uint64, c_void_p
faulthandler.enable()
MIB = 2**20
MAJOR = int(sys.argv[1])
driver, runtime = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(f"libcudart.so.{MAJOR}")

def convert(value):
    return c_size_t(value) if isinstance(value, int) else value

def cu(name, *arguments):
    return getattr(driver, name)(*map(convert, arguments))

def cuda(name, *arguments):
    return getattr(runtime, name)(*map(convert, arguments))

def made(function, name, *arguments):
    result = c_void_p()
    assert function(name, byref(result), *arguments) == 0, name
    return result.value

def free_bytes():
    free, total = c_size_t(), c_size_t()
    assert cuda("cudaMemGetInfo", byref(free), byref(total)) == 0
    return free.value

class Properties(ctypes.Structure):
    _fields_ = [("type", c_int), ("handle_types", c_int), ("location_type", c_int), ("location_id", c_int),
                ("meta_data", c_void_p), ("flags", ctypes.c_ubyte * 8)]

class Access(ctypes.Structure):
    _fields_ = [("location_type", c_int), ("location_id", c_int), ("flags", c_int)]

def properties(device=0, handle_types=1, location_type=1):
    return Properties(1, handle_types, location_type, device, None)

def bytes_at(address, size):
    target = ctypes.create_string_buffer(size)
    assert cuda("cudaMemcpy", target, address, size, 2) == 0
    return target.raw

def report(*values):
    print(json.dumps(values), flush=True)

assert cuda("cudaSetDevice", c_int(0)) == 0
context = c_void_p()
assert cu("cuDevicePrimaryCtxRetain", byref(context), c_int(0)) == 0
"""

INVALID_VALUE, OUT_OF_MEMORY = 1, 2


def evaluate(program: str, major: int = 13, **machine: Any) -> list[Any]:
    """Run a program on a simulated machine and return what it reports."""
    output = run(PRELUDE + textwrap.dedent(program), simulated_environment(**machine), str(major))
    return json.loads(output)


@pytest.mark.parametrize("major", [12, 13])
def test_second_free_of_a_pool_block_is_an_error(major: int) -> None:
    program = """
        threshold = c_uint64(2**40)
        pool = made(cuda, "cudaDeviceGetDefaultMemPool", c_int(0))
        assert cuda("cudaMemPoolSetAttribute", pool, c_int(4), byref(threshold)) == 0
        block = made(cuda, "cudaMallocAsync", MIB, None)
        codes = [cuda("cudaFreeAsync", block, None) for _ in range(2)]
        codes += [cuda("cudaFree", block), cu("cuMemFree_v2", block)]
        first, second = made(cuda, "cudaMallocAsync", MIB, None), made(cuda, "cudaMallocAsync", MIB, None)
        codes += [cuda("cudaFreeAsync", first, None), cuda("cudaFree", second)]
        report(codes, first != second)
    """
    assert evaluate(program, major) == [[0, 1, 1, 1, 0, 0], True]


def test_use_of_a_freed_pool_block_is_an_error() -> None:
    program = """
        threshold = c_uint64(2**40)
        pool = made(cuda, "cudaDeviceGetDefaultMemPool", c_int(0))
        assert cuda("cudaMemPoolSetAttribute", pool, c_int(4), byref(threshold)) == 0
        block, data = made(cuda, "cudaMallocAsync", MIB, None), ctypes.create_string_buffer(16)
        assert cuda("cudaFreeAsync", block, None) == 0
        report([cuda("cudaMemcpy", block, data, 16, 1), cuda("cudaMemset", block, 0, 16),
                cu("cuMemGetAddressRange_v2", None, None, block)])
    """
    assert evaluate(program) == [[1, 1, 1]]


def test_driver_frees_a_pool_block() -> None:
    program = """
        before = free_bytes()
        block = made(cuda, "cudaMallocAsync", MIB, None)
        codes = [cu("cuMemFree_v2", block), cu("cuMemFree_v2", block), cuda("cudaFreeAsync", block, None)]
        used = c_uint64(77)
        pool = made(cuda, "cudaDeviceGetDefaultMemPool", c_int(0))
        assert cuda("cudaMemPoolGetAttribute", pool, c_int(7), byref(used)) == 0
        report(codes, used.value, before - free_bytes())
    """
    assert evaluate(program) == [[0, 1, 1], 0, 0]


def test_mapping_unreserved_addresses_is_an_error() -> None:
    program = """
        host = mmap.mmap(-1, 8 * MIB)
        host[:4] = b"kept"
        start = ctypes.addressof(ctypes.c_char.from_buffer(host))
        aligned = (start + 2 * MIB - 1) // (2 * MIB) * (2 * MIB)
        ctypes.memmove(aligned, b"kept", 4)
        handle = made(cu, "cuMemCreate", 2 * MIB, byref(properties()), 0)
        reserved = made(cu, "cuMemAddressReserve", 4 * MIB, 0, 0, 0)
        codes = [cu("cuMemMap", address, 2 * MIB, 0, handle, 0)
                 for address in (aligned, 0, 2**64 - 2 * MIB, reserved + 4 * MIB, reserved - 2 * MIB, reserved + 4096)]
        large = made(cu, "cuMemCreate", 6 * MIB, byref(properties()), 0)
        codes.append(cu("cuMemMap", reserved, 6 * MIB, 0, large, 0))
        codes.append(cu("cuMemMap", reserved + 2 * MIB, 2 * MIB, 0, handle, 0))
        codes.append(cu("cuMemMap", reserved + 2 * MIB, 2 * MIB, 0, handle, 0))
        report(codes, ctypes.string_at(aligned, 4).decode())
    """
    assert evaluate(program) == [[1, 1, 1, 1, 1, 1, 1, 0, 1], "kept"]


def test_memory_handle_reference_count() -> None:
    program = """
        before = free_bytes()
        handle = made(cu, "cuMemCreate", 2 * MIB, byref(properties()), 0)
        reserved = made(cu, "cuMemAddressReserve", 2 * MIB, 0, 0, 0)
        assert cu("cuMemMap", reserved, 2 * MIB, 0, handle, 0) == 0
        assert cu("cuMemSetAccess", reserved, 2 * MIB, byref(Access(1, 0, 3)), 1) == 0
        assert cuda("cudaMemset", reserved, 7, 2 * MIB) == 0
        codes = [cu("cuMemRelease", handle), cu("cuMemRelease", handle)]
        kept = bytes_at(reserved, 4).hex(), before - free_bytes()
        again = made(cu, "cuMemRetainAllocationHandle", reserved)
        codes += [cu("cuMemRelease", again), cu("cuMemRelease", again)]
        codes += [cu("cuMemUnmap", reserved, 2 * MIB), cu("cuMemUnmap", reserved, 2 * MIB), cu("cuMemRelease", handle)]
        codes += [cu("cuMemMap", reserved, 2 * MIB, 0, handle, 0)]
        report(codes, kept, before - free_bytes())
    """
    assert evaluate(program) == [[0, 1, 0, 1, 0, 1, 1, 1], ["07070707", 2 * MIB], 0]


def test_reservation_must_be_unmapped_and_freed_whole() -> None:
    program = """
        handle = made(cu, "cuMemCreate", 2 * MIB, byref(properties()), 0)
        reserved = made(cu, "cuMemAddressReserve", 4 * MIB, 0, 0, 0)
        assert cu("cuMemMap", reserved, 2 * MIB, 0, handle, 0) == 0
        assert cu("cuMemSetAccess", reserved, 2 * MIB, byref(Access(1, 0, 3)), 1) == 0
        codes = [cu("cuMemAddressFree", reserved, 4 * MIB), cu("cuMemAddressFree", reserved + 2 * MIB, 2 * MIB)]
        assert cuda("cudaMemset", reserved, 7, 2 * MIB) == 0
        codes += [cu("cuMemUnmap", reserved, 4 * MIB), cu("cuMemUnmap", reserved, 2 * MIB)]
        codes += [cu("cuMemAddressFree", *range_) for range_ in
                  ((reserved, 2 * MIB), (reserved + 4096, 4 * MIB), (0, 4 * MIB), (reserved, 2**64 - MIB),
                   (reserved, 4 * MIB), (reserved, 4 * MIB))]
        report(codes)
    """
    assert evaluate(program) == [[1, 1, 1, 0, 1, 1, 1, 1, 0, 1]]


def test_wrong_mapping_range_changes_nothing() -> None:
    program = """
        reserved = made(cu, "cuMemAddressReserve", 6 * MIB, 0, 0, 0)
        for offset in (0, 2 * MIB):
            handle = made(cu, "cuMemCreate", 2 * MIB, byref(properties()), 0)
            assert cu("cuMemMap", reserved + offset, 2 * MIB, 0, handle, 0) == 0
        access = Access(1, 0, 3)
        codes = [cu("cuMemSetAccess", reserved, size, byref(access), 1) for size in (6 * MIB, MIB, 4 * MIB)]
        codes += [cu("cuMemSetAccess", reserved, 4 * MIB, None, 1), cu("cuMemSetAccess", reserved, 4 * MIB, byref(access), 0)]
        codes += [cu("cuMemSetAccess", reserved, 4 * MIB, byref(Access(*wrong)), 1)
                  for wrong in ((1, 9, 3), (1, 0, 2), (7, 0, 3))]
        assert cuda("cudaMemset", reserved, 7, 4 * MIB) == 0
        codes += [cu("cuMemUnmap", reserved, size) for size in (6 * MIB, 3 * MIB, 0, 2**64 - 1)]
        report(codes, bytes_at(reserved, 4 * MIB) == b"\\7" * 4 * MIB)
    """
    assert evaluate(program) == [[1, 1, 0, 1, 1, 101, 1, 1, 1, 1, 1, 1], True]


def test_ranges_that_overflow_the_address_space() -> None:
    program = """
        block = made(cuda, "cudaMalloc", MIB)
        data = ctypes.create_string_buffer(16)
        codes = [cuda("cudaMemset", 2**64 - 8, 0, 16), cuda("cudaMemset", block, 0, 2**64 - 8),
                 cuda("cudaMemsetAsync", block, 0, 2**64 - block + 8, None),
                 cu("cuCtxSetCurrent", context),
                 cu("cuMemsetD32Async", block, c_uint(0), 2**62 + 1, None),
                 cu("cuMemsetD32Async", block, c_uint(1), 2**62, None),
                 cuda("cudaMemcpy", block, data, 2**64 - 1, 1), cuda("cudaMemcpy", data, block, 2**63, 2),
                 cuda("cudaMemcpy2DAsync", block, 2**63, data, 16, 16, 3, c_int(1), None),
                 cuda("cudaMemcpy2DAsync", block, 16, data, 2**63, 16, 3, c_int(1), None)]
        report(codes)
    """
    assert evaluate(program) == [[1, 1, 1, 0, 1, 1, 1, 1, 12, 12]]


def test_unmapped_host_memory_is_an_error() -> None:
    program = """
        block = made(cuda, "cudaMalloc", MIB)
        assert cuda("cudaMemset", block, 7, MIB) == 0
        gone = mmap.mmap(-1, MIB)
        unmapped = ctypes.addressof(ctypes.c_char.from_buffer(gone))
        reserved = made(cu, "cuMemAddressReserve", 2 * MIB, 0, 0, 0)
        assert ctypes.CDLL(None).munmap(c_void_p(unmapped), c_size_t(MIB)) == 0
        codes = []
        for host in (None, 16, unmapped, reserved):
            codes += [cuda("cudaMemcpy", block, host, 16, c_int(1)), cuda("cudaMemcpy", host, block, 16, c_int(2)),
                      cuda("cudaMemcpyAsync", host, block, 16, c_int(4), None), cuda("cudaMemset", host, 0, 16),
                      cuda("cudaHostRegister", host, 16, c_uint(0))]
        codes.append(cuda("cudaMemcpy", block, None, 0, c_int(1)))
        report(codes, bytes_at(block, 16).hex())
        os._exit(0)  # without finalization, which would unmap `gone` again
    """
    assert evaluate(program) == [[1] * 20 + [0], "07" * 16]


@on_simulated_gpus
def test_sleep_of_extreme_lengths(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    program = """
        import torch
        import os
        stream = torch.cuda.Stream()
        for cycles in (10**13, 2**63 - 1, 2**63 - 1):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)
        busy = not stream.query()
        other = torch.cuda.Stream()
        with torch.cuda.stream(other):
            torch.cuda._sleep(-(10**13))
        print(busy, other.query(), flush=True)
        os._exit(0)
    """
    assert run(program, simulated_environment()) == "True True\n"


# Values for the calls in the two tables below. A line of a table is a function and its calls, separated by "|".
# A call is its arguments, "=" and the expected error.
VALUES = """
block, other = made(cuda, "cudaMalloc", MIB), made(cuda, "cudaMalloc", MIB)
pinned, pool_block = made(cuda, "cudaHostAlloc", MIB, c_uint(0)), made(cuda, "cudaMallocAsync", MIB, None)
freed = made(cuda, "cudaMalloc", MIB)
assert cuda("cudaFree", freed) == 0
freed_pinned = made(cuda, "cudaHostAlloc", MIB, c_uint(0))
assert cuda("cudaFreeHost", freed_pinned) == 0
handle = made(cu, "cuMemCreate", 2 * MIB, byref(properties()), 0)
released = made(cu, "cuMemCreate", 2 * MIB, byref(properties()), 0)
assert cu("cuMemRelease", released) == 0
reserved, mapped = made(cu, "cuMemAddressReserve", 4 * MIB, 0, 0, 0), made(cu, "cuMemAddressReserve", 2 * MIB, 0, 0, 0)
assert cu("cuMemMap", mapped, 2 * MIB, 0, handle, 0) == 0
assert cu("cuMemSetAccess", mapped, 2 * MIB, byref(Access(1, 0, 3)), 1) == 0
host_memory = ctypes.create_string_buffer(b"host" * 4096)
host, result, access, foreign = ctypes.addressof(host_memory), c_size_t(), Access(1, 0, 3), 4096
NULL, HUGE, NEGATIVE, WRAPS = None, 2**62, 2**64 - 1, 2**64 - 8
for address in (block, other, pinned, pool_block, mapped):
    assert cuda("cudaMemset", address, 7, MIB) == 0
stream, graph = made(cuda, "cudaStreamCreate"), c_void_p()
assert cuda("cudaStreamBeginCapture", stream, 0) == 0 and cuda("cudaStreamEndCapture", stream, byref(graph)) == 0
not_a_handle, plain_file = ctypes.create_string_buffer(64), os.open(sys.executable, os.O_RDONLY)
"""

DRIVER_CALLS = """
cuMemAlloc_v2: NULL, MIB = 1 | out, 0 = 1 | out, HUGE = 2 | out, NEGATIVE = 2
cuMemAllocManaged: NULL, MIB, c_uint(1) = 1 | out, 0, c_uint(1) = 1 | out, HUGE, c_uint(1) = 2 | out, MIB, c_uint(0) = 1
cuMemFree_v2: 0 = 1 | freed = 1 | foreign = 1 | host = 1 | pinned = 1 | block + 512 = 1 | mapped = 1 | NEGATIVE = 1
cuMemHostAlloc: NULL, MIB, c_uint(0) = 1 | out, 0, c_uint(0) = 1 | out, HUGE, c_uint(0) = 2 | out, NEGATIVE, c_uint(0) = 2
cuMemHostAlloc: out, MIB, c_uint(8) = 1
cuMemFreeHost: NULL = 1 | freed_pinned = 1 | foreign = 1 | host = 1 | block = 1 | pinned + 64 = 1
cuMemHostRegister_v2: NULL, 16, c_uint(0) = 1 | host, 0, c_uint(0) = 1
cuMemHostRegister_v2: host, HUGE, c_uint(0) = 1 | foreign, 16, c_uint(0) = 1
cuMemHostRegister_v2: host, NEGATIVE, c_uint(0) = 1 | pinned, 16, c_uint(0) = 712 | block, 16, c_uint(0) = 712
cuMemHostRegister_v2: host, 16, c_uint(16) = 1 | reserved, 16, c_uint(0) = 1
cuMemHostUnregister: NULL = 713 | host = 713 | pinned = 713 | block = 713 | foreign = 713
cuMemGetInfo_v2: NULL, NULL = 1 | out, NULL = 1 | NULL, out = 1
cuMemcpy: NULL, block, 16 = 1 | block, NULL, 16 = 1 | foreign, block, 16 = 1 | block, foreign, 16 = 1 | freed, block, 16 = 1
cuMemcpy: block, other, HUGE = 1 | block, other, NEGATIVE = 1 | block + MIB - 8, other, 16 = 1 | WRAPS, block, 16 = 1
cuMemcpyHtoD_v2: NULL, host, 16 = 1 | block, NULL, 16 = 1 | block, host, HUGE = 1
cuMemcpyHtoD_v2: freed, host, 16 = 1 | reserved, host, 16 = 1
cuMemcpyDtoH_v2: NULL, block, 16 = 1 | host, NULL, 16 = 1 | host, block, HUGE = 1
cuMemcpyDtoH_v2: host, freed, 16 = 1 | foreign, block, 16 = 1
cuMemsetD32Async: NULL, c_uint(0), 4, NULL = 1 | freed, c_uint(0), 4, NULL = 1 | block, c_uint(0), HUGE, NULL = 1
cuMemsetD32Async: block, c_uint(0), NEGATIVE, NULL = 1 | block + 2, c_uint(0), 4, NULL = 1 | reserved, c_uint(0), 4, NULL = 1
cuStreamWriteValue32_v2: NULL, NULL, c_uint(1), c_uint(0) = 1 | NULL, freed, c_uint(1), c_uint(0) = 1
cuStreamWriteValue32_v2: NULL, block + 1, c_uint(1), c_uint(0) = 1 | NULL, foreign, c_uint(1), c_uint(0) = 1
cuStreamWriteValue32: NULL, NULL, c_uint(1), c_uint(0) = 1 | NULL, block + 1, c_uint(1), c_uint(0) = 1
cuMemGetAddressRange_v2: out, NULL, NULL = 1 | out, NULL, freed = 1 | out, NULL, foreign = 1 | NULL, NULL, block = 0
cuPointerGetAttribute: NULL, c_int(2), block = 1 | out, c_int(2), NULL = 1
cuPointerGetAttribute: out, c_int(2), freed = 1 | out, c_int(-1), block = 1
cuPointerGetAttribute: out, c_int(2), foreign = 1 | out, c_int(1000), block = 1
cuMemAddressReserve: NULL, 2 * MIB, 0, 0, 0 = 1 | out, 0, 0, 0, 0 = 1 | out, 4096, 0, 0, 0 = 1 | out, NEGATIVE, 0, 0, 0 = 1
cuMemAddressReserve: out, 2**62, 0, 0, 0 = 2 | out, 2**64 - 2 * MIB, 4 * MIB, 0, 0 = 2 | out, 2 * MIB, 3 * MIB, 0, 0 = 1
cuMemAddressReserve: out, 2 * MIB, 0, 0, 1 = 1
cuMemAddressFree: NULL, 2 * MIB = 1 | foreign, 2 * MIB = 1 | host, 4096 = 1 | block, MIB = 1 | reserved, 2 * MIB = 1
cuMemAddressFree: reserved + 1, 4 * MIB = 1 | reserved, NEGATIVE = 1 | mapped, 2 * MIB = 1 | reserved, 0 = 1
cuMemCreate: NULL, 2 * MIB, byref(properties()), 0 = 1 | out, 2 * MIB, NULL, 0 = 1 | out, 0, byref(properties()), 0 = 1
cuMemCreate: out, 4096, byref(properties()), 0 = 1 | out, HUGE, byref(properties()), 0 = 2
cuMemCreate: out, 2 * MIB, byref(properties(device=7)), 0 = 101 | out, 2 * MIB, byref(properties(device=-1)), 0 = 101
cuMemCreate: out, 2 * MIB, byref(properties(location_type=9)), 0 = 1
cuMemCreate: out, 2 * MIB, byref(properties(handle_types=8)), 0 = 801
cuMemRelease: NULL = 1 | released = 1 | host = 1 | NEGATIVE = 1 | block = 1
cuMemMap: reserved, 2 * MIB, 0, NULL, 0 = 1 | reserved, 2 * MIB, 0, released, 0 = 1 | reserved, 2 * MIB, 0, host, 0 = 1
cuMemMap: reserved, 4 * MIB, 0, handle, 0 = 1 | reserved, 2 * MIB, 4096, handle, 0 = 1 | reserved, 2 * MIB, 0, handle, 1 = 1
cuMemMap: mapped, 2 * MIB, 0, handle, 0 = 1 | block, 2 * MIB, 0, handle, 0 = 1 | NULL, 2 * MIB, 0, handle, 0 = 1
cuMemUnmap: NULL, 2 * MIB = 1 | reserved, 2 * MIB = 1 | mapped, MIB = 1
cuMemUnmap: mapped, NEGATIVE = 1 | block, MIB = 1 | mapped + 1, 2 * MIB = 1
cuMemSetAccess: NULL, 2 * MIB, byref(access), 1 = 1 | mapped, 2 * MIB, NULL, 1 = 1 | reserved, 2 * MIB, byref(access), 1 = 1
cuMemSetAccess: mapped, HUGE, byref(access), 1 = 1 | block, MIB, byref(access), 1 = 1
cuMemGetAllocationGranularity: NULL, byref(properties()), c_int(0) = 1 | out, NULL, c_int(0) = 1
cuMemGetAllocationGranularity: out, byref(properties()), c_int(7) = 1
cuMemExportToShareableHandle: NULL, handle, c_int(1), 0 = 1 | out, NULL, c_int(1), 0 = 1 | out, released, c_int(1), 0 = 1
cuMemExportToShareableHandle: out, handle, c_int(2), 0 = 801 | out, handle, c_int(1), 1 = 1 | out, host, c_int(1), 0 = 1
cuMemImportFromShareableHandle: NULL, 0, c_int(1) = 1 | out, NEGATIVE, c_int(1) = 1 | out, 9999, c_int(1) = 1
cuMemImportFromShareableHandle: out, plain_file, c_int(1) = 1 | out, 0, c_int(2) = 801
cuMemRetainAllocationHandle: NULL, mapped = 1 | out, NULL = 1 | out, block = 1 | out, reserved = 1 | out, foreign = 1
cuCtxGetDevice: NULL = 1
cuDeviceGet: NULL, c_int(0) = 1 | out, c_int(9) = 101
cuDeviceGetUuid_v2: NULL, c_int(0) = 1
cuDeviceTotalMem_v2: NULL, c_int(0) = 1
cuDeviceComputeCapability: NULL, out, c_int(0) = 1
cuGetErrorName: c_int(1), NULL = 1
cuMemGetAllocationPropertiesFromHandle: NULL, handle = 1 | out, NULL = 1 | out, released = 1 | out, host = 1
"""

RUNTIME_CALLS = """
cudaMalloc: NULL, MIB = 1 | out, HUGE = 2 | out, NEGATIVE = 2 | out, 0 = 0
cudaMallocManaged: NULL, MIB, c_uint(1) = 1 | out, 0, c_uint(1) = 1 | out, HUGE, c_uint(1) = 2 | out, MIB, c_uint(9) = 1
cudaFree: NULL = 0 | freed = 1 | foreign = 1 | host = 1 | pinned = 1 | block + 512 = 1 | pool_block + 512 = 1 | NEGATIVE = 1
cudaHostAlloc: NULL, MIB, c_uint(0) = 1 | out, HUGE, c_uint(0) = 2 | out, NEGATIVE, c_uint(0) = 2 | out, MIB, c_uint(8) = 1
cudaMallocHost: NULL, MIB = 1 | out, HUGE = 2
cudaFreeHost: NULL = 0 | freed_pinned = 1 | foreign = 1 | host = 1 | block = 1 | pinned + 64 = 1
cudaHostRegister: NULL, 16, c_uint(0) = 1 | host, 0, c_uint(0) = 1
cudaHostRegister: foreign, 16, c_uint(0) = 1 | host, NEGATIVE, c_uint(0) = 1
cudaHostRegister: block, 16, c_uint(0) = 712 | host, 16, c_uint(64) = 1
cudaHostUnregister: NULL = 713 | host = 713 | block = 713
cudaHostGetDevicePointer: NULL, pinned, c_uint(0) = 1 | out, NULL, c_uint(0) = 1 | out, host, c_uint(0) = 1
cudaHostGetDevicePointer: out, block, c_uint(0) = 1 | out, pinned, c_uint(1) = 1
cudaMemGetInfo: NULL, NULL = 1 | out, NULL = 1 | NULL, out = 1
cudaPointerGetAttributes: NULL, block = 1 | attributes, NULL = 0 | attributes, freed = 0 | attributes, NEGATIVE = 0
cudaIpcGetMemHandle: NULL, block = 1 | attributes, NULL = 1 | attributes, freed = 1 | attributes, pinned = 1
cudaIpcCloseMemHandle: NULL = 1 | block = 1 | freed = 1 | host = 1 | foreign = 1
cudaMallocAsync: NULL, MIB, NULL = 1 | out, HUGE, NULL = 2 | out, NEGATIVE, NULL = 2 | out, MIB, not_a_handle = 400
cudaFreeAsync: NULL, NULL = 0 | freed, NULL = 1 | foreign, NULL = 1
cudaFreeAsync: host, NULL = 1 | pinned, NULL = 1 | pool_block + 8, NULL = 1
cudaFreeAsync: pool_block, not_a_handle = 400
cudaMemcpy: NULL, block, 16, c_int(4) = 1 | block, NULL, 16, c_int(1) = 1 | block, foreign, 16, c_int(1) = 1
cudaMemcpy: block, other, HUGE, c_int(3) = 1 | block, other, NEGATIVE, c_int(3) = 1 | block, host, 16, c_int(5) = 21
cudaMemcpy: block, host, 16, c_int(-1) = 21 | freed, block, 16, c_int(3) = 1 | block + MIB - 8, host, 16, c_int(1) = 1
cudaMemcpyAsync: NULL, block, 16, c_int(4), NULL = 1 | block, NULL, 16, c_int(1), NULL = 1
cudaMemcpyAsync: block, host, 16, c_int(9), NULL = 21
cudaMemcpyAsync: block, other, NEGATIVE, c_int(3), NULL = 1 | block, host, 16, c_int(1), not_a_handle = 400
cudaMemcpy2DAsync: block, 16, NULL, 16, 16, 2, c_int(1), NULL = 1 | block, 8, host, 16, 16, 2, c_int(1), NULL = 12
cudaMemcpy2DAsync: block, 16, host, 8, 16, 2, c_int(1), NULL = 12 | block, HUGE, host, HUGE, 16, 9, c_int(1), NULL = 12
cudaMemcpy2D: NULL, 16, host, 16, 16, 2, c_int(1) = 1 | block, 8, host, 16, 16, 2, c_int(1) = 12
cudaMemcpy2D: block, 16, host, 16, 16, 2, c_int(7) = 21 | block, 16, host, 16, 16, NEGATIVE, c_int(1) = 1
cudaMemcpy2D: freed, 16, host, 16, 16, 2, c_int(1) = 1 | block, NEGATIVE, host, NEGATIVE, 16, 2, c_int(1) = 12
cudaMallocPitch: NULL, out, 16, 16 = 1 | out, NULL, 16, 16 = 1 | out, attributes, HUGE, 16 = 1
cudaMallocPitch: out, attributes, 16, NEGATIVE = 2
cudaMalloc3D: NULL, 16, 16, 16 = 1
cudaMemset2D: NULL, 16, c_int(0), 16, 2 = 1 | block, 8, c_int(0), 16, 2 = 1 | block, 16, c_int(0), 16, NEGATIVE = 1
cudaMemset2D: freed, 16, c_int(0), 16, 2 = 1 | block, HUGE, c_int(0), 16, 2 = 1 | foreign, 16, c_int(0), 16, 2 = 1
cudaMemset2DAsync: block, 16, c_int(0), 16, 2, not_a_handle = 400 | block, 8, c_int(0), 16, 2, NULL = 1
cudaMemcpy3D: NULL = 1
cudaMemcpy3DAsync: NULL, NULL = 1
cudaMemcpy3DPeer: NULL = 1
cudaMemcpyPeer: block, c_int(0), other, c_int(9), 16 = 101 | NULL, c_int(0), other, c_int(0), 16 = 1
cudaMallocFromPoolAsync: out, 16, NULL, NULL = 1 | out, 16, host, NULL = 1
cudaDeviceSetMemPool: c_int(0), host = 1 | c_int(9), host = 101
cudaHostGetFlags: NULL, host = 1 | out, host = 1
cudaStreamGetFlags: stream, NULL = 1 | not_a_handle, out = 400
cudaDeviceSetCacheConfig: c_int(4) = 1 | c_int(-1) = 1
cudaDeviceGetP2PAttribute: out, c_int(0), c_int(0), c_int(1) = 101 | NULL, c_int(2), c_int(0), c_int(0) = 1
cudaMemcpy2DAsync: block, 16, host, 16, 16, NEGATIVE, c_int(1), NULL = 1 | block, 16, host, 16, 16, 2, c_int(7), NULL = 21
cudaMemcpyPeerAsync: block, c_int(0), other, c_int(9), 16, NULL = 101 | block, c_int(-1), other, c_int(0), 16, NULL = 101
cudaMemcpyPeerAsync: NULL, c_int(0), other, c_int(0), 16, NULL = 1 | block, c_int(0), freed, c_int(0), 16, NULL = 1
cudaMemset: NULL, 0, 16 = 1 | freed, 0, 16 = 1 | foreign, 0, 16 = 1
cudaMemset: block, 0, HUGE = 1 | block, 0, NEGATIVE = 1 | WRAPS, 0, 16 = 1
cudaMemsetAsync: NULL, 0, 16, NULL = 1 | freed, 0, 16, NULL = 1
cudaMemsetAsync: block, 0, NEGATIVE, NULL = 1 | block, 0, 16, not_a_handle = 400
cudaDeviceGetDefaultMemPool: NULL, c_int(0) = 1 | out, c_int(9) = 101 | out, c_int(-1) = 101
cudaMemPoolGetAttribute: NULL, c_int(4), out = 1 | host, c_int(4), out = 1 | block, c_int(4), out = 1
cudaMemPoolSetAttribute: NULL, c_int(4), out = 1 | host, c_int(4), out = 1
cudaMemPoolTrimTo: NULL, 0 = 1 | host, 0 = 1
cudaMemPoolSetAccess: NULL, NULL, 0 = 1
cudaGetSymbolAddress: out, host = 13 | out, NULL = 13
cudaMemcpyToSymbol: host, host, 16, 0, c_int(1) = 13
cudaGetDevice: NULL = 1
cudaGetDeviceCount: NULL = 1
cudaRuntimeGetVersion: NULL = 1
cudaDriverGetVersion: NULL = 1
cudaGetDeviceProperties: NULL, c_int(0) = 1
cudaDeviceCanAccessPeer: NULL, c_int(0), c_int(0) = 1
cudaStreamGetPriority: NULL, NULL = 1
cudaDeviceGetGraphMemAttribute: c_int(9), c_int(0), out = 101 | c_int(0), c_int(0), NULL = 1
cudaDeviceSetGraphMemAttribute: c_int(9), c_int(0), out = 101 | c_int(0), c_int(0), NULL = 1 | c_int(-1), c_int(0), out = 101
cudaStreamBeginCapture: not_a_handle, c_int(0) = 400 | stream, c_int(3) = 1 | stream, c_int(-1) = 1
cudaStreamBeginCaptureToGraph: stream, NULL, NULL, NULL, 0, c_int(0) = 1 | stream, graph, NULL, NULL, 0, c_int(3) = 1
cudaStreamEndCapture: stream, NULL = 1 | not_a_handle, out = 400 | stream, out = 401
cudaStreamIsCapturing: stream, NULL = 1 | not_a_handle, out = 400
cudaThreadExchangeStreamCaptureMode: NULL = 1 | byref(c_int(3)) = 1 | byref(c_int(-1)) = 1
cudaGraphInstantiate: NULL, graph, 0 = 1 | out, NULL, 0 = 1
cudaGraphInstantiateWithFlags: NULL, graph, 0 = 1 | out, NULL, 0 = 1
cudaGraphDestroy: NULL = 1
cudaGraphExecDestroy: NULL = 1
cudaGraphGetNodes: NULL, NULL, out = 1 | graph, NULL, NULL = 1
cudaGraphNodeGetDependencies: NULL, NULL, out, out = 1
cudaGraphDebugDotPrint: NULL, b"/dev/null", c_uint(0) = 1 | graph, NULL, c_uint(0) = 1 | graph, b"/no/folder", c_uint(0) = 1
cudaUserObjectCreate: NULL, NULL, host, c_uint(1), c_uint(1) = 1 | out, NULL, NULL, c_uint(1), c_uint(1) = 1
cudaUserObjectCreate: out, NULL, host, c_uint(0), c_uint(1) = 1
cudaUserObjectRelease: NULL, c_uint(1) = 1
cudaGraphRetainUserObject: NULL, host, c_uint(1), c_uint(0) = 1 | graph, NULL, c_uint(1), c_uint(0) = 1
cudaGraphRetainUserObject: graph, host, c_uint(0), c_uint(0) = 1
cudaLaunchHostFunc: stream, NULL, NULL = 1 | not_a_handle, host, NULL = 400
cudaStreamAddCallback: stream, NULL, NULL, c_uint(0) = 1 | stream, host, NULL, c_uint(1) = 1
"""


@pytest.mark.parametrize(
    ("function", "calls", "major"), [("cu", DRIVER_CALLS, 13), ("cuda", RUNTIME_CALLS, 12), ("cuda", RUNTIME_CALLS, 13)]
)
def test_wrong_arguments_give_cudas_error(function: str, calls: str, major: int) -> None:
    lines = [line.partition(": ") for line in calls.strip().splitlines()]
    table = [(name, *call.split(" = ")) for name, _, rest in lines for call in rest.split(" | ")]
    program = (
        VALUES
        + f"""
import builtins
out, attributes = ctypes.create_string_buffer(256), ctypes.create_string_buffer(256)
before = free_bytes(), len(os.listdir("/proc/self/fd"))
wrong = []
for name, arguments, expected in {table!r}:
    sys.stderr.write(f"{{name}}({{arguments}})\\n")
    code = {function}(name, *builtins.eval(f"[{{arguments}}]"))
    if code != int(expected):
        wrong.append([name, arguments, code])
runtime.cudaGetLastError()
after = free_bytes(), len(os.listdir("/proc/self/fd"))
kept = [bytes_at(address, MIB) == b"\\7" * MIB for address in (block, other, pinned, pool_block, mapped)]
codes = [cuda("cudaFree", block), cuda("cudaFree", other), cuda("cudaFreeHost", pinned),
         cuda("cudaFreeAsync", pool_block, None), cu("cuMemUnmap", mapped, 2 * MIB), cu("cuMemRelease", handle),
         cu("cuMemAddressFree", reserved, 4 * MIB), cu("cuMemAddressFree", mapped, 2 * MIB)]
report(wrong, [new - old for new, old in zip(after, before)], kept, codes, host_memory.raw[:16384] == b"host" * 4096)
""".replace("\\\\", "\\")
    )
    assert evaluate(program, major) == [[], [0, 0], [True] * 5, [0] * 8, True]
