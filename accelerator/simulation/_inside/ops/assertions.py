"""Device-side assertions: what the CPU's kernels refuse in values, and CUDA's kernels only notice on the device.

The call returns, the context is broken, and the next call that checks it raises CUDA's error.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import torch

from . import runtime
from .decompositions import DECREASING_OFFSETS

_SIZES = '-sizes[i] <= index && index < sizes[i] && "index out of bounds"'
_SELECT = "srcIndex < srcSelectDimSize"
_TARGET = "t >= 0 && t < n_classes"
_SCATTER = 'idx_dim >= 0 && idx_dim < index_size && "scatter gather kernel index out of bounds"'
# By the beginning of an op's name: the file of CUDA's kernel, and what it asserts. Most texts were read on an H100, torch 2.11.
_ASSERTIONS = {
    "_unsafe_index": ("IndexKernel.cu", _SIZES),
    "_index_put_impl": ("IndexKernel.cu", _SIZES),
    "index_put": ("IndexKernel.cu", _SIZES),
    "index_select": ("Indexing.cu", _SELECT),
    "index_add": ("Indexing.cu", "dstIndex < dstAddDimSize"),
    "index_reduce": ("Indexing.cu", "dstIndex < dstAddDimSize"),
    "index_copy": ("IndexKernel.cu", 'idx >= 0 && idx < self_dim_size && "index_copy_(): index out of bounds"'),
    "index_fill": ("IndexKernel.cu", '-self_dim_size <= idx && idx < self_dim_size && "index out of bounds"'),
    "index": ("IndexKernel.cu", _SIZES),
    "_embedding_bag": (
        "EmbeddingBag.cu",
        '!has_invalid_index && "Invalid input index in EmbeddingBag: index out of range [0, numRows)"',
    ),
    "masked_scatter": ("IndexKernel.cu", "totalElements <= srcSize"),
    "gather": ("ScatterGatherKernel.cu", _SCATTER),
    "scatter": ("ScatterGatherKernel.cu", _SCATTER),
    "take": ("IndexKernel.cu", "idx < numel && idx >= -numel"),
    "put": ("IndexKernel.cu", "idx < numel && idx >= -numel"),
    "nll_loss2d": ("NLLLoss2d.cu", _TARGET),
    "nll_loss": ("Loss.cu", _TARGET),
    "multi_margin_loss": ("MultiMarginLoss.cu", "target_k >= 0 && target_k < dim"),
    "multilabel_margin_loss": ("MultiLabelMarginCriterion.cu", "target >= 0 && target < dim"),
    "max_unpool": ("MaxUnpooling.cu", "maxind >= 0 && maxind < outputImageSize"),
    "binary_cross_entropy": ("Loss.cu", "input_val >= zero && input_val <= one"),
    "multinomial": ("MultinomialKernel.cu", "!(val < zero)"),
    "bernoulli": ("DistributionTemplates.h", "0 <= p4 && p4 <= 1"),
    "poisson": ("Distributions.cu", 'lambda >= 0 && "invalid Poisson rate, expected rate to be non-negative"'),
    "_assert_async": ("TensorCompare.cu", ""),
}
_NO_MESSAGE = "Expected Tensor with single nonzero value"  # what the CPU's _assert_async says without a message
# What multinomial's kernel asserts of a distribution whose sum is 0 or no number.
_SUM = "cumdist[size - 1] > static_cast<scalar_t>(0)"
_VALUES = re.compile(
    r"index -?\d+ is out of bounds for dimension|index out of range in self|which is not in the valid range"
    r"|out of range: tried to access index|Target -?\d+ is out of bounds|target out of range|'target' is out of range"
    r"|Found an invalid max index|all elements of (input|target) should be between 0 and 1|index out of bounds: "
    r"|invalid multinomial distribution|Expected p_in >= 0 && p_in <= 1|invalid Poisson rate"
    rf"|{DECREASING_OFFSETS}|Number of elements of source < number of ones in mask"
)


def _find(op: str) -> tuple[str, str] | None:
    return next((found for start, found in _ASSERTIONS.items() if op.startswith(start)), None)


def is_failed(op: str, error: Exception) -> bool:
    """Return whether the CPU's kernel has raised an error for values that CUDA's kernel asserts."""
    return op.startswith("_assert_async") or (_find(op) is not None and _VALUES.search(str(error)) is not None)


def fail(op: str, error: Exception, device: torch.device) -> None:
    """Print the line of a failed assertion and break the context of the device.

    Block and thread are 0: the CPU's kernel does not say where. Translated kernels print theirs (``native/ptx/print.c``).

    Raises:
        RuntimeError: CUDA_LAUNCH_BLOCKING is 1; torch's error.
    """
    file, assertion = _find(op) or ("compiled code", "index out of bounds")
    text = str(error).partition("\n")[0].rstrip(".")
    if "infinity or NaN" in text or "sum of probabilities" in text:
        assertion = _SUM
    if DECREASING_OFFSETS in text:
        assertion = "end >= begin"
    if op.startswith("_assert_async") and not text.startswith(_NO_MESSAGE):
        assertion = text
    line = f"{file}: {op}: block: [0,0,0], thread: [0,0,0] Assertion `{assertion}` failed. ({text})"
    print(line, file=sys.stderr, flush=True)
    if runtime.break_context(device, runtime.ASSERT):
        runtime.raise_error(device)


def with_valid_values(value: Any) -> Any:
    """Return arguments with zeros and ones as numbers, so that the CPU's kernel makes results for a failed call."""
    if isinstance(value, torch.Tensor):
        is_integer = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
        return torch.zeros_like(value) if is_integer else torch.ones_like(value) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return type(value)(map(with_valid_values, value))
    return {name: with_valid_values(each) for name, each in value.items()} if isinstance(value, dict) else value
