"""The shapes of ops for which torch has no meta kernel, as functions of meta tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["SHAPE_RULES"]


def _like_first(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
    return torch.empty_like(tensor)


def _like_second(first: Any, tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
    return torch.empty_like(tensor)


def _geqrf(tensor: Tensor) -> tuple[Tensor, Tensor]:
    columns = tensor.new_empty((*tensor.shape[:-2], tensor.size(-1), tensor.size(-2))).mT
    return columns, tensor.new_empty((*tensor.shape[:-2], min(tensor.shape[-2:])))


def _lstsq_out(tensor: Tensor, b: Tensor, *arguments: Any, solution: Tensor, **others: Any) -> tuple[Any, ...]:
    solution.resize_((*tensor.shape[:-2], tensor.size(-1), *b.shape[tensor.dim() - 1 :]))
    return solution, *(others[name].resize_(0) for name in ("residuals", "rank", "singular_values"))


SHAPE_RULES: dict[str, Callable[..., Any]] = {
    "aten::_logcumsumexp": _like_first,
    "aten::_ctc_loss_backward": _like_second,
    "aten::_ctc_loss_backward.Tensor": _like_second,
    "aten::fractional_max_pool3d_backward": _like_second,
    "aten::multi_margin_loss_backward": _like_second,
    "aten::multilabel_margin_loss_backward": _like_second,
    "aten::geqrf": _geqrf,
    "aten::linalg_lstsq.out": _lstsq_out,
}
