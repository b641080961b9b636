"""Compares simulated GPUs with the CPU on PyTorch's operator database (OpInfo), forward and backward.

By default every 64th entry runs on a few samples, and the entries that once failed run. With the slow tests all entries run.
"""

from __future__ import annotations

import pytest
import torch

from accelerator.simulation._settings.torch_versions import NEWEST_TORCH, release
from tests.simulation.ops import operators

# Run in one worker of xdist, because importing the database takes seconds in each process.
pytestmark = pytest.mark.xdist_group("operators")

SAMPLE_STEP, SAMPLES = 96, 4
CHUNKS = 16

# CUDA does not support these, so an error from torch is right.
UNSUPPORTED = {
    "histogram": "has no CUDA kernel",
    "histogramdd": "has no CUDA kernel",
    "sparse.mm.reduce": "has no CUDA kernel",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "is a kernel of the CPU",
    "torch.ops.aten._flash_attention_forward": "no type that both devices support",
    "torch.ops.aten._efficient_attention_forward": "no type that both devices support",
    "nn.functional.batch_norm.without_cudnn": "no type that the database gives both devices",
    **{
        f"jiterator_{name}": "the CPU has no counterpart"
        for name in ("unary", "binary", "4inputs_with_extra_args", "binary_return_by_ref", "2inputs_2outputs")
    },
    "torch._scaled_mm": "no type that both devices support",
    "torch._scaled_mm_v2": "no type that both devices support",
}

# These entries once failed or returned wrong results.
REGRESSIONS = (
    "as_strided.partial_views",
    "ldexp",
    "linalg.lstsq",
    "nn.functional.dropout",
    "nn.functional.fractional_max_pool3d",
    "nn.functional.rms_norm",
    "nn.functional.scaled_dot_product_attention",
    "remainder",
    "take_along_dim",
    "to_sparse",
)


def sample() -> list[str]:
    names = sorted(operators.entries())
    return sorted({*names[::SAMPLE_STEP], *REGRESSIONS} & set(names))


def assert_expected_outcomes(names: list[str], samples: int = operators.MAX_SAMPLES) -> None:
    entries = operators.entries()
    unexpected = {}
    for name in names:
        outcome = operators.run(entries[name], samples)
        if outcome.status != ("unsupported" if name in UNSUPPORTED else "right"):
            unexpected[name] = outcome
    assert not unexpected


def test_sample_of_operators() -> None:
    assert_expected_outcomes([name for name in sample() if name not in REGRESSIONS], SAMPLES)
    assert_expected_outcomes([name for name in sample() if name in REGRESSIONS])


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_operator(chunk: int) -> None:
    assert_expected_outcomes(sorted(operators.entries())[chunk::CHUNKS])


def test_lists_name_existing_entries() -> None:
    if release(torch.__version__) >= NEWEST_TORCH:  # older torch has fewer entries
        assert {*UNSUPPORTED, *REGRESSIONS} <= set(operators.entries())
