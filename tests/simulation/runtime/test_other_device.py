"""Functions of the simulated driver and runtime act on the device that they are given, or on the current one."""

from __future__ import annotations

from typing import Any

from tests.simulation.driver.test_memory_misuse import evaluate
from tests.support.simulation import linux_only

pytestmark = linux_only

# The devices differ in all that a function can tell.
MACHINE: dict[str, Any] = {"gpus": 2, "memory": ["1GiB", "2GiB"], "name": ["A10", "L4"], "capability": ["8.6", "8.9"]}

PROGRAM = """
def text(function, name, *arguments):
    target = ctypes.create_string_buffer(4096)
    assert function(name, target, *arguments) == 0, name
    return target.raw.rstrip(bytes(1)).hex()

def set_device(device):
    assert cuda("cudaSetDevice", c_int(device)) == 0

def current(function=cuda, name="cudaGetDevice"):
    device = c_int(-1)
    assert function(name, byref(device)) == 0
    return device.value

def current_after(function, name, argument):
    before = current()
    assert function(name, argument) == 0
    after = current()
    set_device(before)
    return after

def free_of_each():
    before, free = current(), []
    for device in range(2):
        set_device(device)
        free.append(free_bytes())
    set_device(before)
    return free

def charged(function, name, *arguments, free):
    "Return how much memory of each device an allocation takes."
    before = free_of_each()
    address = made(function, name, *arguments)
    after = free_of_each()
    assert free(address) == 0
    return [old - new for old, new in zip(before, after)]

def location_of(function, name, *arguments, free, pointer=(c_int * 99)()):
    address = made(function, name, *arguments)
    assert cuda("cudaPointerGetAttributes", pointer, address) == 0
    assert free(address) == 0
    return pointer[1]

def recorded_location(device, read=properties(9)):
    handle = made(cu, "cuMemCreate", 2 * MIB, byref(properties(device)), 0)
    assert cu("cuMemGetAllocationPropertiesFromHandle", byref(read), handle) == 0
    assert cu("cuMemRelease", handle) == 0
    return read.location_id

def cuda_free(address):
    return cuda("cudaFree", address)

def cu_free(address):
    return cu("cuMemFree_v2", address)

def free_async(address):
    return cuda("cudaFreeAsync", address, None)

def release(handle):
    return cu("cuMemRelease", handle)

given, of_current = {given!r}, {of_current!r}
rows = {{}}
for name, expression in (*given.items(), *of_current.items()):
    function = eval("lambda d: " + expression)
    rows[name] = []
    for device in range(2):
        set_device(device)
        rows[name].append([function(0), function(1)] if name in given else function(None))
report(rows)
"""

# A call of each function that takes a device, d.
GIVEN = {
    "cuDeviceGet": "current(lambda *a: cu(*a, c_int(d)), 'cuDeviceGet')",
    "cuDeviceGetName": "text(cu, 'cuDeviceGetName', c_int(99), c_int(d))",
    "cuDeviceGetUuid": "text(cu, 'cuDeviceGetUuid', c_int(d))",
    "cuDeviceGetUuid_v2": "text(cu, 'cuDeviceGetUuid_v2', c_int(d))",
    "cuDeviceTotalMem_v2": "text(cu, 'cuDeviceTotalMem_v2', c_int(d))",
    "cuDeviceComputeCapability": "text(lambda name, out: cu(name, byref(c_int()), out, c_int(d)), 'cuDeviceComputeCapability')",
    "cuDeviceGetPCIBusId": "text(cu, 'cuDeviceGetPCIBusId', c_int(99), c_int(d))",
    "cuDeviceGetAttribute": "text(cu, 'cuDeviceGetAttribute', c_int(33), c_int(d))",
    "cuDevicePrimaryCtxRetain": "made(cu, 'cuDevicePrimaryCtxRetain', c_int(d))",
    "cuCtxSetCurrent": "current_after(cu, 'cuCtxSetCurrent', made(cu, 'cuDevicePrimaryCtxRetain', c_int(d)))",
    "cuMemCreate": "charged(cu, 'cuMemCreate', 2 * MIB, byref(properties(d)), 0, free=release)",
    "cuMemGetAllocationPropertiesFromHandle": "recorded_location(d)",
    "cudaGetDeviceProperties": "text(cuda, 'cudaGetDeviceProperties', c_int(d))",
    "cudaDeviceGetAttribute": "text(cuda, 'cudaDeviceGetAttribute', c_int(33), c_int(d))",
    "cudaDeviceGetPCIBusId": "text(cuda, 'cudaDeviceGetPCIBusId', c_int(99), c_int(d))",
    "cudaDeviceCanAccessPeer": "text(cuda, 'cudaDeviceCanAccessPeer', c_int(d), c_int(0))",
    "cudaDeviceCanAccessPeer, the peer": "text(cuda, 'cudaDeviceCanAccessPeer', c_int(0), c_int(d))",
    "cudaDeviceGetDefaultMemPool": "made(cuda, 'cudaDeviceGetDefaultMemPool', c_int(d))",
    "cudaSetDevice": "current_after(cuda, 'cudaSetDevice', c_int(d))",
}
# A call of each function that acts on the current device.
OF_CURRENT = {
    "cudaGetDevice": "current()",
    "cuCtxGetDevice": "current(cu, 'cuCtxGetDevice')",
    "cuCtxGetCurrent": "made(cu, 'cuCtxGetCurrent')",
    "cudaMemGetInfo": "text(cuda, 'cudaMemGetInfo', byref(c_size_t()))",
    "cuMemGetInfo_v2": "text(cu, 'cuMemGetInfo_v2', byref(c_size_t()))",
    "cudaMalloc": "charged(cuda, 'cudaMalloc', 2 * MIB, free=cuda_free)",
    "cudaMalloc, the address": "location_of(cuda, 'cudaMalloc', 2 * MIB, free=cuda_free)",
    "cudaMallocManaged": "charged(cuda, 'cudaMallocManaged', 2 * MIB, c_uint(1), free=cuda_free)",
    "cudaMallocAsync": "location_of(cuda, 'cudaMallocAsync', 2 * MIB, None, free=free_async)",
    "cudaMallocAsync, the pool": "charged(cuda, 'cudaMallocAsync', 2 * MIB, None, free=free_async)",
    "cuMemAlloc_v2": "charged(cu, 'cuMemAlloc_v2', 2 * MIB, free=cu_free)",
    "cuMemAllocManaged": "charged(cu, 'cuMemAllocManaged', 2 * MIB, c_uint(1), free=cu_free)",
    "cudaFuncGetAttributes": "text(cuda, 'cudaFuncGetAttributes', 4096)",
}


def test_functions_act_on_their_device() -> None:
    (rows,) = evaluate(PROGRAM.format(given=GIVEN, of_current=OF_CURRENT), **MACHINE)
    assert len(rows) == len(GIVEN) + len(OF_CURRENT)
    for name in GIVEN:
        first, second = rows[name]
        assert first == second, name
        assert first[0] != first[1], f"{name}: the devices do not differ, so the test would notice nothing"
    for name in OF_CURRENT:
        assert rows[name][0] != rows[name][1], name
