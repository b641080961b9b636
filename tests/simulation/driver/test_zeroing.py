"""Zeroing device memory returns whole pages to the system, and private and shared memory read as zero afterwards."""

from __future__ import annotations

import pytest

from accelerator._machine import torch_build
from tests.support import run, simulated_environment
from tests.support.simulation import MIB, allocator_variables, evaluate, linux_only

pytestmark = linux_only

BUILD = torch_build.read()
needs_cuda_torch = pytest.mark.skipif(BUILD is None or BUILD.cuda is None, reason="needs a CUDA build of torch")

RESIDENT = """
def resident():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) << 10
"""


@needs_cuda_torch
@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
@pytest.mark.parametrize("shared", [False, True])
def test_zeroing_a_tensor(settings: str, shared: bool) -> None:
    # Sharing copies the memory to a file, so the shared tensor is smaller.
    size = 32 * MIB if shared else 2**36
    program = (
        "import torch\n"
        + RESIDENT
        + f"""
torch.cuda.init()
held = torch.empty({size}, dtype=torch.uint8, device="cuda")
if {shared}:
    held.untyped_storage()._share_cuda_()
part = held[-{32 * MIB}:]
part.copy_(torch.ones(1, dtype=torch.uint8).expand(part.shape))
before = resident()
held[1:].zero_()
freed = before - resident()
print(part[1:].cpu().any().item(), freed > 24 << 20)
"""
    )
    done = run(program, simulated_environment(allocator_variables(settings), memory="80GiB"))
    assert done == "0 True\n"


def test_zeroing_private_memory() -> None:
    program = (
        RESIDENT
        + f"""
SIZE = {256 * MIB}
cuda, pointer = allocate(SIZE)
def set_bytes(offset, value, size):
    assert cuda.cuMemsetD32Async(ctypes.c_uint64(pointer.value + offset), value, ctypes.c_size_t(size // 4), None) == 0
def bytes_at(offset, size):
    return ctypes.string_at(pointer.value + offset, size)
start = resident()
set_bytes(0, 0x01010101, SIZE)
full = resident()
set_bytes(100, 0, SIZE - 200)
empty = resident()
report([full - start > 200 << 20, empty - start < 16 << 20, bytes_at(96, 8).hex(), bytes_at(SIZE - 104, 8).hex(),
        bytes_at(100, SIZE - 200).count(0) < SIZE - 200])
"""
    )
    assert evaluate(program) == [True, True, "01010101" + 8 * "0", 8 * "0" + "01010101", False]
