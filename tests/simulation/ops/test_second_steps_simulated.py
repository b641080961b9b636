"""State of ops that a second step restores: a third tensor on another device, and an op that raises or whose capture failed."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref

import pytest
import torch


@pytest.mark.parametrize("devices", [(0, 1, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)])
def test_ops_over_lists_on_several_devices(devices: tuple[int, ...]) -> None:
    tensors = [torch.full((2,), float(number), device=f"cuda:{index}") for number, index in enumerate(devices)]
    results = torch._foreach_add(tensors, 1)
    assert [result.tolist() for result in results] == [[1, 1], [2, 2], [3, 3]]
    assert [result.device.index for result in results] == list(devices)
    torch._foreach_mul_(tensors, [1.0, 2.0, 3.0])
    assert [tensor.tolist() for tensor in tensors] == [[0, 0], [2, 2], [6, 6]]


def test_generator_of_the_cpu_is_restored_if_an_op_raises() -> None:
    def fail() -> None:
        torch.rand(3)
        raise RuntimeError("the kernel failed")

    torch.cuda.init()
    state, draw = torch.get_rng_state(), sys.modules["_accelerator_simulation._inside.ops.random"].draw
    with pytest.raises(RuntimeError, match="the kernel failed"):
        draw(torch.cuda.default_generators[0], fail, [], {})
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("captured", [0, 1, 3])
def test_failed_capture_keeps_no_computation(runtime: ctypes.CDLL, captured: int) -> None:
    capture = sys.modules["_accelerator_simulation._inside.ops.capture"]
    x, factor, stream = torch.ones(3, device="cuda"), torch.tensor(2.0), torch.cuda.Stream()
    x.mul_(factor)
    capture._drop_unused()
    before, is_alive, graph = set(capture._computations), weakref.ref(factor), ctypes.c_void_p()
    # Not torch.cuda.graph: torch 2.6 does not recover from a failed capture.
    assert runtime.cudaStreamBeginCapture(ctypes.c_void_p(stream.cuda_stream), 0) == 0
    with torch.cuda.stream(stream):
        for _ in range(captured):
            x.mul_(factor)
        assert len(set(capture._computations) - before) == captured
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            stream.synchronize()
        with pytest.raises(RuntimeError, match="previous error during capture"):
            x.mul_(factor)
    assert runtime.cudaStreamEndCapture(ctypes.c_void_p(stream.cuda_stream), ctypes.byref(graph)) == 901
    assert runtime.cudaGetLastError() == 901
    capture._drop_unused()
    del factor
    gc.collect()
    assert set(capture._computations) == before
    assert is_alive() is None
    assert x.tolist() == [2.0] * 3
