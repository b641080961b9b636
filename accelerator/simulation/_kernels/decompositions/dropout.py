"""Fused dropout and scaling by its mask."""

from __future__ import annotations

import torch
from torch import Tensor


def fused_dropout(self: Tensor, p: float, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    # Here p is the probability of keeping a value, not of dropping it.
    mask = torch.empty_like(self, dtype=torch.uint8).bernoulli_(p, generator=generator)
    return masked_scale(self, mask, 1 / p), mask


def masked_scale(self: Tensor, mask: Tensor, scale: float) -> Tensor:
    return self * mask.to(self.dtype) * scale


DECOMPOSITIONS = {"aten::_fused_dropout": fused_dropout, "aten::_masked_scale": masked_scale}
