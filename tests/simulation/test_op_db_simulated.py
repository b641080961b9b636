"""PyTorch's own database of operators on simulated GPUs against the CPU, forward and backward.

The tests marked ``slow`` run all of it, which takes minutes. The others run an eighth, and the entries that once went wrong.
"""

from __future__ import annotations

import zlib

import pytest

from tests.support import operators

PARTS = 8
CHUNKS = 16

# What CUDA itself lacks, so that torch's own error is right.
LACKING = {
    "histogram": "has no CUDA kernel",
    "histogramdd": "has no CUDA kernel",
    "sparse.mm.reduce": "has no CUDA kernel",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "is the CPU's by name",
    "torch.ops.aten._flash_attention_forward": "no type that both devices take",
    "torch.ops.aten._efficient_attention_forward": "no type that both devices take",
    "nn.functional.batch_norm.without_cudnn": "no type that the database gives both devices",
    **{
        f"jiterator_{name}": "compiles at run time, and has no counterpart on the CPU"
        for name in ("unary", "binary", "4inputs_with_extra_args", "binary_return_by_ref", "2inputs_2outputs")
    },
    "torch._scaled_mm": "no type that both devices take",
    "torch._scaled_mm_v2": "no type that both devices take",
}
# What has a CUDA kernel in this torch and none here.
NOT_SIMULATED: dict[str, str] = {}
# What differs, and why that is right.
DIFFERENT: dict[str, str] = {}

ALWAYS = (
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


def is_in_sample(name: str) -> bool:
    return name in ALWAYS or zlib.crc32(name.encode()) % PARTS == 0


@pytest.mark.parametrize("chunk", range(CHUNKS // PARTS))
def test_a_sample_of_operators_is_right_or_says_so(chunk: int) -> None:
    check(sorted(filter(is_in_sample, operators.entries()))[chunk :: CHUNKS // PARTS])


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_operator_is_right_or_says_so(chunk: int) -> None:
    check(sorted(name for name in operators.entries() if not is_in_sample(name))[chunk::CHUNKS])


def check(names: list[str]) -> None:
    entries, found = operators.entries(), {}
    for name in names:
        outcome = operators.run(entries[name])
        if outcome.kind != "right":
            found[name] = outcome
    print({name: tuple(outcome) for name, outcome in found.items()})
    allowed = {**dict.fromkeys(LACKING, "lacking"), **dict.fromkeys(NOT_SIMULATED, "not simulated")}
    unexpected = {
        name: outcome for name, outcome in found.items() if allowed.get(name) != outcome.kind and name not in DIFFERENT
    }
    assert not unexpected


def test_the_lists_name_entries_that_there_are() -> None:
    # Older torch has fewer.
    known = operators.entries()
    if "torch._scaled_mm_v2" in known:
        assert {*LACKING, *NOT_SIMULATED, *DIFFERENT, *ALWAYS} <= set(known)
