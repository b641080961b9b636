"""What lies beside the values of ops equals the CPU's: version counters, functions of gradients, storages, strides, sharing.

By default every 40th entry of PyTorch's operator database runs, all ops over lists, and the entries that once differed. With
the exhaustive tests all entries run.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable

import pytest
import torch

from tests.simulation.ops import lockstep, operators

# Run in one worker of xdist, because importing the database takes seconds in each process.
pytestmark = pytest.mark.xdist_group("operators")

ENTRY_STEP = 64
CHUNKS = 8
REGRESSIONS = (
    "inner", "linalg.lu", "linalg.lu_factor", "linalg.lu_solve", "lu_unpack", "nn.functional.avg_pool3d",
    "nn.functional.binary_cross_entropy", "nn.functional.gelu",
    "nn.functional.mse_loss", "nn.functional.smooth_l1_loss", "split_with_sizes_copy", "tril", "unique", "unique_consecutive",
)  # fmt: skip

# Why CUDA differs from the CPU, by entry and by what differs. None stands for everything.
_DIVIDES = "the CPU fills the gradient in place, CUDA computes it (FunctionsManual.cpp, evenly_distribute_backward)"
_STATISTICS = "in evaluation CUDA returns the statistics that it used, the CPU empty tensors"
_EMPTY_RANGE = "arange and linspace resize no output that has as many elements: none (RangeFactories.cpp)"
_ONE_DIMENSION = "torch.fft does not write the output of an inverse transform over one dimension, on any device"
EXPLAINED: dict[tuple[str, str | None], str] = {
    **{(name, "version"): _DIVIDES for name in ("max.reduction_no_dim", "min.reduction_no_dim", "median", "nanmedian")},
    **{(name, None): _STATISTICS for name in ("native_batch_norm", "_native_batch_norm_legit")},
    **{
        (name, "values"): _EMPTY_RANGE
        for name in ("arange", "linspace", "linspace.tensor_overload", "logspace", "logspace.tensor_overload")
    },
    ("fft.ihfft2", "values"): _ONE_DIMENSION,
    ("fft.ihfftn", "values"): _ONE_DIMENSION,
    ("linalg.lstsq", "storage"): "CUDA's kernels have workspaces of other sizes than LAPACK",
    ("linalg.lstsq.grad_oriented", "storage"): "CUDA's kernels have workspaces of other sizes than LAPACK",
    **{(name, "error"): "CUDA has one driver" for name in ("linalg.lstsq", "linalg.lstsq.grad_oriented")},
    **{(name, "stride"): "cuSOLVER lays out V otherwise" for name in ("linalg.svd", "svd", "svd_lowrank", "pca_lowrank")},
    ("narrow_copy", "error"): "out= has no CUDA kernel",
    ("nanmean", "error"): "until torch 2.9, out= launches a kernel of CUDA itself",
    ("nn.functional.dropout", "grad_fn"): "dropout is one op on CUDA (Dropout.cpp, is_fused_kernel_acceptable)",
    ("nn.functional.rms_norm", None): "rms_norm is one op on CUDA from torch 2.9 on",
    ("nn.functional.scaled_dot_product_attention", None): "CUDA has other kernels of attention",
    ("sparse.mm.reduce", "error"): "has no CUDA kernel",
    ("split_with_sizes_copy", "version"): "one kernel copies dense parts, and counts nothing (native/cuda/TensorShape.cu)",
    ("tensor_split", "error"): "the indices must be on the host",
    ("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu", "error"): "is a kernel of the CPU",
    ("unique", "storage"): "CUDA's values have the storage of the argument's size (UniqueCub.cu)",
    ("unique_consecutive", "storage"): "CUDA's counts have the storage of the argument's size (UniqueCub.cu)",
}


def is_explained(difference: lockstep.Difference) -> bool:
    if (difference.entry, difference.what) in EXPLAINED or (difference.entry, None) in EXPLAINED:
        return True
    # On CUDA a composite op resizes its output by a call of the dispatcher, which counts (Resize.cpp, _resize_output).
    is_resized = difference.variant in ("out of another size", "out too large")
    return is_resized and difference.what == "version" and int(difference.cuda) == int(difference.cpu) + 1


def unexplained(cases: Iterable[lockstep.Case]) -> list[lockstep.Difference]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [difference for case in cases for difference in lockstep.differences(case)]
    return [difference for difference in found if not is_explained(difference)]


def sample() -> list[str]:
    names = sorted(operators.entries())
    return sorted({*names[::ENTRY_STEP], *REGRESSIONS} & set(names))


def test_sample_of_entries() -> None:
    assert not unexplained(itertools.chain(*(lockstep.cases(name, 3) for name in sample())))


def test_ops_over_lists() -> None:
    assert not unexplained(lockstep.list_cases(1))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_entry(chunk: int) -> None:
    names = sorted(operators.entries())[chunk::CHUNKS]
    assert not unexplained(itertools.chain(*(lockstep.cases(name, 4) for name in names)))


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool, torch.float64], ids=str)
def test_every_entry_of_another_type(dtype: torch.dtype) -> None:
    names = sorted(operators.entries())
    assert not unexplained(itertools.chain(*(lockstep.cases(name, 3, dtype) for name in names)))


@pytest.mark.slow
def test_ops_over_more_lists() -> None:
    assert not unexplained(lockstep.list_cases(8))


def test_lists_of_inference_tensors_are_refused() -> None:
    with torch.inference_mode():
        tensors = [torch.ones(2, device="cuda")]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode is not allowed"):
            torch._foreach_mul_(tensors, 2)
    with torch.inference_mode():
        torch._foreach_mul_(tensors, 2)
