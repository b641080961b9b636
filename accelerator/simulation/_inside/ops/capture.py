"""Ops on a stream that captures: they run at each replay of the graph, not during the capture."""

from __future__ import annotations

import collections
import ctypes
import itertools
import threading
import traceback
from collections.abc import Callable

import torch

from . import bindings
from .runtime import is_memory_of_gpus, library

library.accelerator_simulation_compute.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
library.accelerator_simulation_references.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
library.accelerator_simulation_references.restype = ctypes.c_size_t

_computations: dict[int, Callable[[], object]] = {}
_nodes: collections.Counter[int] = collections.Counter()  # that refer to a computation, by its identifier
_identifiers = itertools.count(1)
_lock = threading.Lock()


def raise_capture_error(device: torch.device) -> None:
    """Raise CUDA's error for a host that waits for a stream that captures."""
    torch.cuda.current_stream(device).synchronize()
    raise AssertionError("synchronizing a stream that captures raised no error")


def raise_if_freed(addresses: list[int], name: str) -> None:
    """Raise an error if device memory that a replay reads was freed after the capture."""
    for address in addresses:
        if not is_memory_of_gpus(address):
            raise RuntimeError(f"an illegal memory access: an argument of {name} was freed after the capture")


def put_on_stream(device: torch.device, computation: Callable[[], object]) -> None:
    """Run a computation at each replay of the graph that the device's current stream captures."""
    _drop_unused()
    identifier = next(_identifiers)
    _computations[identifier] = computation
    with torch.cuda.device(device):
        stream = bindings.current_stream(device.index)
        error = library.accelerator_simulation_compute(stream, _run, identifier)
    if error:
        del _computations[identifier]
        torch.cuda.check_error(error)


def _drop_unused() -> None:
    """Drop the computations to which no graph refers any more."""
    references = (ctypes.c_int64 * 64)()
    with _lock:  # the references come in order
        while count := library.accelerator_simulation_references(references, len(references)):
            for reference in references[:count]:
                identifier = abs(reference)
                _nodes[identifier] += 1 if reference > 0 else -1
                if not _nodes[identifier]:
                    del _nodes[identifier]
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
