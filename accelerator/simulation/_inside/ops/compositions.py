"""Calls that CUDA's kernel composes of other ops, whose memory counts: the sparse gradients of embedding bags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import bindings
from .schemas import binder

_NAME = "aten::_embedding_bag_backward"


def with_compositions(name: str, override: Callable[..., Any]) -> Callable[..., Any]:
    """Return an op's kernel override, which composes the calls that CUDA's kernel does."""
    if name != _NAME:
        return override
    bind = binder(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        given = {"per_sample_weights": None, "padding_idx": -1, **bind(args, kwargs)}
        if not given["sparse"]:
            return override(*args, **kwargs)
        tensors = (given[name] for name in ("grad", "indices", "offsets", "offset2bag", "bag_size"))
        options = (given[name] for name in ("num_weights", "scale_grad_by_freq", "mode", "per_sample_weights", "padding_idx"))
        with torch.no_grad(), bindings.below_autograd():
            return torch.ops.aten._embedding_bag_sparse_backward(*tensors, *options)

    return run
