"""Ops on a stream that captures: they run at each replay of the graph, not during the capture."""

from __future__ import annotations

import ctypes
import itertools
import traceback
from collections.abc import Callable

import torch

from . import bindings

__all__ = [
    "is_capturing",
    "put_on_stream",
    "raise_capture_error",
    "raise_if_freed",
    "runtime",
    "streams_need_checks",
    "wait_for_pending",
    "wait_unless_capturing",
]

assert torch.version.cuda is not None
# By its full name, since another major version's library may be loaded too.
runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
runtime.accelerator_simulation_compute.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
runtime.accelerator_simulation_released.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
runtime.accelerator_simulation_released.restype = ctypes.c_size_t

runtime.accelerator_simulation_wait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
runtime.cudaPointerGetAttributes.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
_NOT_READY, _NOT_SUPPORTED = 600, 801
_WAIT_MS = 100

streams_need_checks = ctypes.c_int.in_dll(runtime, "accelerator_simulation_attention")
"""Not zero if calls must check their streams: one captures or waits for a collective, or a refused kernel's error is pending;
and in a bad fork."""

_computations: dict[int, Callable[[], object]] = {}
_identifiers = itertools.count(1)


def is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of the device captures."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def raise_in_bad_fork() -> None:
    """Raise torch's error in a child of a process that had initialized CUDA: it shares the memory of its parent's GPUs."""
    initialize: Callable[[], None] = torch.cuda.init
    initialize()


def wait_for_pending(device: torch.device) -> None:
    """Wait for the collectives that the device's current stream waits for. The loop lets Ctrl-C interrupt it.

    Raises:
        RuntimeError: a kernel was refused, and the program has not read the error.
    """
    raise_in_bad_fork()
    index = device.index
    stream = bindings.current_stream(index)
    while (error := runtime.accelerator_simulation_wait(stream, index, _WAIT_MS)) == _NOT_READY:
        pass
    if error == _NOT_SUPPORTED:
        raise_refusal()
    if error:
        torch.cuda.current_stream(device).synchronize()  # raises torch's own error if a kernel has failed
        torch.cuda.check_error(error)


def raise_refusal() -> None:
    """Raise the error of a kernel that was refused, if the program has not read it: the op's arguments may not be computed."""
    text = ctypes.create_string_buffer(4096)
    if runtime.accelerator_simulation_refusal(text, ctypes.c_size_t(len(text))):
        runtime.cudaGetLastError()  # of this thread: torch would raise it after its next launch
        raise RuntimeError(f"CUDA error: operation not supported: {text.value.decode(errors='replace')}")


def wait_unless_capturing(device: torch.device) -> bool:
    """Return True if the current stream of the device captures. If it does not, wait for its collectives and return False."""
    if not streams_need_checks.value:
        return False
    raise_in_bad_fork()
    if is_capturing(device):
        return True
    wait_for_pending(device)
    return False


def raise_capture_error(device: torch.device) -> None:
    """Raise CUDA's error for a host that waits for a stream that captures."""
    torch.cuda.current_stream(device).synchronize()
    raise AssertionError("synchronizing a stream that captures raised no error")


def raise_if_freed(addresses: list[int], name: str) -> None:
    """Raise an error if device memory that a replay reads was freed after the capture."""
    attributes = (ctypes.c_int * 64)()  # their first field is the kind of memory, which is 0 if there is none
    for address in addresses:
        if runtime.cudaPointerGetAttributes(attributes, address) or not attributes[0]:
            raise RuntimeError(f"an illegal memory access: an argument of {name} was freed after the capture")


def put_on_stream(device: torch.device, computation: Callable[[], object]) -> None:
    """Run a computation at each replay of the graph that the device's current stream captures."""
    _drop_released()
    identifier = next(_identifiers)
    _computations[identifier] = computation
    with torch.cuda.device(device):
        stream = bindings.current_stream(device.index)
        error = runtime.accelerator_simulation_compute(stream, _run, identifier)
    if error:
        del _computations[identifier]
        torch.cuda.check_error(error)


def _drop_released() -> None:
    """Drop the computations of graphs that were destroyed."""
    identifiers = (ctypes.c_uint64 * 64)()
    while count := runtime.accelerator_simulation_released(identifiers, 64):
        for identifier in identifiers[:count]:
            _computations.pop(identifier, None)


def _compute(identifier: int) -> bool:
    try:
        with torch.no_grad(), bindings.below_autograd(), bindings.without_torch_function():
            _computations[identifier]()
    except BaseException:  # the replay fails with CUDA's error, which does not name the cause
        traceback.print_exc()
        return False
    return True


_run = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_uint64)(_compute)
