"""Embedding bags: CUDA's kernels return other indices for the backward than the CPU's.

CUDA returns the bag of each index, as many sizes as there are offsets, and indices of maxima only for the mode "max". It takes
the first offset as 0 and the end of the last bag as the number of indices, whatever they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

DECREASING_OFFSETS = "an embedding bag ends before it begins"
"""The error in place of which CUDA's kernel fails an assertion."""

_MODE_MAX = 2


def _bags(function: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]) -> Callable[..., tuple[Tensor, ...]]:
    def run(
        weight: Tensor,
        indices: Tensor,
        offsets: Tensor,
        scale_grad_by_freq: bool = False,
        mode: int = 0,
        sparse: bool = False,
        per_sample_weights: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int = -1,
    ) -> tuple[Tensor, ...]:
        options = scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset, padding_idx
        if offsets.numel() > include_last_offset:
            offsets = offsets.clone()
            offsets[0] = 0
            ends = torch.cat([offsets[1 : offsets.numel() - include_last_offset], offsets.new_tensor([indices.numel()])])
            if (ends < offsets[: ends.numel()]).any():
                raise RuntimeError(DECREASING_OFFSETS)
            if include_last_offset:
                offsets[-1] = indices.numel()
        output, _, bag_size, max_indices = function(weight, indices, offsets, *options)
        starts = offsets[1:] if not include_last_offset else offsets[1:-1]
        bag_of_index = torch.bucketize(torch.arange(indices.numel()), starts.long().contiguous(), right=True).to(indices.dtype)
        sizes = torch.zeros(offsets.size(), dtype=indices.dtype)
        sizes[: bag_size.numel()] = bag_size
        return output, bag_of_index, sizes, max_indices.to(indices.dtype) if mode == _MODE_MAX else indices.new_empty(0)

    return run


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "aten::_embedding_bag": _bags(torch.ops.aten._embedding_bag.default),
    "aten::_embedding_bag_forward_only": _bags(torch.ops.aten._embedding_bag_forward_only.default),
}
