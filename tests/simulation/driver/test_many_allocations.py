"""More allocations than a process may have mappings (vm.max_map_count)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import run, simulated_environment
from tests.support.simulation import linux_only
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = linux_only

LIMIT = Path("/proc/sys/vm/max_map_count")

PROGRAM = """
import ctypes, json, mmap, os, sys
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
name, count, size = sys.argv[1], int(sys.argv[2]), c_size_t(4000)
driver, runtime = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libcudart.so.13")
allocate = {"device": lambda p: driver.cuMemAlloc_v2(p, size), "managed": lambda p: driver.cuMemAllocManaged(p, size, 1),
            "pinned": lambda p: driver.cuMemHostAlloc(p, size, 0)}[name]
free = driver.cuMemFreeHost if name == "pinned" else driver.cuMemFree_v2

def mapping_count():
    with open("/proc/self/maps") as maps:
        return sum(1 for _ in maps)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def free_memory():
    free, total = c_size_t(), c_size_t()
    assert runtime.cudaMemGetInfo(byref(free), byref(total)) == 0
    return free.value

assert runtime.cudaFree(None) == 0
unused, mappings = free_memory(), mapping_count()
pointers = (c_uint64 * count)()
at = ctypes.addressof(pointers)
for i in range(count):
    assert allocate(c_void_p(at + 8 * i)) == 0, i
assert mapping_count() - mappings < 20_000
assert len(set(pointers)) == count
mmap.mmap(-1, 1 << 20).close()
looked_at = [0, 1, count // 2, count - 2, count - 1]
for i in looked_at:  # every byte, from the host's side of the simulation
    assert ctypes.string_at(pointers[i], 4000) == bytes(4000)
    ctypes.memset(pointers[i], 1 + i % 200, 4000)
for i in range(count):
    if i not in looked_at:
        ctypes.memset(pointers[i], 255, 4000)
full = resident()
for i in looked_at:
    assert ctypes.string_at(pointers[i], 4000) == bytes([1 + i % 200]) * 4000
for i in range(count):
    if i not in looked_at:
        assert free(c_void_p(pointers[i])) == 0
assert full - resident() > 0.9 * 4096 * count
freed, host = pointers[count - 3], ctypes.create_string_buffer(4000)
codes = [runtime.cudaMemcpy(c_void_p(freed), host, size, 4), runtime.cudaMemset(c_void_p(freed), 0, size),
         free(c_void_p(freed)), runtime.cudaMemcpy(c_void_p(pointers[count - 1] + 1), host, size, 4)]
again = (c_uint64 * 1)()
assert allocate(ctypes.byref(again)) == 0
assert ctypes.string_at(again[0], 4000) == bytes(4000)
for i in looked_at:
    assert ctypes.string_at(pointers[i], 4000) == bytes([1 + i % 200]) * 4000
    assert free(c_void_p(pointers[i])) == 0
assert free(c_void_p(again[0])) == 0
assert mapping_count() - mappings < 100
assert free_memory() == unused
print(codes)
"""


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("device", 17_000),
        pytest.param("managed", 17_000, marks=pytest.mark.slow),
        pytest.param("pinned", 17_000, marks=pytest.mark.slow),
        *(pytest.param(kind, 100_000, marks=[pytest.mark.slow, pytest.mark.exhaustive]) for kind in ("device", "pinned")),
    ],
)
def test_allocations_beyond_the_limit_of_mappings(kind: str, count: int) -> None:
    if int(LIMIT.read_text()) > 65530:
        count = max(count, int(LIMIT.read_text()) // 4 + 1000)
    assert run(PROGRAM, simulated_environment(gpus=1), kind, str(count)) == "[1, 1, 1, 1]\n"


@pytest.mark.slow
def test_memory_of_an_arena_is_shared_with_another_process() -> None:
    program = """
import ctypes, os, subprocess, sys
from ctypes import byref, c_size_t, c_uint64, c_void_p

class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]

runtime = ctypes.CDLL("libcudart.so.13")
if len(sys.argv) > 1:
    address = c_void_p()
    handle = Handle.from_buffer_copy(bytes.fromhex(sys.argv[1]))
    print(runtime.cudaIpcOpenMemHandle(byref(address), handle, 1), end=" ")
    if address.value:
        print(ctypes.string_at(address.value, 9000) == b"7" * 9000)
        ctypes.memset(address.value, ord("8"), 9000)
else:
    address = c_void_p()
    for _ in range(17_000):
        assert runtime.cudaMalloc(byref(address), c_size_t(9000)) == 0
    ctypes.memset(address.value, ord("7"), 9000)
    handle = Handle()
    assert runtime.cudaIpcGetMemHandle(byref(handle), address) == 0
    child = [sys.executable, "-c", os.environ["PROGRAM"], bytes(handle).hex()]
    print(subprocess.run(child, capture_output=True, text=True).stdout, end="")
    print(ctypes.string_at(address.value, 9000) == b"8" * 9000)
    assert runtime.cudaFree(address) == 0
    print(subprocess.run(child, capture_output=True, text=True).stdout)
"""
    environment = simulated_environment({"PROGRAM": program}, gpus=1)
    invalid_handle = 400
    assert run(program, environment).split() == ["0", "True", "True", str(invalid_handle)]


@pytest.mark.slow
@pytest.mark.exhaustive
@needs_cuda_torch
def test_a_program_without_torchs_cache_keeps_many_tensors() -> None:
    program = """
import mmap, torch
kept = [torch.full((3,), i, device="cuda") for i in range(100_000)]
mmap.mmap(-1, 1 << 22).close()
print([kept[i].tolist() for i in (0, 50_000, 99_999)])
del kept[::2]
print(kept[0].tolist(), (kept[-1] + 1).tolist())
"""
    environment = simulated_environment({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, gpus=1)
    assert run(program, environment, timeout=400) == (
        "[[0, 0, 0], [50000, 50000, 50000], [99999, 99999, 99999]]\n[1, 1, 1] [100000, 100000, 100000]\n"
    )
