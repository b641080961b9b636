"""Kernel overrides that are composed of other ops, for ops without a suitable CPU kernel.

``DECOMPOSITIONS`` maps an op's name in the dispatcher ("aten::mm.dtype", "aten::_thnn_fused_lstm_cell") to a function that
replaces the CPU's kernel and has the same arguments: it gets CPU aliases for CUDA tensors, numbers for wrapped numbers, and
the CPU for devices. It returns the op's results: new CPU tensors, and anything for an argument that the op writes, since the
caller gets its own argument back. It writes such arguments in place, and may resize an ``out=`` tensor.

It draws random numbers from its argument ``generator``, a CPU generator that is seeded from the CUDA generator. It has this
argument even if the op has none, so that the CPU's default generator, which other threads use, is left alone. Apart from that,
decompositions are pure: if a stream captures, they run at each replay. They run below autograd and do not compute gradients
with it.

``NEEDS`` says for some of the ops which calls need the decomposition: for all others the CPU's kernel has CUDA's results.

``CUDNN_SELECTION`` has kernels that replace CUDA's as they are: they read no memory themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import (
    convolution,
    cudnn_attention,
    divisions,
    dropout,
    efficient_attention,
    embedding_bags,
    fft,
    flash_attention,
    int4_weights,
    linalg,
    log_sigmoid,
    matmul,
    normalization,
    outputs,
    recurrent,
    reductions,
    semi_structured,
    softmax,
    triangles,
    zeroing,
)
from .common import Need
from .cudnn_selection import CUDNN_SELECTION, separate_flag
from .embedding_bags import DECREASING_OFFSETS

__all__ = ["CUDNN_SELECTION", "DECOMPOSITIONS", "DECREASING_OFFSETS", "NEEDS", "Need", "separate_flag"]

_MODULES = (
    *(convolution, cudnn_attention, divisions, dropout, efficient_attention, embedding_bags, fft, flash_attention),
    *(int4_weights, linalg, log_sigmoid, matmul, normalization, outputs, recurrent, reductions, semi_structured, softmax),
    *(triangles, zeroing),
)
DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    name: function for module in _MODULES for name, function in module.DECOMPOSITIONS.items()
}
NEEDS: dict[str, Need] = {name: need for module in _MODULES for name, need in getattr(module, "NEEDS", {}).items()}
