"""What memory is charged, exactly: sizes that are no multiple of a page, exact fits, neighbors, and failing second steps.

The programs call the driver and the runtime through ctypes, each in its own process.
"""

from __future__ import annotations

import os

import pytest

from tests.simulation.driver.test_memory_misuse import evaluate
from tests.support.simulation import MIB, linux_only

pytestmark = linux_only

PAGE = 4096
HOST_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
SIZES = (1, 511, 512, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 7, MIB - 1, MIB + 1)
# Statements that allocate `size` bytes at `address`, and that free them.
KINDS = {
    "device": ("made(cuda, 'cudaMalloc', size)", "cuda('cudaFree', address)"),
    "driver": ("made(cu, 'cuMemAlloc_v2', size)", "cu('cuMemFree_v2', address)"),
    "managed": ("made(cuda, 'cudaMallocManaged', size, c_uint(1))", "cuda('cudaFree', address)"),
    "pool": ("made(cuda, 'cudaMallocAsync', size, None)", "cuda('cudaFreeAsync', address, None)"),
    "pinned": ("made(cuda, 'cudaHostAlloc', size, c_uint(0))", "cuda('cudaFreeHost', address)"),
}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "pinned"])
def test_freeing_returns_what_was_charged(kind: str) -> None:
    allocate, free = KINDS[kind]
    program = f"""
        before, after, charged = free_bytes(), [], []
        for size in {SIZES}:
            address = {allocate}
            charged.append(before - free_bytes())
            assert {free} == 0
            after.append(free_bytes() - before)
        report(charged, after)
    """
    charged, after = evaluate(program, memory="1GiB")
    pages = [(size + PAGE - 1) // PAGE * PAGE for size in SIZES]
    assert charged == pages
    assert after == [0] * len(SIZES)


def test_memory_can_be_filled_exactly() -> None:
    program = f"""
        total = 64 * MIB
        whole = c_void_p()
        sizes = (total, total - {PAGE - 1}, total + 1, total - {PAGE}, 1, {PAGE + 1})
        codes = []
        for size in sizes[:3]:
            codes.append(cuda("cudaMalloc", byref(whole), size))
            if codes[-1] == 0:
                assert cuda("cudaFree", whole) == 0
        kept = made(cuda, "cudaMalloc", sizes[3])
        codes.append(cuda("cudaMalloc", byref(whole), sizes[5]))
        codes.append(cuda("cudaMalloc", byref(whole), sizes[4]))
        codes.append(cuda("cudaMalloc", byref(c_void_p()), 1))
        report(codes)
    """
    assert evaluate(program, memory="64MiB") == [[0, 0, 2, 2, 0, 2]]


@pytest.mark.parametrize("kind", KINDS)
def test_failed_mapping_is_not_charged(kind: str) -> None:
    # The address space is too small for the block, and the charge has been made before the mapping.
    allocate, free = KINDS[kind]
    allocation = allocate.replace("made(", "attempt(")
    program = f"""
        import resource
        def attempt(function, name, *arguments):
            return function(name, byref(c_void_p()), *arguments)
        size = 48 * MIB
        before = free_bytes()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        in_use = int(open("/proc/self/statm").read().split()[0]) * {PAGE}
        resource.setrlimit(resource.RLIMIT_AS, (in_use + 8 * MIB, hard))
        codes = [{allocation} for _ in range(3)]
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        after = free_bytes()
        size = {HOST_MEMORY if kind == "pinned" else 64 * MIB}
        address = {allocate}
        codes.append({free})
        report(codes, after - before)
    """
    assert evaluate(program, memory="64MiB") == [[2, 2, 2, 0], 0]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_pinned_memory_is_released_in_full(count: int) -> None:
    allocate, free = KINDS["pinned"]
    program = f"""
        size = {HOST_MEMORY // PAGE // count * PAGE} - 1
        codes = []
        for _ in range(3):
            addresses = []
            for _ in range({count}):
                addresses.append({allocate})
            codes.append(cuda("cudaHostAlloc", byref(c_void_p()), MIB, c_uint(0)))
            codes += [{free} for address in addresses]
        report(codes)
    """
    assert evaluate(program) == [([2] + [0] * count) * 3]


def test_registered_ranges_may_touch_and_not_overlap() -> None:
    program = f"""
        buffer = mmap.mmap(-1, 8 * {PAGE})
        base = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        def register(start, size):
            code = cuda("cudaHostRegister", base + start, size, c_uint(0))
            return code
        middle = register(3000, 1000)
        beside = [register(2000, 1000), register(4000, 1), register(4001, 1)]
        overlapping = [register(start, size) for start, size in
                       [(2999, 2), (3999, 1), (3000, 1), (3500, 10), (0, 8 * {PAGE}), (4001, 2), (1999, 2), (0, 2001)]]
        codes = [cuda("cudaHostUnregister", base + start) for start in (3000, 2000, 4000, 4001)]
        report(middle, beside, overlapping, codes, register(0, 8 * {PAGE}))
    """
    assert evaluate(program) == [0, [0, 0, 0], [712] * 8, [0] * 4, 0]


def test_mappings_may_touch_and_not_overlap() -> None:
    program = """
        SIZE = 2 * MIB
        base = made(cu, "cuMemAddressReserve", 8 * SIZE, 0, 0, c_uint64(0))
        one, two = (made(cu, "cuMemCreate", size, byref(properties()), c_uint64(0)) for size in (SIZE, 2 * SIZE))
        def map_at(index, handle, size):
            return cu("cuMemMap", base + index * SIZE, size, 0, c_void_p(handle), c_uint64(0))
        codes = [map_at(3, two, 2 * SIZE), map_at(2, one, SIZE), map_at(5, one, SIZE)]
        overlapping = [map_at(index, two, 2 * SIZE) for index in (1, 2, 4, 5)] + [map_at(4, one, SIZE)]
        last = [map_at(7, one, SIZE), map_at(7, two, 2 * SIZE)]
        report(codes, overlapping, last)
    """
    assert evaluate(program, memory="1GiB") == [[0] * 3, [1] * 5, [0, 1]]


class TestPools:
    """Freed blocks stay in the pool up to its release threshold, and leave it one by one."""

    PROGRAM = """
pool = made(cuda, "cudaDeviceGetDefaultMemPool", c_int(0))
def attribute(number, value=None):
    bytes = c_uint64(value or 0)
    name = "cudaMemPoolGetAttribute" if value is None else "cudaMemPoolSetAttribute"
    assert cuda(name, pool, c_int(number), byref(bytes)) == 0
    return bytes.value // MIB
def reserved_and_used():
    return [attribute(5), attribute(7)]
total = free_bytes()
def charged():
    return (total - free_bytes()) // MIB
attribute(4, 2**40)
blocks = [made(cuda, "cudaMallocAsync", size * MIB, None) for size in (1, 2, 4)]
"""

    @pytest.mark.parametrize(("keep", "left"), [(0, 0), (1, 1), (2, 1), (3, 3), (6, 3), (7, 7), (8, 7)])
    def test_trimming_releases_the_largest_blocks(self, keep: int, left: int) -> None:
        program = f"""
figures = [reserved_and_used(), charged()]
assert not any(cuda("cudaFreeAsync", block, None) for block in blocks)
figures += [reserved_and_used(), charged()]
assert cuda("cudaMemPoolTrimTo", pool, {keep} * MIB) == 0
report(figures, reserved_and_used(), charged())
"""
        expected = [[[7, 7], 7, [7, 0], 7], [left, 0], left]
        assert evaluate(self.PROGRAM + program, memory="64MiB") == expected

    def test_exhausted_memory_releases_every_spare_block(self) -> None:
        program = """
assert not any(cuda("cudaFreeAsync", block, None) for block in blocks)
large = made(cuda, "cudaMallocAsync", 60 * MIB, None)
report(reserved_and_used(), charged(), cuda("cudaMallocAsync", byref(c_void_p()), 5 * MIB, None))
"""
        assert evaluate(self.PROGRAM + program, memory="64MiB") == [[60, 60], 60, 2]

    def test_spare_blocks_are_reused_by_size(self) -> None:
        program = """
assert not any(cuda("cudaFreeAsync", block, None) for block in blocks)
# Exactly as large; a quarter smaller than a block; more than a quarter smaller; larger than all.
again = [made(cuda, "cudaMallocAsync", size, None) for size in (2 * MIB, 4 * MIB * 4 // 5 + 1, MIB // 2, 5 * MIB)]
figures = reserved_and_used()
report([block in blocks for block in again], again[0] == blocks[1], again[1] == blocks[2])
"""
        assert evaluate(self.PROGRAM + program, memory="64MiB") == [[True, True, False, False], True, True]
