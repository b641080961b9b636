"""What race detection (``native/races``) is told of accesses: how ops access memory, and what calls access that are no ops.

The engine tells it what each op accesses. This module has no part in finding races.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import signal
import sysconfig
from typing import Any

import torch

from . import bindings, runtime
from .engine import engine
from .op import UPDATES_STATISTICS

_runtime = runtime.library


def _numbers(group: str, *names: str) -> list[int]:
    """Return flags or limits of native code, or zeros without the engine: then this process finds no races."""
    return engine.boundary.numbers(group, names) if engine is not None else [0] * len(names)


_USES_PART, _COPIES, _UPDATES = _numbers("race_flags", "RACE_USES_PART", "RACE_COPIES", "RACE_UPDATES_STATISTICS")
_WRITES, *_ = _numbers("race_access_flags", "RACE_WRITES", "RACE_PART", "RACE_ATOMIC", "RACE_UNOWNED")
(_TEXT_SIZE,) = _numbers("limits", "RACE_TEXT_SIZE")
FINDS_RACES = bool(_runtime.accelerator_simulation_races())
"""Whether this process reports races."""
_TORCH = os.path.dirname(torch.__file__)
_OF_PROGRAM, _OF_TORCH, _OF_LIBRARY = _numbers("race_code_owners", "RACE_OF_PROGRAM", "RACE_OF_TORCH", "RACE_OF_LIBRARY")
# The lines of these are not the program's.
_FOLDERS = {
    _TORCH + os.sep: _OF_TORCH,
    os.path.join(os.path.dirname(_TORCH), "triton", ""): _OF_TORCH,
    os.path.join(os.path.abspath(f"{os.path.dirname(__file__)}/../.."), ""): _OF_TORCH,
    "<frozen ": _OF_TORCH,
    os.path.join(sysconfig.get_path("stdlib"), ""): _OF_LIBRARY,
}

# Values decide which part of their first tensor these read, or write in place.
_READING_PARTS = frozenset(
    (
        *("index", "_unsafe_index", "index_select", "gather", "embedding", "embedding_bag", "_embedding_bag", "take"),
        *("_embedding_bag_forward_only", "masked_select", "take_along_dim"),
    )
)
_WRITING_PARTS = frozenset(
    (
        *("index_put_", "_index_put_impl_", "_unsafe_index_put_", "index_add_", "index_copy_", "index_fill_", "index_reduce_"),
        *("scatter_", "scatter_add_", "scatter_reduce_", "put_", "masked_fill_", "masked_scatter_", "embedding_renorm_"),
    )
)


_freed = _runtime.accelerator_simulation_race_freed
_freed.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_host_copy = _runtime.accelerator_simulation_race_host_copy
_host_copy.argtypes = (
    *(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
)


def flags_of(name: str) -> int:
    """Return how an op accesses memory, beyond what its schema says."""
    short_name = name.partition("::")[2].partition(".")[0]
    if short_name in _READING_PARTS or short_name in _WRITING_PARTS:
        return _USES_PART
    if short_name in UPDATES_STATISTICS:
        return _UPDATES
    return _COPIES if short_name == "copy_" else 0


# ---- The lines of the program. ----


def install() -> None:
    """Let the runtime find the lines of the program, and tell it what torch itself does. Initializes nothing."""
    for folder, code_owner in _FOLDERS.items():
        _runtime.accelerator_simulation_race_folder(os.fsencode(folder), code_owner)
    _write_stacks()
    os.register_at_fork(after_in_child=_write_stacks)
    for name in ("capture_begin", "replay"):
        _mark_graph_calls(name)
    _note_resizes()


def _write_stacks() -> None:
    """Let faulthandler write a thread's stack at a signal, which the runtime raises in threads that cannot take the GIL."""
    if not hasattr(os, "memfd_create"):
        return
    file = os.memfd_create("accelerator-stacks", os.MFD_CLOEXEC)
    number = signal.SIGRTMAX - 3
    faulthandler.register(number, file=file, all_threads=False, chain=False)
    _runtime.accelerator_simulation_race_stacks(file, int(number))


def _mark_graph_calls(name: str) -> None:
    """Tell the runtime when a method of graphs runs: what it fills is torch's own."""
    original = getattr(torch.cuda.CUDAGraph, name)

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        _runtime.accelerator_simulation_race_graph_call(1)
        try:
            return original(*args, **kwargs)
        finally:
            _runtime.accelerator_simulation_race_graph_call(0)

    setattr(torch.cuda.CUDAGraph, name, run)


def _note_resizes() -> None:
    """Tell the runtime which memory a storage gives back when it is resized, as FSDP does."""
    storage: Any = torch.UntypedStorage
    resize = storage.resize_

    @functools.wraps(resize)
    def resize_(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "cuda" and self.nbytes():
            _freed(self.data_ptr(), self.nbytes())
        return resize(self, *args, **kwargs)

    storage.resize_ = resize_


# ---- Accesses of calls that are no ops. ----


def skipped_transfer(target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
    """Record a copy between devices that a rehearsal does not perform, as the runtime records those of torch's kernel."""
    assert engine is not None
    name = _name("aten::copy_")
    with engine.accesses(name) as recorded:
        if target.is_cuda and source.is_cuda:
            devices = source.device.index, target.device.index
            recorded.order(*devices)  # as torch does around a copy between two GPUs
            recorded.add(source, 0)
            recorded.add(target, _WRITES)
            recorded.record()
            recorded.order(*devices)
            return
        on_device, on_host, flags = (target, source, _WRITES) if target.is_cuda else (source, target, 0)
        recorded.add(on_device, flags)
        recorded.record()
        # Otherwise torch copies through memory of its own, which is not pinned.
        is_direct = on_host.dtype == on_device.dtype and on_host.is_contiguous()
        address, index = on_host.data_ptr() if is_direct else None, on_device.device.index
        _host_copy(bindings.current_stream(index), index, name, address, on_host.nbytes, on_host is target, not non_blocking)


@functools.lru_cache(None)
def _name(name: str) -> bytes:
    """Return the bytes of a name, which must live as long as the process."""
    return name.encode()


def raise_race() -> None:
    """Raise the error of a race, if one is to be raised."""
    text = ctypes.create_string_buffer(_TEXT_SIZE)
    if _runtime.accelerator_simulation_race_take(text, len(text)):
        raise RuntimeError(os.fsdecode(text.value).rstrip())
