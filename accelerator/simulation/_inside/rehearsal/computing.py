"""What a rehearsal computes by its size: numbers, masks and indices; and threads all of whose ops compute."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from threading import get_ident
from typing import Any

import torch

from ..._settings import LIMITS
from ..ops.call import tensors_in

SMALL_COPY = LIMITS["COPY"]
"""More bytes are not copied, nor are more of integers and masks computed, nor CPU tensors filled with random numbers."""

# Up to this size results of floating point are computed, random numbers too. It is the unit of torch's allocator.
_SMALL_RESULT = 512

Tensor = torch.Tensor
computing_threads: set[int] = set()  # the threads all of whose ops compute


@contextlib.contextmanager
def all_computed() -> Generator[None]:
    """Let all ops of this thread compute and all its copies move data, whatever their size."""
    thread = get_ident()
    is_outermost = thread not in computing_threads
    computing_threads.add(thread)
    try:
        yield
    finally:
        if is_outermost:
            computing_threads.discard(thread)


def is_small(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is small enough to have values: a number, a mask or indices."""
    if tensor.layout is not torch.strided:
        return False
    return tensor.nbytes <= (_SMALL_RESULT if has_fractions(tensor) else SMALL_COPY)


def has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized


def are_integers(values: Any) -> bool:
    """Return whether there are tensors, and all are integers or masks."""
    tensors = tensors_in(values)
    return bool(tensors) and not any(map(has_fractions, tensors))


def are_small(values: Any) -> bool:
    return all(map(is_small, tensors_in(values)))


def are_masks(values: Any) -> bool:
    return all(tensor.dtype is torch.bool for tensor in tensors_in(values))
