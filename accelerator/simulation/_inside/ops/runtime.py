"""The simulated CUDA runtime, and what ops check in it before they compute: collectives, captures, refused kernels, forks."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Generator
from typing import Any

import torch

from ..._settings import LIMITS
from . import bindings

assert torch.version.cuda is not None
# By its full name, since another major version's library may be loaded too.
library = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
library.accelerator_simulation_wait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
library.accelerator_simulation_note_refusals.argtypes = (ctypes.c_void_p,)
library.accelerator_simulation_note_refusals.restype = ctypes.c_void_p
_NOT_READY, _NOT_SUPPORTED = 600, 801
ILLEGAL_ADDRESS, ASSERT = 700, 710
_WAIT_MS = 100

streams_need_checks = ctypes.c_int.in_dll(library, "accelerator_simulation_needs_checks")
"""Not zero if calls must check their streams: one captures or waits for a collective, or the error of a launch has not been
read; and in a bad fork."""

_fault_flag = ctypes.POINTER(ctypes.c_int).in_dll(library, "accelerator_simulation_fault_flag")
library.accelerator_simulation_begin_op.argtypes = (ctypes.c_void_p, ctypes.c_int)
library.cudaPointerGetAttributes.argtypes = (ctypes.c_void_p, ctypes.c_void_p)


def _is_capturing(device: torch.device) -> bool:
    """Return whether the current stream of the device captures."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def is_memory_of_gpus(address: int) -> bool:
    """Return whether CUDA knows the memory at an address: that of a GPU, or pinned or managed memory."""
    attributes = (ctypes.c_int * 64)()  # their first field is the kind of memory, which is 0 if there is none
    return library.cudaPointerGetAttributes(attributes, address) == 0 and attributes[0] != 0


def raise_in_bad_fork() -> None:
    """Raise torch's error in a child of a process that had initialized CUDA: it shares the memory of its parent's GPUs."""
    initialize: Callable[[], None] = torch.cuda.init
    initialize()


def has_faults() -> bool:
    """Return whether the machine has had a fault: calls must then tell of each op (``native/faults``)."""
    return _fault_flag[0] != 0


def begin_op(device: torch.device) -> None:
    """Tell the faults that an op begins on the device's current stream.

    Raises:
        RuntimeError: a fault has broken this process's context; the error is torch's.
    """
    if library.accelerator_simulation_begin_op(bindings.current_stream(device.index), device.index) < 0:
        raise_error(device)


def has_bit_to_flip(device: torch.device) -> bool:
    """Return whether a fault flips a bit of the result of the op that has begun."""
    return bool(library.accelerator_simulation_flip(device.index) >= 0)


def flip_bit(results: Any, device: torch.device) -> None:
    """Flip a bit of an op's result if a fault has it: of one element of the first floating-point tensor."""
    bit = library.accelerator_simulation_flip(device.index)
    if bit < 0:
        return
    for result in results if isinstance(results, (list, tuple)) else (results,):
        if isinstance(result, torch.Tensor) and result.is_cuda and result.is_floating_point() and result.numel():
            address = ctypes.c_uint8.from_address(result.data_ptr() + bit // 8 % result.element_size())
            address.value ^= 1 << bit % 8
            library.accelerator_simulation_flipped(device.index)
            return


def break_context(device: torch.device, error: int) -> bool:
    """Let this process's later calls on a device fail, as after a kernel that failed. Return whether ops wait for kernels."""
    return bool(library.accelerator_simulation_break_context(device.index, error))


def raise_error(device: torch.device) -> None:
    """Raise torch's error for a context that is broken."""
    torch.cuda.current_stream(device).synchronize()


def wait_for_pending(device: torch.device) -> None:
    """Wait for the collectives that the device's current stream waits for. The loop lets Ctrl-C interrupt it.

    Raises:
        RuntimeError: a kernel was refused, and the program has not read the error.
    """
    while not check(device, _WAIT_MS):
        pass


def check(device: torch.device, milliseconds: int = 0) -> bool:
    """Wait at most so long for the collectives that the device's current stream waits for, and return whether they have ended.

    Raises:
        RuntimeError: a kernel was refused, and the program has not read the error.
    """
    raise_in_bad_fork()
    index = device.index
    error = library.accelerator_simulation_wait(bindings.current_stream(index), index, milliseconds)
    if error == _NOT_READY:
        return False
    if error == _NOT_SUPPORTED:
        _raise_refusal()
    if error:
        torch.cuda.current_stream(device).synchronize()  # raises torch's own error if a kernel has failed
        launch: Callable[[int], None] = torch.cuda._sleep
        launch(0)  # torch then raises the error of an earlier launch that nobody has read
        torch.cuda.check_error(error)
    return True


def _raise_refusal() -> None:
    """Raise the error of a kernel that was refused, if the program has not read it: the op's arguments may not be computed."""
    text = ctypes.create_string_buffer(LIMITS["REFUSAL_LENGTH"])
    if library.accelerator_simulation_refusal(text, ctypes.c_size_t(len(text))):
        library.cudaGetLastError()  # of this thread: torch would raise it after its next launch
        raise RuntimeError(f"CUDA error: operation not supported: {text.value.decode(errors='replace')}")


@contextlib.contextmanager
def noting_refusals() -> Generator[ctypes.Array[ctypes.c_char]]:
    """Note the text of this thread's first launch that is refused, and leave no error of it."""
    text = ctypes.create_string_buffer(LIMITS["REFUSAL_LENGTH"])
    before = library.accelerator_simulation_note_refusals(text)
    try:
        yield text
    finally:
        library.accelerator_simulation_note_refusals(before)
        if text.value:
            library.cudaGetLastError()


def wait_unless_capturing(device: torch.device) -> bool:
    """Return True if the current stream of the device captures. If it does not, wait for its collectives and return False.

    A fault of the device may fail the op that begins.
    """
    if streams_need_checks.value:
        raise_in_bad_fork()
        if _is_capturing(device):
            return True
        wait_for_pending(device)
    if has_faults():
        begin_op(device)
    return False
