"""The package cuda-bindings, which is linked with the static CUDA runtime, on simulated GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import support
from tests.support import simulated_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

runtime: Any = pytest.importorskip("cuda.bindings.runtime")
pytest.importorskip("cuda.bindings._internal.runtime", reason="of cuda-bindings 13 and newer")

SUCCESS = runtime.cudaError_t.cudaSuccess
PROGRAM = """
import torch
import cuda.bindings.runtime as runtime
error, count = runtime.cudaGetDeviceCount()
assert (int(error), count) == (0, 2)
assert int(runtime.cudaSetDevice(1)[0]) == 0 and torch.cuda.current_device() == 1
"""


@pytest.fixture
def device() -> Iterator[int]:
    with torch.cuda.device(1):
        yield 1


def call(name: str, *arguments: Any) -> Any:
    """Call a function of the package and return its result."""
    error, *results = getattr(runtime, name)(*arguments)
    assert error == SUCCESS, (name, error)
    return results[0] if len(results) == 1 else tuple(results)


def test_device_is_that_of_torch(device: int) -> None:
    assert call("cudaGetDeviceCount") == torch.cuda.device_count()
    assert call("cudaGetDevice") == device
    call("cudaSetDevice", 0)
    assert torch.cuda.current_device() == 0
    assert call("cudaGetDeviceProperties", 0).name.decode() == torch.cuda.get_device_name(0)


def test_memory_is_that_of_torch(device: int) -> None:
    tensor = torch.arange(8, dtype=torch.uint8, device="cuda")
    copy = bytearray(8)
    call("cudaMemcpy", copy, tensor.data_ptr(), 8, runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost)
    assert [*copy] == [*range(8)]
    free, _ = torch.cuda.mem_get_info()
    address = call("cudaMalloc", 2**20)
    assert torch.cuda.mem_get_info()[0] == free - 2**20
    call("cudaFree", address)


def test_streams_of_torch_are_taken(device: int) -> None:
    call("cudaStreamSynchronize", torch.cuda.Stream().cuda_stream)


@pytest.mark.parametrize("compute", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_in_a_new_process(compute: bool) -> None:
    support.run(PROGRAM, simulated_environment(gpus=2, compute=compute))
