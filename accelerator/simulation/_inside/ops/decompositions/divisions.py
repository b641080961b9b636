"""Divisions of integers in place. The CPU's kernels raise at a divisor of zero, after they have written some quotients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .common import Need


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(self: Tensor, other: Any, **options: Any) -> Tensor:
        return self.copy_(function(self, other, **options))

    return run


DECOMPOSITIONS = {
    "aten::floor_divide_.Tensor": _in_place(torch.floor_divide),
    "aten::remainder_.Tensor": _in_place(torch.remainder),
    "aten::fmod_.Tensor": _in_place(torch.fmod),
    "aten::div_.Tensor_mode": _in_place(torch.div),
}
_INTEGERS = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
NEEDS = {name: Need(dtypes=_INTEGERS) for name in DECOMPOSITIONS}
