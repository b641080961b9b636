"""Indices of triangles in types for which the CPU has no kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _converting(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def indices(row: int, col: int, offset: int = 0, *, dtype: torch.dtype | None = None, **options: object) -> Tensor:
        return function(row, col, offset, dtype=torch.int64, device="cpu").to(dtype or torch.int64)

    return indices


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "aten::tril_indices": _converting(torch.tril_indices),
    "aten::triu_indices": _converting(torch.triu_indices),
}
