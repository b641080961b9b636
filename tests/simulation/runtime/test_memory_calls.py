"""Rows, boxes and peers: memory calls of the runtime that torch does not use, and those for devices."""

from __future__ import annotations

import textwrap

import pytest

from tests.simulation.driver.test_memory_misuse import evaluate
from tests.support import python, simulated_environment
from tests.support.simulation import linux_only

pytestmark = linux_only

STRUCTURES = """
class Extent(ctypes.Structure):
    _fields_ = [(name, c_size_t) for name in ("width", "height", "depth")]

class Pitched(ctypes.Structure):
    _fields_ = [("address", c_void_p), *((name, c_size_t) for name in ("pitch", "width", "height"))]

class Position(ctypes.Structure):
    _fields_ = [(name, c_size_t) for name in "xyz"]

class Side(ctypes.Structure):
    _fields_ = [("array", c_void_p), ("position", Position), ("pointer", Pitched)]

class Box(ctypes.Structure):
    _fields_ = [("source", Side), ("target", Side), ("extent", Extent), ("direction", c_int)]

class Peers(ctypes.Structure):
    _fields_ = [("source", Side), ("source_device", c_int), ("target", Side), ("target_device", c_int), ("extent", Extent)]

assert (ctypes.sizeof(Box), ctypes.sizeof(Peers)) == (160, 168)

def box(target, source, extent, target_at=(0, 0, 0), source_at=(0, 0, 0), direction=4):
    return Box(Side(None, Position(*source_at), source), Side(None, Position(*target_at), target), Extent(*extent), direction)

def buffer(data):
    return ctypes.create_string_buffer(bytes(data), len(data))

def allocated(extent):
    pitched = Pitched()
    assert cuda("cudaMalloc3D", byref(pitched), Extent(*extent)) == 0
    return pitched

def expected_box(width, height, depth, value):
    return bytes(value(x, y, z) for z in range(depth) for y in range(height) for x in range(width))
"""


def check(program: str, major: int = 13, **machine: object) -> list[object]:
    return evaluate(STRUCTURES + textwrap.dedent(program), major, **machine)


@pytest.mark.parametrize("major", [12, 13])
def test_rows(major: int) -> None:
    program = """
        before, pitch, rows = free_bytes(), c_size_t(), c_void_p()
        assert cuda("cudaMallocPitch", byref(rows), byref(pitch), 100, 7) == 0
        data = buffer(range(175))
        codes = [cuda("cudaMemset2D", rows, pitch, c_int(0xEE), pitch, 7), cuda("cudaMemset2D", rows, pitch, c_int(9), 100, 7),
                 cuda("cudaMemcpy2D", rows, pitch, data, 25, 25, 7, c_int(1))]
        first = bytes_at(rows.value, 7 * pitch.value)
        target = buffer(bytes(7 * 40))
        codes.append(cuda("cudaMemcpy2D", target, 40, rows.value + pitch.value + 5, pitch, 20, 6, c_int(2)))
        codes.append(cuda("cudaMemset2DAsync", rows.value + 3, pitch, c_int(1), 2, 7, None))
        second = bytes_at(rows.value, 7 * pitch.value)
        right = b"".join(data.raw[25 * y : 25 * y + 25] + b"\\t" * 75 + b"\\xee" * (pitch.value - 100) for y in range(7))
        copied = b"".join(data.raw[25 * y + 5 : 25 * y + 25] + bytes(20) for y in range(1, 7)) + bytes(40)
        filled = b"".join(row[:3] + b"\\1\\1" + row[5:] for row in (first[pitch.value * y :][: pitch.value] for y in range(7)))
        codes.append(cuda("cudaFree", rows))
        empty, width = c_void_p(5), c_size_t(7)
        codes += [cuda("cudaMallocPitch", byref(empty), byref(width), 0, 7), empty.value, width.value]
        report(codes, pitch.value, first == right, target.raw == copied, second == filled, before - free_bytes())
    """
    assert check(program, major) == [[0, 0, 0, 0, 0, 0, 0, None, 0], 512, True, True, True, 0]


@pytest.mark.parametrize("major", [12, 13])
def test_boxes(major: int) -> None:
    program = """
        device = allocated((10, 6, 5))
        host = buffer(expected_box(8, 4, 3, lambda x, y, z: x + 10 * y + 50 * z))
        back = buffer(b"." * (12 * 6 * 5))
        there = box(device, Pitched(ctypes.addressof(host), 8, 8, 4), (7, 3, 2), (2, 1, 1), (1, 1, 1), 1)
        again = box(Pitched(ctypes.addressof(back), 12, 12, 6), device, (10, 6, 5), direction=2)
        codes = [cuda("cudaMemset3D", device, c_int(1), Extent(10, 6, 5)), cuda("cudaMemcpy3D", byref(there)),
                 cuda("cudaMemset3DAsync", device, c_int(2), Extent(1, 6, 5), None),
                 cuda("cudaMemcpy3DAsync", byref(again), None), cuda("cudaDeviceSynchronize")]

        def value(x, y, z):
            if x >= 10:
                return ord(".")
            inside = 2 <= x < 9 and 1 <= y < 4 and 1 <= z < 3
            return 2 if x == 0 else (x - 1) + 10 * y + 50 * z if inside else 1

        report(codes, [device.pitch, device.width, device.height], back.raw == expected_box(12, 6, 5, value))
    """
    assert check(program, major) == [[0] * 5, [512, 10, 6], True]


def test_boxes_without_gaps_are_one_copy_and_others_one_for_each_plane() -> None:
    """Also in a graph, which copies again when it is launched."""
    program = """
        stream, graph, instance, count = c_void_p(), c_void_p(), c_void_p(), c_size_t()
        source, target = allocated((512, 2, 3)), allocated((512, 2, 3))
        narrow = allocated((8, 4, 3))
        assert cuda("cudaStreamCreate", byref(stream)) == 0
        codes = [cuda("cudaStreamBeginCapture", stream, c_int(2)),
                 cuda("cudaMemcpy3DAsync", byref(box(target, source, (512, 2, 3), direction=3)), stream),
                 cuda("cudaMemcpy3DAsync", byref(box(target, source, (8, 1, 3), (64, 1, 0), direction=3)), stream),
                 cuda("cudaMemset3DAsync", narrow, c_int(5), Extent(8, 2, 3), stream),
                 cuda("cudaMemset2DAsync", narrow.address, narrow.pitch, c_int(6), 2, 12, stream),
                 cuda("cudaStreamEndCapture", stream, byref(graph)),
                 cuda("cudaGraphGetNodes", graph, None, byref(count)),
                 cuda("cudaGraphInstantiate", byref(instance), graph, 0)]
        assert bytes_at(narrow.address, 8) == bytes(8)
        results = []
        for value in (1, 2):
            assert cuda("cudaMemset", source.address, c_int(value), 6 * 512) == 0
            codes.append(cuda("cudaGraphLaunch", instance, stream))
            codes.append(cuda("cudaStreamSynchronize", stream))
            results.append(bytes_at(target.address, 6 * 512) == bytes([value]) * 6 * 512)
        rows = [bytes_at(narrow.address + 512 * row, 8) for row in range(12)]
        right = [b"\\6\\6" + (b"\\5" if row % 4 < 2 else b"\\0") * 6 for row in range(12)]
        report(codes, count.value, results, rows == right)
    """
    assert check(program) == [[0] * 12, 1 + 3 + 3 + 1, [True, True], True]


def test_copies_between_devices() -> None:
    program = """
        first, second = made(cuda, "cudaMalloc", 64), None
        assert cuda("cudaMemset", first, c_int(7), 64) == 0
        here = allocated((8, 2, 2))
        assert cuda("cudaMemset3D", here, c_int(3), Extent(8, 2, 2)) == 0
        assert cuda("cudaSetDevice", c_int(1)) == 0
        second, there = made(cuda, "cudaMalloc", 64), allocated((8, 2, 2))
        sides = box(there, here, (8, 2, 2))
        peers = Peers(sides.source, 0, sides.target, 1, sides.extent)
        codes = [cuda("cudaMemcpyPeer", second, c_int(1), first, c_int(0), 64), cuda("cudaMemcpy3DPeer", byref(peers)),
                 cuda("cudaMemcpy3DPeerAsync", byref(peers), None), cuda("cudaDeviceSynchronize")]
        rows = [bytes_at(there.address + 512 * row, 8) for row in range(4)]
        report(codes, bytes_at(second, 64) == b"\\7" * 64, rows == [b"\\3" * 8] * 4)
    """
    assert check(program, gpus=2) == [[0] * 4, True, True]


def test_limits_and_flags_of_devices() -> None:
    program = """
        value, flags, ordinal, name = c_size_t(), c_uint(), c_int(), ctypes.create_string_buffer(16)
        codes = [cuda("cudaDeviceSetLimit", c_int(0), 4096), cuda("cudaDeviceGetLimit", byref(value), c_int(0))]
        before = value.value
        codes += [cuda("cudaSetDeviceFlags", c_uint(4)), cuda("cudaGetDeviceFlags", byref(flags))]
        codes += [cuda("cudaDeviceGetPCIBusId", name, c_int(16), c_int(1)),
                  cuda("cudaDeviceGetByPCIBusId", byref(ordinal), name), ordinal.value]
        wrong = [cuda("cudaDeviceGetLimit", None, c_int(0)), cuda("cudaDeviceGetLimit", byref(value), c_int(99)),
                 cuda("cudaDeviceSetLimit", c_int(-1), 1), cuda("cudaSetDeviceFlags", c_uint(3)),
                 cuda("cudaSetDeviceFlags", c_uint(1 << 20)), cuda("cudaGetDeviceFlags", None),
                 cuda("cudaDeviceGetByPCIBusId", byref(ordinal), b"none"),
                 cuda("cudaDeviceGetByPCIBusId", byref(ordinal), b"00FF:FF:00.0"),
                 cuda("cudaInitDevice", c_int(2), c_uint(0), c_uint(0)), cuda("cudaInitDevice", c_int(0), c_uint(0), c_uint(2)),
                 cuda("cudaDeviceDisablePeerAccess", c_int(1)), cuda("cudaDeviceEnablePeerAccess", c_int(1), c_uint(0)),
                 cuda("cudaDeviceDisablePeerAccess", c_int(1)), cuda("cudaDeviceDisablePeerAccess", c_int(1))]
        report(codes, before, flags.value, wrong)
    """
    assert check(program, gpus=2) == [[0, 0, 0, 0, 0, 0, 1], 4096, 12, [1, 215, 215, 1, 1, 1, 1, 101, 101, 1, 705, 0, 0, 705]]


@pytest.mark.parametrize("major", [12, 13])
def test_a_reset_frees_the_memory_of_a_device(major: int) -> None:
    program = """
        before, threshold, used, value = free_bytes(), c_uint64(2**40), c_uint64(), c_size_t()
        pool = made(cuda, "cudaDeviceGetDefaultMemPool", c_int(0))
        assert cuda("cudaMemPoolSetAttribute", pool, c_int(4), byref(threshold)) == 0
        kept = made(cuda, "cudaMalloc", MIB)
        waits, freed = made(cuda, "cudaMallocAsync", MIB, None), made(cuda, "cudaMallocAsync", MIB, None)
        pinned = made(cuda, "cudaHostAlloc", MIB, c_uint(1))
        assert cuda("cudaHostGetFlags", byref(c_uint()), pinned) == 0
        assert cuda("cudaFreeAsync", freed, None) == 0
        assert cuda("cudaSetDevice", c_int(1)) == 0
        other = made(cuda, "cudaMalloc", MIB)
        assert cuda("cudaMemset", other, c_int(7), MIB) == 0
        assert cuda("cudaSetDevice", c_int(0)) == 0
        assert cuda("cudaDeviceSetLimit", c_int(1), 1 << 20) == 0
        codes = [cuda("cudaDeviceReset"), cuda("cudaFree", kept), cuda("cudaMemset", waits, c_int(0), 4),
                 cuda("cudaFreeHost", pinned), cuda("cudaMemPoolGetAttribute", pool, c_int(5), byref(used)),
                 cuda("cudaDeviceGetLimit", byref(value), c_int(1))]
        again = made(cuda, "cudaMalloc", MIB)
        codes += [cuda("cudaMemset", again, c_int(1), MIB), cuda("cudaFree", again)]
        codes += [cuda("cudaDeviceReset"), cuda("cudaDeviceReset")]
        report(codes, used.value, value.value, before - free_bytes(), bytes_at(other, MIB) == b"\\7" * MIB)
    """
    assert check(program, major, gpus=2) == [[0, 1, 1, 1, 0, 0, 0, 0, 0, 0], 0, 7340032, 0, True]


def test_a_block_of_a_pool_counts_with_its_size_when_it_is_used_again() -> None:
    program = """
        threshold, used = c_uint64(2**40), c_uint64()
        pool = made(cuda, "cudaDeviceGetDefaultMemPool", c_int(0))
        assert cuda("cudaMemPoolSetAttribute", pool, c_int(4), byref(threshold)) == 0
        figures, address = [], made(cuda, "cudaMallocAsync", MIB, None)
        for size in (MIB - 128 * 1024, MIB - 512, MIB):
            assert cuda("cudaFreeAsync", address, None) == 0
            address = made(cuda, "cudaMallocFromPoolAsync", size, pool, None)
            for attribute in (5, 7):
                assert cuda("cudaMemPoolGetAttribute", pool, c_int(attribute), byref(used)) == 0
                figures.append(used.value // 1024)
        assert cuda("cudaFreeAsync", address, None) == 0
        assert cuda("cudaMemPoolGetAttribute", pool, c_int(7), byref(used)) == 0
        report(figures, used.value)
    """
    assert check(program) == [[1024] * 6, 0]


def test_flags_of_streams_and_pinned_memory() -> None:
    program = """
        flags, ordinal, stream, blocking = c_uint(9), c_int(9), c_void_p(), c_void_p()
        assert cuda("cudaStreamCreateWithFlags", byref(stream), c_uint(1)) == 0
        assert cuda("cudaStreamCreate", byref(blocking)) == 0
        found = []
        for handle in (stream, blocking, None):
            assert cuda("cudaStreamGetFlags", handle, byref(flags)) == 0
            found.append(flags.value)
        pinned, device = made(cuda, "cudaHostAlloc", MIB, c_uint(5)), made(cuda, "cudaMalloc", MIB)
        codes = [cuda("cudaHostGetFlags", byref(flags), pinned), flags.value, cuda("cudaHostGetFlags", byref(flags), device),
                 cuda("cudaHostGetFlags", None, pinned), cuda("cudaStreamGetDevice", stream, byref(ordinal)), ordinal.value]
        report(found, codes)
    """
    assert check(program) == [[1, 0, 0], [0, 5, 1, 1, 0, 0]]


def test_what_is_not_simulated_is_named_once() -> None:
    program = """
import ctypes
runtime = ctypes.CDLL("libcudart.so.13")
handle = ctypes.c_void_p()
codes = [runtime.cudaGraphCreate(ctypes.byref(handle), 0), runtime.cudaGraphCreate(ctypes.byref(handle), 0),
         runtime.cudaMallocArray(ctypes.byref(handle), None, 1, 1, 0)]
print(codes)
"""
    done = python(program, simulated_environment())
    assert done.stdout == "[801, 801, 801]\n"
    assert done.stderr == "accelerator: cudaGraphCreate is not simulated\naccelerator: cudaMallocArray is not simulated\n"
