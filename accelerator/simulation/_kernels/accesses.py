"""Tells the simulated runtime what ops access, for race detection (``native/race.h``), which this module has no part in.

The engine tells the runtime itself. Without it, a wrapper of each kernel override does. Both use the lists of this module.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import bindings, capture

__all__ = [
    "FINDS_RACES",
    "PART",
    "WRITES",
    "at_op",
    "flags_of",
    "functions",
    "install",
    "record",
    "record_ranges",
    "with_accesses",
]

_runtime = capture.runtime
_Tensor = torch.Tensor

READS_NOTHING, USES_PART, COPIES = 1, 2, 4
"""Flags of engine_races.hpp."""
WRITES, PART = 1, 2
"""Flags of an access, in native/race.h."""
_MAXIMUM_DIMS = 8
_TORCH = os.path.dirname(torch.__file__)
# Their lines are not the program's.
_FOLDERS = (
    *(_TORCH + os.sep, os.path.join(os.path.dirname(_TORCH), "triton", "")),
    *(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ""), "<frozen "),
)

# These make a tensor like their argument and do not read it.
_FACTORIES = frozenset(
    (
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like", "new_empty"),
        *("new_empty_strided", "new_zeros", "new_ones", "new_full"),
    )
)
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


class _Layout(ctypes.Structure):
    """``race_layout`` of native/race.h."""

    _fields_ = (
        ("address", ctypes.c_size_t),
        ("item_size", ctypes.c_int64),
        ("dims", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * _MAXIMUM_DIMS),
        ("strides", ctypes.c_int64 * _MAXIMUM_DIMS),
    )


class _Access(ctypes.Structure):
    """``race_access`` of native/race.h."""

    _fields_ = (
        ("layout", _Layout),
        ("owner", ctypes.c_void_p),
        ("flags", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
    )


# torch's numbers of types, which the report words.
_DTYPES = {
    dtype: number
    for number, dtype in enumerate(
        (
            *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64),
            *(torch.complex32, torch.complex64, torch.complex128, torch.bool, torch.qint8, torch.quint8, torch.qint32),
            torch.bfloat16,
        )
    )
}

functions = {
    "op": _runtime.accelerator_simulation_race_op,
    "op_ends": _runtime.accelerator_simulation_race_op_ends,
    "place": _runtime.accelerator_simulation_race_place,
    "set_place": _runtime.accelerator_simulation_race_set_place,
    "skips": _runtime.accelerator_simulation_race_skips,
    "take": _runtime.accelerator_simulation_race_take,
    "order": _runtime.accelerator_simulation_race_order,
    "owners": _runtime.accelerator_simulation_race_owners,
}
"""The runtime's functions, in the order of ``Races`` in native/engine_races.hpp."""

functions["op"].argtypes = (
    *(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int),
)
functions["place"].argtypes = functions["skips"].argtypes = (ctypes.c_char_p,)
functions["take"].argtypes = (ctypes.c_char_p, ctypes.c_size_t)
_runtime.accelerator_simulation_race_released.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_runtime.accelerator_simulation_race_released.restype = ctypes.c_size_t
_freed = _runtime.accelerator_simulation_race_freed
_freed.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


FINDS_RACES = bool(_runtime.accelerator_simulation_races())
"""Whether this process reports races."""


def flags_of(name: str) -> int:
    """Return how an op accesses memory, beyond what its schema says."""
    short_name = name.partition("::")[2].partition(".")[0]
    flags = READS_NOTHING if short_name in _FACTORIES else 0
    if short_name in _READING_PARTS or short_name in _WRITING_PARTS:
        flags |= USES_PART
    return flags | (COPIES if short_name == "copy_" else 0)


# ---- The lines of the program. ----


def install() -> None:
    """Let the runtime find the lines of the program, and tell it what torch itself does. Initializes nothing."""
    for folder in _FOLDERS:
        _runtime.accelerator_simulation_race_skip(os.fsencode(folder))
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


# ---- The accesses, without the engine. ----


def with_accesses(name: str, override: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel override that tells the runtime what each call accesses."""
    base, _, overload = name.partition(".")
    schema = bindings.get_schema(base, overload)
    names = [argument.name for argument in schema.arguments]
    written = frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    news = [result.alias_info is None for result in schema.returns]
    flags = flags_of(name)
    text = base.encode()

    def run(*args: Any, **kwargs: Any) -> Any:
        place = _find_place()
        outer = functions["set_place"](place)
        try:
            return run_at(place, args, kwargs)
        finally:
            functions["set_place"](outer)

    def run_at(place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if flags & COPIES and _is_transfer(arguments["self"], arguments["src"]):
            return _transfer(text, arguments, place, lambda: override(*args, **kwargs))
        _record(text, _arguments(arguments, written, flags), place)
        raise_race()
        results = override(*args, **kwargs)
        values = [results] if len(news) == 1 else results or ()
        new = [(each, WRITES) for value, is_new in zip(values, news, strict=False) if is_new for each in _tensors(value)]
        _record(text, new, place)
        raise_race()
        return results

    return run


def _arguments(arguments: dict[str, Any], written: frozenset[str], flags: int) -> list[tuple[torch.Tensor, int]]:
    accesses: list[tuple[torch.Tensor, int]] = []
    for name, value in arguments.items():
        for tensor in _tensors(value):
            part = PART if flags & USES_PART and not accesses else 0
            if name in written or not flags & READS_NOTHING:
                accesses.append((tensor, part | (WRITES if name in written else 0)))
    return accesses


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, _Tensor):
        return (value,)
    return (each for item in value for each in _tensors(item)) if isinstance(value, (list, tuple)) else ()


def _record(name: bytes, accesses: list[tuple[torch.Tensor, int]], place: int) -> None:
    """Record accesses, each on the current stream of its tensor's device."""
    _release_owners()
    for index in {tensor.device.index for tensor, _ in accesses if tensor.is_cuda}:
        items = [_describe(tensor, flags) for tensor, flags in accesses if tensor.is_cuda and tensor.device.index == index]
        known = [item for item in items if item is not None]
        array = (_Access * len(known))(*known)
        functions["op"](bindings.current_stream(index), index, name, array, len(known), place, 0)


def _describe(tensor: torch.Tensor, flags: int) -> _Access | None:
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return None
    dims = tensor.dim()
    address = tensor.data_ptr()
    if not address:
        return None
    access = _Access(flags=flags, dtype=_DTYPES.get(tensor.dtype, -1), owner=_weak_reference(tensor))
    layout = access.layout
    layout.address, layout.item_size = address, tensor.element_size()
    if dims > _MAXIMUM_DIMS:
        layout.dims = -1
        last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        layout.sizes[0] = (last + 1) * tensor.element_size()
        return access
    layout.dims = dims
    layout.sizes[:dims], layout.strides[:dims] = list(tensor.size()), list(tensor.stride())
    return access


def at_op(name: str, accesses: Iterable[tuple[torch.Tensor, int]], call: Callable[[], Any]) -> Any:
    """Record accesses to CUDA tensors, then make a call whose copies belong to the same line."""
    place = _find_place()
    outer = functions["set_place"](place)
    try:
        _record(_name(name), list(accesses), place)
        raise_race()
        return call()
    finally:
        functions["set_place"](outer)


def record(name: str, accesses: Iterable[tuple[torch.Tensor, int]]) -> None:
    """Record accesses to CUDA tensors."""
    at_op(name, accesses, lambda: None)


def record_ranges(name: str, ranges: Iterable[tuple[int, int, int]]) -> None:
    """Record accesses to ranges of memory, on the current stream of the current device: their starts, ends and flags."""
    accesses: list[_Access] = []
    for start, end, flags in ranges:
        access = _Access(flags=flags, dtype=-1)
        layout = access.layout
        layout.address, layout.item_size, layout.dims, layout.sizes[0], layout.strides[0] = start, 1, 1, end - start, 1
        accesses.append(access)
    index = torch.cuda.current_device()
    array = (_Access * len(accesses))(*accesses)
    functions["op"](bindings.current_stream(index), index, _name(name), array, len(accesses), _find_place(), 0)
    raise_race()


@functools.lru_cache(None)
def _name(name: str) -> bytes:
    """Return the bytes of a name, which must live as long as the process."""
    return name.encode()


def _weak_reference(tensor: torch.Tensor) -> int:
    """Return a weak reference to a tensor's storage, by which the runtime knows when the memory is freed."""
    return bindings.weak_reference(tensor.untyped_storage())


def _release_owners() -> None:
    owners = (ctypes.c_void_p * 64)()
    while count := _runtime.accelerator_simulation_race_released(owners, 64):
        for owner in owners[:count]:
            bindings.free_weak_reference(owner)


def _is_transfer(target: Any, source: Any) -> bool:
    """Return whether torch's own kernel copies between devices: the runtime sees its copies."""
    return isinstance(source, _Tensor) and bool(target.device != source.device)


def _transfer(name: bytes, arguments: dict[str, Any], place: int, call: Callable[[], Any]) -> Any:
    items = [_describe(arguments["self"], WRITES), _describe(arguments["src"], 0)]
    known = [item for item in items if item is not None]
    array = (_Access * len(known))(*known)
    functions["op"](None, 0, name, array, len(known), place, 1)
    try:
        result = call()
    finally:
        functions["op_ends"]()
        for item in array:
            if item.owner:
                bindings.free_weak_reference(item.owner)
    raise_race()
    return result


def _find_place() -> int:
    """Return the number of the innermost line of the program."""
    frame = first = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_FOLDERS):
        frame = frame.f_back  # type: ignore[assignment]
    node = bindings.current_node()
    if frame is None and node is not None:
        return _place(f"the backward pass, in {node.name()}")
    frame = frame or first
    return _place(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")


@functools.lru_cache(4096)
def _place(text: str) -> int:
    place: int = functions["place"](os.fsencode(text))
    return place


def raise_race() -> None:
    """Raise the error of a race, if one is to be raised."""
    text = ctypes.create_string_buffer(8192)
    if functions["take"](text, len(text)):
        raise RuntimeError(os.fsdecode(text.value).rstrip())
