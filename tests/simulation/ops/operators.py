"""Runs PyTorch's operator database (OpInfo) on simulated GPUs and compares the results with the CPU's.

    python -m accelerator simulate -- python -m tests.simulation.kernels.operators [--dtypes all] [--samples 2] [NAME...]

Prints each entry that is not right, and for each type how many entries have which outcome. Without ``--dtypes`` each entry runs
with one type.
"""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.util
import math
import sys
import time
import types
import unittest
import warnings
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from torch.testing._internal.opinfo.core import OpInfo, SampleInput

# Run about this many samples of an entry. The database has up to hundreds, many of which differ only in size.
MAX_SAMPLES = 12


class Outcome(NamedTuple):
    """Result of one entry: status is "right", "not simulated", "unsupported" (by CUDA too), "wrong" or "error"."""

    status: str
    detail: str = ""


@functools.cache
def database() -> Any:
    """Import torch's database, which takes seconds, and return its module."""
    if importlib.util.find_spec("expecttest") is None:
        # torch's test utilities subclass this package's TestCase. The database does not use the subclass.
        sys.modules["expecttest"] = types.ModuleType("expecttest")
        sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]
    from torch.testing._internal import common_methods_invocations, common_utils
    from torch.testing._internal.opinfo import core

    # For each op torch looks for a test of its own in the whole stack, which takes longer than the op.
    for module in (common_utils, core):
        module.extract_test_fn = lambda: None
    return common_methods_invocations


@functools.cache
def entries() -> dict[str, OpInfo]:
    """Return the entries of torch's database by name."""
    return {op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""): op for op in database().op_db}


USUAL_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool, torch.bfloat16)


def dtypes_of(op: OpInfo) -> list[torch.dtype]:
    """Return the types that an entry has on both devices, the most usual first."""
    both = op.supported_dtypes("cpu") & op.supported_dtypes("cuda")
    return [dtype for dtype in USUAL_DTYPES if dtype in both] + sorted(both - set(USUAL_DTYPES), key=str)


def dtype_of(op: OpInfo) -> torch.dtype | None:
    """Return the type with which an entry is run by default, if it has a usual one."""
    return next((dtype for dtype in dtypes_of(op) if dtype in USUAL_DTYPES), None)


def _to(value: Any, device: str) -> Any:
    """Copy arguments to a device and keep their strides and storage offsets."""

    def convert(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if item.device.type != "cpu":
                return item
            if item.layout != torch.strided or item.is_nested:
                return item.detach().to(device).requires_grad_(item.requires_grad)
            base = torch.empty(0, dtype=item.dtype, device=device)
            whole = torch.empty(0, dtype=item.dtype).set_(item.detach().untyped_storage())
            there = base.set_(whole.to(device).untyped_storage(), item.storage_offset(), item.size(), item.stride())
            if item.is_neg():
                there = torch.ops.aten._neg_view(there)
            if item.is_conj():
                there = there.conj()
            return there.detach().requires_grad_(item.requires_grad)
        if isinstance(item, torch.device):
            return torch.device(device)
        if isinstance(item, str) and item == "cpu":
            return device
        return item

    return pytree.tree_map(convert, value)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _call(op: OpInfo, sample: SampleInput, backward: bool) -> tuple[Any, list[torch.Tensor | None]]:
    result = op(sample.input, *sample.args, **sample.kwargs)
    if sample.output_process_fn_grad is not None and not op.name.startswith("sparse"):
        processed = sample.output_process_fn_grad(result)
    else:
        processed = result
    if not backward:
        return result, []
    outputs = [t for t in _tensors(processed) if t.requires_grad and t.is_floating_point() | t.is_complex()]
    inputs = [t for t in _tensors((sample.input, sample.args, sample.kwargs)) if t.requires_grad]
    if not outputs or not inputs:
        return result, []
    # Each element of a result has its own weight, the same on both devices.
    weights = [
        torch.linspace(0.5, 1.5, max(t.numel(), 1))[: t.numel()].reshape(t.shape).to(t.device, t.dtype)
        if t.layout == torch.strided
        else torch.ones_like(t)
        for t in outputs
    ]
    return result, list(torch.autograd.grad(outputs, inputs, weights, allow_unused=True))


def _same(here: Any, there: Any, dtype: torch.dtype) -> str | None:
    """Return None if two results are equal, else the difference."""
    left, right = pytree.tree_leaves(here), pytree.tree_leaves(there)
    if len(left) != len(right):
        return f"{len(left)} results on the CPU, {len(right)} on CUDA"
    for a, b in zip(left, right, strict=True):
        if isinstance(a, torch.Tensor):
            if not isinstance(b, torch.Tensor):
                return "no tensor"
            if a.is_quantized and b.is_quantized:
                a, b = a.dequantize(), b.dequantize()
            if a.layout != b.layout:
                return f"{b.layout} for {a.layout}"
            loose = a.dtype in (torch.bfloat16, torch.float16, torch.complex32)
            rtol, atol = (2e-2, 2e-2) if loose else (1e-3, 1e-4)
            try:
                torch.testing.assert_close(b.detach().cpu(), a.detach(), equal_nan=True, rtol=rtol, atol=atol)
            except AssertionError as error:
                return str(error).replace("\n", " ")[:200]
        elif isinstance(a, float) and isinstance(b, float):
            if not math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-5) and not (math.isnan(a) and math.isnan(b)):
                return f"{b} for {a}"
        elif isinstance(a, (int, bool, str)) and a != b:
            return f"{b} for {a}"
    return None


def _zeroed(value: Any) -> Any:
    """Replace tensors by zeros, because the contents of new memory are arbitrary."""
    return pytree.tree_map(lambda item: torch.zeros_like(item) if isinstance(item, torch.Tensor) else item, value)


# These entries change their sample, so a second call needs a copy.
_IN_PLACE = ("cauchy", "exponential", "geometric", "log_normal", "normal", "uniform")


def _is_random(op: OpInfo, sample: SampleInput) -> bool:
    """Return whether the CPU's result depends on the seed, even if the entry sets a seed itself."""
    results: list[Any] = []
    manual_seed = torch.manual_seed
    for seed in (11, 12):
        manual_seed(seed)
        torch.manual_seed = lambda _, seed=seed: manual_seed(seed)  # type: ignore[assignment]
        try:
            result = _call(op, copy.deepcopy(sample) if op.name in _IN_PLACE else sample, False)[0]
        except Exception:  # the CPU does not support the sample
            return False
        finally:
            torch.manual_seed = manual_seed
        results.append(pytree.tree_map(lambda item: item.detach().clone() if isinstance(item, torch.Tensor) else item, result))
    return _same(*results, torch.float32) is not None


def run(op: OpInfo, limit: int = MAX_SAMPLES, dtype: torch.dtype | None = None) -> Outcome:
    """Run an entry on both devices, forward and, if it has gradients in the type, backward."""
    dtype = dtype or dtype_of(op)
    if dtype is None:
        return Outcome("unsupported", "no type on both devices")
    backward = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu") & op.supported_backward_dtypes("cuda")
    right = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(7)
        samples = list(op.sample_inputs("cpu", dtype, requires_grad=backward))
        step = max(1, len(samples) // limit)
        for sample in samples[::step]:
            mirrored = _to((sample.input, sample.args, sample.kwargs), "cuda")
            there = copy.copy(sample)
            there.input, there.args, there.kwargs = mirrored
            if op.name == "tensor_split":  # its indices must be on the host
                there.args = sample.args
            try:
                expected = _call(op, sample, backward)
            except Exception:  # the CPU does not support the sample
                continue
            try:
                actual = _call(op, there, backward)
            except NotImplementedError as error:
                if "is not simulated" in str(error):
                    return Outcome("not simulated", str(error))
                return Outcome("unsupported", str(error)[:150])
            except Exception as error:
                if "is not supported on CUDA" in str(error):  # the CPU's samples have drivers that CUDA refuses
                    continue
                return Outcome("error", f"{type(error).__name__}: {error}"[:300])
            if op.name.endswith(("native_batch_norm", "native_batch_norm_legit")) and not expected[0][1].numel():
                # In evaluation mode CUDA returns the statistics that it used. The CPU returns empty tensors.
                expected, actual = (expected[0][0], expected[1]), (actual[0][0], actual[1])
            if "empty" in op.name:
                expected, actual = _zeroed(expected), _zeroed(actual)
            for a, b in zip(expected, actual, strict=True):
                difference = _same(a, b, dtype)
                if difference and not any(_is_random(op, one) for one in op.sample_inputs("cpu", dtype)):
                    return Outcome("wrong", difference)
            right += 1
    if not right:
        return Outcome("unsupported", "the CPU runs no sample")
    return Outcome("right", str(right))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="entries (default: all)")
    parser.add_argument("--dtypes", help="all, or types separated by commas (default: the first usual type of each entry)")
    parser.add_argument("--samples", type=int, default=MAX_SAMPLES, help="samples of an entry and type (default: %(default)s)")
    options = parser.parse_args()
    chosen = None if options.dtypes in (None, "all") else {getattr(torch, name) for name in options.dtypes.split(",")}
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for name in options.names or entries():
        op = entries()[name]
        for dtype in dtypes_of(op) if options.dtypes else [dtype_of(op)]:
            if chosen is not None and dtype not in chosen:
                continue
            start = time.perf_counter()
            outcome = run(op, options.samples, dtype)
            counts[str(dtype) if options.dtypes else "all"][outcome.status] += 1
            took = time.perf_counter() - start
            if outcome.status != "right" or took > 3:
                print(f"{outcome.status:14s} {name} {dtype} ({took:.1f} s) {outcome.detail}", flush=True)
    for which, count in counts.items():
        print(which, dict(count))


if __name__ == "__main__":
    main()
