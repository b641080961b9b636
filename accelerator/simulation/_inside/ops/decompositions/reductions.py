"""Sums of complex numbers that skip NaN. The CPU has no kernel for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .common import Need, write


def nansum(self: Tensor, dim: list[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    if not self.is_complex():
        return torch.nansum(self, dim, keepdim, dtype=dtype)
    return torch.sum(self.masked_fill(self.isnan(), 0), dim, keepdim, dtype=dtype)


def nansum_out(*arguments: Any, out: Tensor, **options: Any) -> Tensor:
    return write(out, nansum(*arguments, **{"dtype": out.dtype, **options}))


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {"aten::nansum": nansum, "aten::nansum.out": nansum_out}
NEEDS = dict.fromkeys(DECOMPOSITIONS, Need(frozenset((torch.complex32, torch.complex64, torch.complex128))))
