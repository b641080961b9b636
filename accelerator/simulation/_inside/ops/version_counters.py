"""Version counters of tensors in lists that an op of torch writes.

Autograd's own kernels count changes of single tensors. For lists, CUDA's kernels count them, so their overrides must, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .schemas import schema_of, short_name

SPLITS = "aten::split_with_sizes_copy.out"
"""The engine leaves this op to Python, because what it counts depends on all its arguments."""


def counts_versions(name: str) -> bool:
    """Return whether CUDA's kernel of an op counts the changes of the tensors in its first list.

    The kernels of fused optimizers (``_fused_adam_``) do not.
    """
    first = schema_of(name).arguments[0]
    return short_name(name).startswith("_foreach_") and first.alias_info is not None and first.alias_info.is_write


def with_versions(name: str, override: Callable[..., Any]) -> Callable[..., Any]:
    """Return an op's kernel override, which then counts the changes of lists as CUDA's kernel does."""
    if name == SPLITS:
        return _with_versions_of_splits(override)
    if not counts_versions(name):
        return override

    def run(tensors: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        result = override(tensors, *args, **kwargs)
        _count(tensors)
        return result

    return run


def _with_versions_of_splits(override: Callable[..., Any]) -> Callable[..., Any]:
    """Count as native/cuda/TensorShape.cu does: its one kernel for dense tensors of one type counts only what it resizes."""

    def run(self: torch.Tensor, *args: Any, out: list[torch.Tensor], **kwargs: Any) -> Any:
        sizes = [tensor.size() for tensor in out]
        is_one_kernel = all(torch.ops.aten.is_non_overlapping_and_dense(tensor) for tensor in (self, *out))
        is_one_kernel = is_one_kernel and all(tensor.dtype == self.dtype for tensor in out)
        result = override(self, *args, out=out, **kwargs)
        _count(tensor for tensor, size in zip(out, sizes, strict=True) if not is_one_kernel or tensor.size() != size)
        return result

    return run


def _count(tensors: Iterable[torch.Tensor]) -> None:
    changed = list(tensors)
    if not torch.is_inference_mode_enabled() and any(tensor.is_inference() for tensor in changed):
        raise RuntimeError(
            "Inplace update to inference tensor outside InferenceMode is not allowed."
            "You can make a clone to get a normal tensor before doing inplace update."
        )
    torch.autograd.graph.increment_version(changed)
