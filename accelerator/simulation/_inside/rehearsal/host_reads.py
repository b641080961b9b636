"""Reads by the host of tensors whose values are not known.

Whether a read steers the program cannot be seen in general. These reads are not noted:

- Questions whether numbers are finite (`isfinite`, comparisons with infinity or of a tensor with itself, those of GradScaler).
  The rehearsal assumes that all numbers are, so the answers count as known.
- ``item()`` and ``tolist()`` of floats, and ``item()`` of the number of true elements of a mask. They return a number of
  `unknown_numbers`.
- Comparisons with zero or less of floats that cannot be negative, such as a norm: every value gives one answer.
- Copies to the host. They are noted once a number of the copy is read, as above, or NumPy gets more than one number of it.
- What prints a tensor, and what ``torch.distributions`` validates: all is valid that is not known.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..ops import bindings
from .known_values import COUNT, EMPTY, KNOWN, MOST_BYTES, UNKNOWN, Tensor, allocated, memory, state_of
from .missing_values import note, this_thread, thread_set, without_notes
from .unknown_numbers import unknown

_libraries: list[Any] = []  # the overrides end with their library


def _reads_scalar(tensor: torch.Tensor) -> bool:
    """Note the read of a number, unless its reader remembers that it is not known. Return whether it is taken to be true."""
    state = state_of((tensor,))
    if state == KNOWN:
        return False
    if getattr(this_thread, "is_validating", False) and tensor.dtype is torch.bool:
        return True
    reader = getattr(this_thread, "reader", None)
    if reader is not None and (tensor.is_floating_point() or state == COUNT):
        reader.append(state)
    else:
        note("aten::item")
    return False


def install() -> None:
    """Replace the functions by which the host reads numbers, and follow memory that torch allocates when it resizes."""
    texts: Any = sys.modules["torch._tensor_str"]
    texts._str = without_notes(texts._str)
    tensor: Any = Tensor
    tensor.item = _remembering(tensor.item)
    tensor.tolist = _noting_list(tensor.tolist)
    tensor.numpy = _noting_array(tensor.numpy)
    library = bindings.make_library("IMPL", "aten", "", __file__, 0)
    _libraries.append(library)
    below = bindings.keys_after(bindings.DispatchKey.BackendSelect)
    operator: Any = torch.ops.aten._local_scalar_dense.default

    def read_and_note(keyset: Any, tensor: torch.Tensor) -> Any:
        return _reads_scalar(tensor) or operator.redispatch(keyset & below, tensor)

    # The dispatcher visits this key for tensors of every device, before the key of the device.
    library.impl("aten::_local_scalar_dense", bindings.DispatchKey.BackendSelect, read_and_note, True)
    resize: Any = torch.ops.aten.resize_.default

    def resize_and_follow(keyset: Any, self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        before = self.data_ptr() if self.is_cuda else 0
        resize.redispatch(keyset & below, self, *arguments, **options)
        if self.is_cuda and self.data_ptr() != before:
            allocated(self, EMPTY if self.nbytes <= MOST_BYTES else UNKNOWN)
        return self

    storage: Any = torch.UntypedStorage
    resize_storage = storage.resize_

    @functools.wraps(resize_storage)
    def resize_storage_and_forget(self: torch.UntypedStorage, size: int) -> Any:
        result = resize_storage(self, size)
        if self.device.type == "cuda":
            memory.pop(self.data_ptr(), None)
        return result

    storage.resize_ = resize_storage_and_forget
    library.impl("aten::resize_", bindings.DispatchKey.BackendSelect, resize_and_follow, True)


def _remembering(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def item(self: torch.Tensor) -> Any:
        reader: list[int] = []
        with thread_set("reader", reader):
            if self.dtype is torch.uint64 and type(self) is torch.Tensor:
                # torch 2.6 and 2.7 pass no number from 2^63 on to a function of Python, such as the one that notes the read.
                value = read(self.view(torch.int64)) % 2**64
            else:
                value = read(self)
        return unknown(value, reader[0] != UNKNOWN) if reader else value

    return item


def _noting_list(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def tolist(self: torch.Tensor) -> Any:
        state = KNOWN if self.layout is not torch.strided else state_of((self,))
        values = read(self)
        if state == KNOWN:
            return values
        if self.is_floating_point():
            return unknown(values, state != UNKNOWN)
        note("aten::tolist")
        return values

    return tolist


def _noting_array(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def numpy(self: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        array = read(self, *arguments, **options)
        if state_of((self,)) != KNOWN and (self.numel() > 1 or not self.is_floating_point()):
            note("numpy")
        return array

    return numpy
