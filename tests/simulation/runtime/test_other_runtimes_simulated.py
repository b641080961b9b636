"""Programs that bring a CUDA runtime of their own: they get the simulated one."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import support
from tests.support import simulated_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAM = """
import torch
import cuda.bindings.runtime as runtime
error, count = runtime.cudaGetDeviceCount()
assert (int(error), count) == (0, 2)
assert int(runtime.cudaSetDevice(1)[0]) == 0 and torch.cuda.current_device() == 1
"""


@pytest.mark.parametrize("name", ["libcudart.so.12", "libcudart.so.13"])
def test_a_runtime_that_is_loaded_by_its_path_is_the_simulated_one(name: str) -> None:
    assert ctypes.CDLL(f"/nowhere/{name}").accelerator_simulation_refusal
    with pytest.raises(OSError, match=r"libcudart\.so\.11"):
        ctypes.CDLL("/nowhere/libcudart.so.11")


@pytest.fixture
def runtime() -> Any:
    pytest.importorskip("cuda.bindings._internal.runtime", reason="torch for CUDA 12 does not require cuda-bindings 13")
    return pytest.importorskip("cuda.bindings.runtime")


@pytest.fixture
def device() -> Iterator[int]:
    with torch.cuda.device(1):
        yield 1


@pytest.fixture
def call(runtime: Any) -> Callable[..., Any]:
    """Return what calls a function of the package and returns its result."""

    def run(name: str, *arguments: Any) -> Any:
        error, *results = getattr(runtime, name)(*arguments)
        assert error == runtime.cudaError_t.cudaSuccess, (name, error)
        return results[0] if len(results) == 1 else tuple(results)

    return run


def test_device_is_that_of_torch(device: int, call: Callable[..., Any]) -> None:
    assert call("cudaGetDeviceCount") == torch.cuda.device_count()
    assert call("cudaGetDevice") == device
    call("cudaSetDevice", 0)
    assert torch.cuda.current_device() == 0
    assert call("cudaGetDeviceProperties", 0).name.decode() == torch.cuda.get_device_name(0)


def test_memory_is_that_of_torch(device: int, runtime: Any, call: Callable[..., Any]) -> None:
    tensor = torch.arange(8, dtype=torch.uint8, device="cuda")
    copy = bytearray(8)
    call("cudaMemcpy", copy, tensor.data_ptr(), 8, runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost)
    assert [*copy] == [*range(8)]
    free, _ = torch.cuda.mem_get_info()
    address = call("cudaMalloc", 2**20)
    assert torch.cuda.mem_get_info()[0] == free - 2**20
    call("cudaFree", address)


def test_streams_of_torch_are_taken(device: int, call: Callable[..., Any]) -> None:
    call("cudaStreamSynchronize", torch.cuda.Stream().cuda_stream)


@pytest.mark.parametrize("compute", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_in_a_new_process(compute: bool, runtime: Any) -> None:
    support.run(PROGRAM, simulated_environment(gpus=2, compute=compute))
