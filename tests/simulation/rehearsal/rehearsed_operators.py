"""``python -m tests.simulation.rehearsal.rehearsed_operators FILE [NAME...]``: what ops of the operator database allocate.

Writes for each sample the sizes, strides and types of its results and gradients, and the peak of allocated memory. Run it on a
simulated machine that computes and on one that does not, and compare the files.
"""

from __future__ import annotations

import copy
import gc
import pickle
import random
import sys
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from tests.simulation.ops import operators


def describe(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if value.layout != torch.strided or value.is_nested or value.is_quantized:
        return str(value.layout), value.dtype
    return tuple(value.size()), value.stride() if value.numel() else None, value.dtype, str(value.device)


def measure(name: str) -> list[Any]:
    """Return a description of each sample's results and its peak, or the type of its error."""
    op = operators.entries()[name]
    dtype = operators.dtype_of(op)
    if dtype is None:
        return []
    backward = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    torch.manual_seed(0)
    random.seed(0)
    outcomes: list[Any] = []
    for sample in islice(op.sample_inputs("cpu", dtype, requires_grad=backward), operators.MAX_SAMPLES):
        there = copy.copy(sample)
        there.input, there.args, there.kwargs = operators._to((sample.input, sample.args, sample.kwargs), "cuda")
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            # In another thread, the backward would free memory after it has returned.
            with torch.autograd.set_multithreading_enabled(False):
                result, gradients = operators._call(op, there, backward)
            described = [describe(leaf) for leaf in (*operators.pytree.tree_leaves(result), *gradients)]
            outcomes.append((described, torch.cuda.max_memory_allocated() - before))
            del result, gradients, described
        except Exception as error:
            error.__traceback__ = None
            outcomes.append((f"{type(error).__name__}: {error}"[:300], 0))
    return outcomes


def main() -> None:
    file, *names = sys.argv[1:]
    warnings.simplefilter("ignore")
    operators.entries()
    gc.freeze()
    torch.ones(8, 8, device="cuda").mm(torch.ones(8, 8, device="cuda"))  # the workspace of cuBLAS
    Path(file).write_bytes(pickle.dumps({name: measure(name) for name in names or sorted(operators.entries())}))


if __name__ == "__main__":
    main()
