"""Compares what lies beside the values of ops on simulated GPUs with the CPU's, in lockstep.

    python -m accelerator simulate -- python -m tests.simulation.kernels.lockstep [--samples 3] [--json FILE] [NAME...]

Runs the functional, in-place, ``out=`` and list variants of PyTorch's operator database on both devices. After each call it
compares, for each argument, result and gradient: the version counter, ``requires_grad``, the name of ``grad_fn``, sizes,
strides, type, the offset and size of the storage, and which tensors share a storage; and the values. The first call of an op
runs in Python and later ones in the engine, so each call is made three times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from tests.simulation.ops import operators

CALLS = 3
# What an ``out=`` argument may be, from the result.
OUTPUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "out": lambda t: torch.zeros_like(t),
    "out of another size": lambda t: torch.empty(0, dtype=t.dtype),
    "out in another order": lambda t: torch.zeros(t.shape[::-1], dtype=t.dtype).permute(tuple(reversed(range(t.dim())))),
    "out with gaps": lambda t: torch.zeros(*t.shape, 3, dtype=t.dtype)[..., 1],
    "out too large": lambda t: torch.zeros(2, *t.shape, dtype=t.dtype),
}
# On the CPU, torch's kernels of triangles write beyond an output whose matrices are not equally spaced.
CORRUPTING = {(name, "out in another order") for name in ("linalg.lu", "lu_unpack", "tril", "triu")}


class Case(NamedTuple):
    """One call that can be made on both devices."""

    entry: str
    variant: str
    dtype: torch.dtype
    arguments: tuple[Any, ...]  # on the CPU
    call: Callable[..., Any]
    backward: bool
    result: Any = None  # what the call returns, if the CPU may return something else


class Difference(NamedTuple):
    """What differs between the devices after a call."""

    entry: str
    variant: str
    what: str
    where: str
    cpu: Any
    cuda: Any


def describe(tensor: torch.Tensor, before: int) -> dict[str, Any]:
    """Return what lies beside the values of a tensor, given its version before the call."""
    described: dict[str, Any] = {
        "requires_grad": tensor.requires_grad,
        "is a view": tensor._is_view(),
        "grad_fn": tensor.grad_fn.name() if tensor.grad_fn is not None else None,
        "version": 0 if tensor.is_inference() else tensor._version - before,
        "dtype": str(tensor.dtype),
        "size": tuple(tensor.size()),
    }
    if tensor.layout != torch.strided or tensor.is_nested:
        return {**described, "layout": str(tensor.layout)}
    return {
        **described,
        "stride": tensor.stride() if tensor.numel() else None,
        "offset": tensor.storage_offset(),
        "storage": tensor.untyped_storage().nbytes(),
        "lazy bits": (tensor.is_conj(), tensor.is_neg()),
    }


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _sharing(tensors: list[torch.Tensor]) -> list[int]:
    """Return for each tensor the first tensor that has its storage."""
    dense = [t.layout == torch.strided and not t.is_nested for t in tensors]
    owners = [
        t.untyped_storage()._cdata if is_dense else -1 - i for i, (t, is_dense) in enumerate(zip(tensors, dense, strict=True))
    ]
    return [owners.index(owner) for owner in owners]


def observe(case: Case, arguments: tuple[Any, ...]) -> tuple[dict[str, dict[str, Any]], Any]:
    """Make a call, and return descriptions of all tensors by name, and the result."""
    given = _tensors(arguments)
    versions = [0 if t.is_inference() else t._version for t in given]
    torch.manual_seed(3)
    result = case.call(*arguments)
    results = _tensors(result)
    everything = [*given, *results]
    observed = {
        f"{'argument' if i < len(given) else 'result'} {i if i < len(given) else i - len(given)}": describe(
            tensor, versions[i] if i < len(given) else 0
        )
        for i, tensor in enumerate(everything)
    }
    for name, owner in zip(list(observed), _sharing(everything), strict=True):
        observed[name]["shares storage with"] = owner
    if case.backward:
        outputs = [t for t in results if t.requires_grad and t.layout == torch.strided and not t.is_nested]
        inputs = [t for t in given if t.requires_grad and t.is_leaf]
        if outputs and inputs:
            gradients = torch.autograd.grad(outputs, inputs, [torch.ones_like(t) for t in outputs], allow_unused=True)
            for i, gradient in enumerate(gradients):
                observed[f"gradient {i}"] = {} if gradient is None else describe(gradient, 0)
    return observed, result


def differences(case: Case) -> Iterator[Difference]:
    """Yield what differs between the devices, over some calls with new arguments. Calls that the CPU refuses yield nothing."""
    for _ in range(CALLS):
        here = mirror(case.arguments, "cpu")
        there = mirror(case.arguments, "cuda")
        try:
            expected, here_result = observe(case, here)
        except Exception:  # the CPU does not support the arguments
            return
        try:
            actual, there_result = observe(case, there)
        except Exception as error:
            text = str(error).splitlines()[0] if str(error) else ""
            yield Difference(case.entry, case.variant, "error", "", None, f"{type(error).__name__}: {text}"[:160])
            return
        values = operators._same(case.result if case.result is not None else here_result, there_result, torch.float32)
        if values is not None and not _is_arbitrary(case):
            yield Difference(case.entry, case.variant, "values", "", None, values)
        for name in expected.keys() | actual.keys():
            one, other = expected.get(name), actual.get(name)
            if one is None or other is None:
                yield Difference(case.entry, case.variant, "presence", name, one is not None, other is not None)
                continue
            for what in one.keys() | other.keys():
                if one.get(what) != other.get(what):
                    yield Difference(case.entry, case.variant, what, name, one.get(what), other.get(what))


def _is_arbitrary(case: Case) -> bool:
    """Return whether an op's values are random, or those of uninitialized memory."""
    op = operators.entries().get(case.entry)
    if op is None:
        return False
    return "empty" in op.name or any(operators._is_random(op, one) for one in op.sample_inputs("cpu", case.dtype))


def mirror(value: Any, device: str) -> Any:
    """Return arguments with new tensors on a device, which have the strides, offsets and shared storages of the given ones."""
    storages: dict[int, torch.UntypedStorage] = {}

    def convert(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            if item.layout != torch.strided or item.is_nested or item.is_quantized:
                return item.detach().clone().to(device).requires_grad_(item.requires_grad)
            storage = item.untyped_storage()
            if storage._cdata not in storages:
                storages[storage._cdata] = storage.clone().to(device=device)
            plain = torch.empty(0, dtype=item.dtype, device=device)
            plain.set_(storages[storage._cdata], item.storage_offset(), item.size(), item.stride())
            if item.is_neg():
                plain = torch.ops.aten._neg_view(plain)
            return (plain.conj() if item.is_conj() else plain).detach().requires_grad_(item.requires_grad)
        if isinstance(item, torch.device) or item == "cpu":
            return torch.device(device)
        return item

    return pytree.tree_map(convert, value)


def cases(name: str, samples: int, dtype: torch.dtype | None = None) -> Iterator[Case]:
    """Yield the calls of an entry of the database with a type, by default the first usual one."""
    op = operators.entries()[name]
    dtype = dtype or operators.dtype_of(op)
    if dtype is None or dtype not in operators.dtypes_of(op):
        return
    backward = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu") & op.supported_backward_dtypes("cuda")
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        everything = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=backward), 64))
    step = max(1, len(everything) // samples)
    for sample in everything[::step][:samples]:
        arguments = (sample.input, *sample.args, sample.kwargs)
        yield Case(name, "functional", dtype, arguments, _with_keywords(op), backward)
        plain = pytree.tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, arguments)
        if op.inplace_variant is not None and isinstance(sample.input, torch.Tensor) and not sample.broadcasts_input:
            yield Case(name, "in-place", dtype, plain, _with_keywords(op.inplace_variant), False)
        if op.supports_out:
            yield from _out_cases(name, op, dtype, plain)


def _with_keywords(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: function(*arguments[:-1], **arguments[-1])


def _out_cases(name: str, op: Any, dtype: torch.dtype, arguments: tuple[Any, ...]) -> Iterator[Case]:
    try:
        results = _with_keywords(op)(*mirror(arguments, "cpu"))
    except Exception:  # the CPU does not support the arguments
        return
    if not _tensors(results) or any(not isinstance(t, torch.Tensor) for t in pytree.tree_leaves(results)):
        return

    def call(*values: Any) -> Any:
        op(*values[:-2], **values[-2], out=values[-1])
        return values[-1]

    for variant, make in OUTPUTS.items():
        if (name, variant) in CORRUPTING:
            continue
        out = pytree.tree_map(make, results)
        out = out if isinstance(out, torch.Tensor) else tuple(pytree.tree_leaves(out))
        yield Case(name, variant, dtype, (*arguments, out), call, False, results)


def list_cases(samples: int) -> Iterator[Case]:
    """Yield the calls of ops over lists."""
    invocations = operators.database()
    databases = [
        getattr(invocations, name) for name in dir(invocations) if name.startswith("foreach_") and name.endswith("_op_db")
    ]
    for op in itertools.chain(*databases):
        dtype = torch.float32
        if dtype not in op.supported_dtypes("cpu"):
            continue
        torch.manual_seed(7)
        everything = list(itertools.islice(op.sample_inputs("cpu", dtype), 400 if samples > 1 else 1))
        step = max(1, len(everything) // samples)
        for sample in everything[::step][:samples]:
            keywords = {k: v for k, v in sample.kwargs.items() if k in ("alpha", "value", "ord", "weight", "non_blocking")}
            arguments = (sample.input, *sample.args, keywords)
            for variant, function in (("list", op.method_variant), ("in-place list", op.inplace_variant)):
                if function is not None:
                    yield Case(op.name, variant, dtype, arguments, _with_keywords(function), False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--json")
    options = parser.parse_args()
    names = options.names or sorted(operators.entries())
    counts: Counter[str] = Counter()
    found: dict[tuple[str, str, str], Difference] = {}
    chains = [cases(name, options.samples) for name in names]
    if not options.names:
        chains.append(list_cases(options.samples))
    for case in itertools.chain(*chains):
        counts[case.variant] += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for difference in differences(case):
                key = (difference.entry, difference.variant, difference.what)
                if key not in found:
                    found[key] = difference
                    print(*difference, sep=" | ", flush=True)
    print(dict(counts), f"{len(found)} differences")
    if options.json:
        with open(options.json, "w") as file:
            json.dump([list(map(str, d)) for d in found.values()], file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
