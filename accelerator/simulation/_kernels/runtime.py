"""The simulated CUDA runtime, and what ops check in it before they compute: collectives, captures, refused kernels, forks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from . import bindings

__all__ = ["library", "raise_in_bad_fork", "streams_need_checks", "wait_for_pending", "wait_unless_capturing"]

assert torch.version.cuda is not None
# By its full name, since another major version's library may be loaded too.
library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
library.accelerator_simulation_wait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
_NOT_READY, _NOT_SUPPORTED = 600, 801
_WAIT_MS = 100

streams_need_checks = ctypes.c_int.in_dll(library, "accelerator_simulation_needs_checks")
"""Not zero if calls must check their streams: one captures or waits for a collective, or a refused kernel's error is pending;
and in a bad fork."""


def _is_capturing(device: torch.device) -> bool:
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
    while (error := library.accelerator_simulation_wait(stream, index, _WAIT_MS)) == _NOT_READY:
        pass
    if error == _NOT_SUPPORTED:
        _raise_refusal()
    if error:
        torch.cuda.current_stream(device).synchronize()  # raises torch's own error if a kernel has failed
        torch.cuda.check_error(error)


def _raise_refusal() -> None:
    """Raise the error of a kernel that was refused, if the program has not read it: the op's arguments may not be computed."""
    text = ctypes.create_string_buffer(4096)
    if library.accelerator_simulation_refusal(text, ctypes.c_size_t(len(text))):
        library.cudaGetLastError()  # of this thread: torch would raise it after its next launch
        raise RuntimeError(f"CUDA error: operation not supported: {text.value.decode(errors='replace')}")


def wait_unless_capturing(device: torch.device) -> bool:
    """Return True if the current stream of the device captures. If it does not, wait for its collectives and return False."""
    if not streams_need_checks.value:
        return False
    raise_in_bad_fork()
    if _is_capturing(device):
        return True
    wait_for_pending(device)
    return False
