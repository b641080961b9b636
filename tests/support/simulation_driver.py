"""Programs that call the simulated CUDA driver through ctypes."""

from __future__ import annotations

import ctypes
import json
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from accelerator._machine import torch_build
from accelerator.simulation._settings.torch_versions import release
from tests.support import run, simulated_environment

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_Work = TypeVar("_Work", bound="torch.cuda.Stream | torch.cuda.Event")
_build = torch_build.read()
needs_cuda_torch = pytest.mark.skipif(_build is None or not _build.cuda, reason="needs a torch built for CUDA")

# What a process says that looks for a lost GPU. NVML still counts it. Before 2.12, torch asks CUDA for its properties first.
LOST_GPU = (
    "device < num_gpus INTERNAL ASSERT FAILED"
    if _build is not None and release(_build.version) < (2, 12)
    else "invalid device ordinal"
)


def loaded_runtime() -> ctypes.CDLL:
    """Return the CUDA runtime that torch has loaded into this process."""
    import torch

    assert torch.version.cuda
    return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")


def make_busy(submit: Callable[[int], _Work], milliseconds: int = 50) -> _Work:
    """Return work that was seen busy.

    Args:
        submit: Submits work that sleeps for a number of clock cycles, and returns a stream or event that waits for it. A cycle
            of a simulated GPU lasts a nanosecond. Called again with a longer sleep if the machine is slower than the sleep.
        milliseconds: The first sleep.
    """
    for longer in (1, 10, 100):
        begin = time.monotonic()
        work = submit(longer * milliseconds * 1_000_000)
        if not work.query():
            return work
        assert time.monotonic() - begin >= longer * milliseconds / 1000, "the work has ended too early"
    raise AssertionError(f"the work was never busy, not even with a sleep of {100 * milliseconds} ms")


def end_invalidated_capture(pool: tuple[int, int]) -> None:
    """End the allocations to the pool of a capture that was invalidated.

    Before 2.13 torch does not: https://github.com/pytorch/pytorch/pull/180395. Until they end, the allocator does not empty
    its cache, and torch aborts a process that destroys another pool.
    """
    import torch

    # torch 2.6 and 2.7 have the other name.
    end = getattr(torch._C, "_cuda_endAllocateToPool", None) or torch._C._cuda_endAllocateCurrentStreamToPool
    for gpu in range(torch.cuda.device_count()):
        with suppress(RuntimeError):  # torch has ended them
            end(gpu, pool)


def is_driver_initialized() -> bool:
    """Return whether the CUDA driver is initialized in this process, as the driver itself says."""
    not_initialized = 3
    return ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != not_initialized


# The start of every program. It does not import torch, which takes a second.
DRIVER = """
import ctypes, json, os, sys
cuda = ctypes.CDLL("libcuda.so.1")

def count():
    number = ctypes.c_int(-1)
    return cuda.cuDeviceGetCount(ctypes.byref(number)), number.value

def uuid(ordinal):
    uuid_bytes = (ctypes.c_ubyte * 16)()
    assert cuda.cuDeviceGetUuid_v2(uuid_bytes, ordinal) == 0
    return bytes(uuid_bytes).hex()

def use(ordinal):
    context = ctypes.c_void_p()
    error = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal)
    return error or cuda.cuCtxSetCurrent(context)

def allocate(size):
    pointer = ctypes.c_size_t()
    return cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))

def free():
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    return free.value

def report(*values):
    print(json.dumps(values), flush=True)
"""


def evaluate(program: str, variables: dict[str, str] | None = None, **machine: Any) -> list[Any]:
    """Run a program that may use DRIVER on a simulated machine and return what it reports."""
    return json.loads(run(DRIVER + program, simulated_environment(variables, **machine)))


def uuid_of(gpu: int, instance: int | None = None, **machine: Any) -> str:
    """Return the UUID of a GPU or MIG instance as NVML writes it."""
    handle = f"pynvml.nvmlDeviceGetHandleByIndex({gpu})"
    if instance is not None:
        handle = f"pynvml.nvmlDeviceGetMigDeviceHandleByIndex({handle}, {instance})"
    program = f"import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetUUID({handle}))"
    return run(program, simulated_environment(**machine)).strip()
