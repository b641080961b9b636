"""Dropout with a generator argument, which the op lacks; fused dropout; and scaling by a dropout mask."""

from __future__ import annotations

import torch
from torch import Tensor


def native_dropout(
    input: Tensor, p: float, train: bool | None = None, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    if train is False:
        return input.clone(), torch.ones_like(input, dtype=torch.bool)
    mask = torch.empty_like(input, dtype=torch.bool, memory_format=torch.contiguous_format).bernoulli_(
        1 - p, generator=generator
    )
    return input.mul(mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask


def fused_dropout(self: Tensor, p: float, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    # Here p is the probability of keeping a value, not of dropping it.
    mask = torch.empty_like(self, dtype=torch.uint8).bernoulli_(p, generator=generator)
    return masked_scale(self, mask, 1 / p), mask


def masked_scale(self: Tensor, mask: Tensor, scale: float) -> Tensor:
    return self * mask.to(self.dtype) * scale


DECOMPOSITIONS = {
    "aten::native_dropout": native_dropout,
    "aten::_fused_dropout": fused_dropout,
    "aten::_masked_scale": masked_scale,
}
