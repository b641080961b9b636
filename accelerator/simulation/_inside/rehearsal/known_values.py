"""Which tensors of a rehearsal have values: the state of each storage by its address.

Ops compute only if that is cheap, so most device memory holds no values. A value that is not known matters where it decides a
shape, or where the host reads it: `missing_values` keeps the line of the program, `host_reads` has the reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..._settings import LIMITS
from ..ops import bindings
from .missing_values import note, this_thread

UNKNOWN, NOT_NEGATIVE, COUNT, KNOWN = 0, 1, 2, 3
"""The states of memory, the worse the lower. COUNT is an unknown number of true elements of a mask.

NOT_NEGATIVE are other unknown numbers that every program would find to be zero or more, such as a norm.
"""

EMPTY = -1
"""The state of memory that no op has written. A kernel that is not torch's may have. It is read as UNKNOWN."""

Tensor = torch.Tensor
MOST_BYTES = LIMITS["COPY"]  # of memory that has values, but for masks of any size
_ABSENT = UNKNOWN, 0
memory: dict[int, tuple[int, int]] = {}  # the state and the size of device memory, by the address of its storage
_host_copies: dict[int, tuple[int, int]] = {}  # storages on the host by address: a weak reference, and the state
_MOST_HOST_COPIES = 4096
_at_first_copy: list[Callable[[], None]] = []


# ---- States. ----


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage. If the storage had a Python object, autograd would add gradients elsewhere."""
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.itemsize


def allocated(tensor: torch.Tensor, state: int) -> None:
    """Set the state of the memory of a new tensor."""
    nbytes = tensor.nbytes
    if state or nbytes <= MOST_BYTES:
        memory[tensor.data_ptr()] = state, nbytes
    else:
        memory.pop(tensor.data_ptr(), None)


def written(tensor: torch.Tensor, state: int) -> None:
    """Note that an op wrote values of a state into a tensor, which may be a part of its storage."""
    if not tensor.is_cuda or not tensor.numel():
        return
    address = _address(tensor)
    before, nbytes = memory.get(address, (UNKNOWN, None))
    if nbytes is None:
        return
    if (state == NOT_NEGATIVE) is not (before == NOT_NEGATIVE) and before != EMPTY and tensor.nbytes < nbytes:
        state = UNKNOWN  # of values that are known, some may be negative
    if state == UNKNOWN or before == EMPTY or before > state or tensor.nbytes >= nbytes:
        memory[address] = state, nbytes


def state_of(values: Iterable[Any]) -> int:
    """Return the state of the tensors among the arguments of an op: that of the worst."""
    state = KNOWN
    for value in values:
        if isinstance(value, Tensor):
            if value.is_cuda:
                if value.layout is not torch.strided:
                    return UNKNOWN
                if value.numel():
                    state = min(state, max(memory.get(_address(value), _ABSENT)[0], UNKNOWN))
            elif _host_copies:
                state = min(state, _state_on_host(value))
        elif type(value) is list or type(value) is tuple:
            state = min(state, state_of(value))
        if state == UNKNOWN:
            return UNKNOWN
    return state


def _state_on_host(tensor: torch.Tensor) -> int:
    if not _host_copies or tensor.layout is not torch.strided or not tensor.is_cpu:
        return KNOWN
    copy = _host_copies.get(tensor.untyped_storage().data_ptr())
    return KNOWN if copy is None or bindings.is_expired(copy[0]) else copy[1]


def call_at_first_copy(function: Callable[[], None]) -> None:
    """Call a function when values that are not known are first copied to the host."""
    _at_first_copy.append(function)


def copied_to_host(tensor: torch.Tensor, state: int) -> None:
    """Note the state of values that were copied into a tensor on the host."""
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    earlier = _host_copies.pop(address, None)
    if earlier is not None:
        bindings.free_weak_reference(earlier[0])
    if state == KNOWN:
        return
    op: str | None = getattr(this_thread, "library_op", None)
    if op is not None:
        note(op)
    while _at_first_copy:
        _at_first_copy.pop()()
    if len(_host_copies) >= _MOST_HOST_COPIES:
        for each, (reference, _) in [*_host_copies.items()]:
            if bindings.is_expired(reference):
                bindings.free_weak_reference(reference)
                del _host_copies[each]
    _host_copies[address] = bindings.weak_reference(storage), state
