"""Zeroing through the simulated driver. It releases whole pages, because a simulated GPU may have more memory than the host."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from .common import Need

_MANY_BYTES = 1 << 20  # for fewer bytes, the driver releases no pages


@functools.cache
def _zero() -> Callable[[int, int], None]:
    function = ctypes.CDLL("libcuda.so.1").accelerator_simulation_zero
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_size_t), None
    return function


def zero_(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.nbytes < _MANY_BYTES or not tensor.is_contiguous():
        return tensor.fill_(0)
    _zero()(tensor.data_ptr(), tensor.nbytes)
    return tensor


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {"aten::zero_": zero_}
NEEDS = {"aten::zero_": Need()}  # the engine releases pages too
