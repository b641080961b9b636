"""Kernels compiled into a program: those that run on simulated GPUs, by their names, and those that are refused."""

from __future__ import annotations

import ctypes
import itertools
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

NOT_READY, NOT_SUPPORTED = 600, 801
MILLISECOND = 1_000_000
RUNNING, TIMED_OUT, ABORTED = 1, 2, 3  # what the barrier writes

# The names that torch's builds contain; the hexadecimal digits differ.
SPIN = b"_ZN2at4cuda40_GLOBAL__N__b51f33dc_8_Sleep_cu_088d913f11spin_kernelEl"
BARRIER = b"_ZN4c10d4cuda6detail14kernel_barrierEPim"
NAN_CHECK = b"_ZN4c10d50_GLOBAL__N__5ffcc681_11_NanCheck_cu_d32bfcb6_3821911checkForNaNIfEEvPT_m"
functions = itertools.count(0x1000, 16)  # addresses that stand for host functions; nothing calls them
names: list[ctypes.Array[ctypes.c_char]] = []  # the runtime keeps pointers to them


class Dim3(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]


def register(runtime: ctypes.CDLL, name: bytes) -> ctypes.c_void_p:
    """Register a kernel as a library does when it is loaded."""
    function = ctypes.c_void_p(next(functions))
    names.append(ctypes.create_string_buffer(name))
    runtime["__cudaRegisterFunction"](None, function, name, names[-1], -1, None, None, None, None, None)
    return function


def launch(runtime: ctypes.CDLL, kernel: ctypes.c_void_p, *arguments: Any, stream: torch.cuda.Stream | None = None) -> int:
    """Launch a kernel with one thread and return CUDA's error."""
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
    handle = ctypes.c_void_p(stream.cuda_stream if stream else None)
    error = runtime.cudaLaunchKernel(kernel, Dim3(1, 1, 1), Dim3(1, 1, 1), pointers, ctypes.c_size_t(0), handle)
    runtime.cudaGetLastError()
    return error


@pytest.mark.parametrize(
    "name",
    [
        b"_Z11spin_kernell",
        b"_ZN4user11spin_kernelEl",
        b"_ZN2at4cuda3ops11spin_kernelEl",
        SPIN + b"l",
        b"_ZN2at4cuda40_GLOBAL__N__b51f33dc_8_Sleep_cu_088d913f17other_spin_kernelEl",
        b"_ZN4user14kernel_barrierEPim",
        BARRIER + b"m",
        b"_ZN4user11checkForNaNIfEEvPT_m",
    ],
)
def test_a_kernel_with_a_similar_name_is_refused(runtime: ctypes.CDLL, name: bytes) -> None:
    assert launch(runtime, register(runtime, name), ctypes.c_int64(0), ctypes.c_size_t(0)) == NOT_SUPPORTED


def test_spin_kernel(runtime: ctypes.CDLL) -> None:
    stream = torch.cuda.Stream()
    assert launch(runtime, register(runtime, SPIN), ctypes.c_int64(500 * MILLISECOND), stream=stream) == 0
    assert not stream.query()


def test_nan_check_kernel(runtime: ctypes.CDLL) -> None:
    values = (ctypes.c_float * 3)(1.0, 2.0, 3.0)
    kernel = register(runtime, NAN_CHECK)
    assert launch(runtime, kernel, ctypes.c_void_p(ctypes.addressof(values)), ctypes.c_size_t(3)) == 0


class Barrier:
    """The kernel behind ``Work.block_current_stream``, and the two numbers through which the host talks to it."""

    def __init__(self, runtime: ctypes.CDLL) -> None:
        self.runtime, self.kernel = runtime, register(runtime, BARRIER)
        self.numbers = torch.zeros(2, dtype=torch.int32).pin_memory()

    def launch(self, stream: torch.cuda.Stream, timeout_ms: int = 0) -> None:
        address = ctypes.c_void_p(self.numbers.data_ptr())
        assert launch(self.runtime, self.kernel, address, ctypes.c_size_t(timeout_ms), stream=stream) == 0

    def release(self) -> None:
        self.numbers[0] = 1

    @property
    def status(self) -> int:
        return int(self.numbers[1])


class TestBarrier:
    @pytest.fixture
    def barriers(self, runtime: ctypes.CDLL) -> Iterator[list[Barrier]]:
        made = [Barrier(runtime) for _ in range(3)]
        yield made
        for barrier in made:
            barrier.release()
        torch.cuda.synchronize()

    def test_streams_wait_until_the_host_releases_them(self, barriers: list[Barrier]) -> None:
        streams, event = [torch.cuda.Stream() for _ in barriers], torch.cuda.Event()
        for barrier, stream in zip(barriers, streams, strict=True):
            barrier.launch(stream)
        streams[2].record_event(event)
        for last in (2, 1, 0):
            assert [stream.query() for stream in streams] == [index > last for index in range(3)]
            assert event.query() == (last < 2)
            barriers[last].release()
            streams[last].synchronize()
            assert barriers[last].status == ABORTED
        event.synchronize()
        assert event.query()

    def test_barriers_of_one_stream_are_in_order(self, barriers: list[Barrier]) -> None:
        stream = torch.cuda.Stream()
        for barrier in barriers:
            barrier.launch(stream)
        barriers[2].release()
        barriers[1].release()
        time.sleep(0.1)  # nothing shows that a barrier does not start
        assert [barrier.status for barrier in barriers] == [RUNNING, 0, 0]
        assert not stream.query()
        barriers[0].release()
        stream.synchronize()
        assert [barrier.status for barrier in barriers] == [ABORTED] * 3

    def test_barrier_starts_after_earlier_work_of_its_stream(self, barriers: list[Barrier]) -> None:
        barrier, stream = barriers[0], torch.cuda.Stream()
        barrier.release()
        for milliseconds in (200, 2000, 20_000):  # longer if the machine is slower than the sleep
            barrier.numbers[1] = 0
            begin = time.monotonic()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(milliseconds * MILLISECOND)
            barrier.launch(stream)
            time.sleep(0.05)  # nothing shows that the barrier does not start
            early_status, is_early = barrier.status, time.monotonic() - begin < milliseconds / 1000
            stream.synchronize()
            assert barrier.status == ABORTED
            assert time.monotonic() - begin >= milliseconds / 1000
            if is_early:
                break
        assert is_early
        assert early_status == 0

    def test_timeout(self, barriers: list[Barrier]) -> None:
        stream, begin = torch.cuda.Stream(), time.monotonic()
        barriers[0].launch(stream, timeout_ms=100)
        stream.synchronize()
        assert time.monotonic() - begin >= 0.1
        assert barriers[0].status == TIMED_OUT

    def test_ops_of_the_stream_wait_and_others_do_not(self, barriers: list[Barrier]) -> None:
        stream = torch.cuda.Stream()
        barriers[0].launch(stream)
        other = torch.ones(3, device="cuda") + 1
        assert other.tolist() == [2, 2, 2]
        assert not stream.query()
        barriers[0].release()
        with torch.cuda.stream(stream):
            assert (torch.ones(3, device="cuda") + 2).tolist() == [3, 3, 3]
        assert barriers[0].status == ABORTED

    def test_captured_barrier_waits_at_each_launch(self, runtime: ctypes.CDLL, barriers: list[Barrier]) -> None:
        stream, graph, instance = torch.cuda.Stream(), ctypes.c_void_p(), ctypes.c_void_p()
        handle = ctypes.c_void_p(stream.cuda_stream)
        assert runtime.cudaStreamBeginCapture(handle, 0) == 0
        barriers[0].launch(stream)
        assert runtime.cudaStreamEndCapture(handle, ctypes.byref(graph)) == 0
        assert stream.query()
        assert runtime.cudaGraphInstantiateWithFlags(ctypes.byref(instance), graph, ctypes.c_ulonglong(0)) == 0
        for _ in range(2):
            barriers[0].numbers.zero_()
            assert runtime.cudaGraphLaunch(instance, handle) == 0
            assert not stream.query()
            barriers[0].release()
            stream.synchronize()
        assert runtime.cudaGraphExecDestroy(instance) == 0
        assert runtime.cudaGraphDestroy(graph) == 0
