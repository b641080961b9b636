"""CUDA's errors where the CPU's kernel raises another: names of kernels, texts, and types of exceptions.

Only texts that a library of the installed torch contains are raised, so no table of versions is needed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import torch

from .dtypes import ERROR_NAMES
from .library_texts import has_text

HOST_SCALARS = "CPU Scalar support for {} argument is not supported when calling {} on CUDA tensors."

_OVERFLOW = re.compile(r"cannot be converted to type .* without overflow")
# CUDA's kernels of these convert their numbers to the type that they compute in, which is wider for these types.
_HALF_TYPES = frozenset((torch.float16, torch.bfloat16))
_WIDE_NUMBERS = {
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max", "hardtanh", "hardtanh_backward", "add", "sub", "rsub"), _HALF_TYPES),
    "addcmul": _HALF_TYPES | {torch.uint8, torch.int8, torch.int16, torch.int32},
}
_DIVISIONS = frozenset(("div", "floor_divide", "remainder", "fmod"))
_LIBRARIES = ("libtorch_cuda.so", "libtorch_cuda_linalg.so")
_UNSUPPORTED = re.compile(r'"([^"]+)" not implemented for ')
_CPU_SUFFIX = re.compile(r"(_vml)?_cpu\w*$|_stub$|_kernel(_impl|_scalar)?$|_(lastdim|out)_\w+$")
# CUDA's names of kernels that follow neither from the CPU's name nor from the op's.
_NAMES = {
    **dict.fromkeys(("ge", "gt", "le", "lt"), "compare_cuda"),
    **dict.fromkeys(("eq", "ne"), "compare_eq_ne_cuda"),
    **dict.fromkeys(("maximum", "clamp_min"), "max_elementwise_cuda"),
    **dict.fromkeys(("minimum", "clamp_max"), "min_elementwise_cuda"),
    **dict.fromkeys(("_softmax", "_log_softmax"), "host_softmax"),
    **dict.fromkeys(("scatter_add", "scatter", "scatter_reduce", "gather"), "cuda_scatter_gather_base_kernel_func"),
    "add": "ufunc_add_CUDA",
    "sub": "ufunc_add_CUDA",
    "index_reduce": "index_reduce_cuda",
    "nll_loss_forward": "nll_loss_forward_reduce_cuda_kernel_2d_index",
    "nonzero": "nonzero_cuda",
    "topk": "topk_out_cuda",
    "_amp_foreach_non_finite_check_and_unscale": "_amp_foreach_non_finite_check_and_unscale_cuda",
}
# What the CPU's kernels say, and what CUDA's say.
_TEXTS = tuple(
    (re.compile(cpu), cuda)
    for cpu, cuda in (
        (r"^expected m1 and m2 to have the same dtype,", "expected mat1 and mat2 to have the same dtype,"),
        (r"^masked_scatter: (expected self .* to have same dtypes but got) ?", r"masked_scatter_: \1 "),
        (r"^torch\.histogram\(\): (bins must be > 0), but got .*", r"\1"),
        (r"^torch\.histc: (max must be larger than min)", r"\1"),
        (r"^torch\.histc: range of \[", "range of ["),
        (r"^adaptive_avg_pool3d\(\): (Expected (input to|4D))", r"adaptive_avg_pool3d_cuda(): \1"),
        (r"^norm_kernel_cpu expects norm", "norm_kernel_cuda_impl expects norm"),
        (r"^foreach_tensor_norm_slow expects ord", "foreach_tensor_norm_cuda expects ord"),
        (r"^addmm: computation on CPU is", "addmm: computation on CUDA is"),
        (r"^_sparse_sum_backward_cpu: ", "_sparse_sum_backward_cuda: "),
        (r"^(hspmm: Argument #\d:) matrices expected", r"\1 2D tensor expected"),
        (
            r"^\"bernoulli_tensor_cpu_p_\" not implemented for '(\w+)'",
            r"expected probabilities tensor to have floating type, got \1",
        ),
    )
)
_GROUP = re.compile(r"\\\d")


def in_cuda_library(text: str) -> bool:
    """Return whether one of the libraries with CUDA's kernels contains a text."""
    return any(has_text(library, text) for library in _LIBRARIES)


@functools.cache
def refused_host_scalars(short_name: str) -> tuple[str, ...]:
    """Return the arguments of an op that may not be CPU tensors, which TensorIterator takes, but CUDA's kernel refuses."""
    name = short_name.removesuffix("_")
    has_check = name == "addcmul" and in_cuda_library(HOST_SCALARS.format("self", name))
    return ("self", "tensor1") if has_check else ()


def _cuda_name(cpu_name: str, op: str) -> str:
    """Return what CUDA's kernel of an op, by its short name, calls itself in errors about types."""
    op = op.rstrip("_") if not op.startswith("_amp") else op.removesuffix("_")
    base = _CPU_SUFFIX.sub("", cpu_name)
    same = cpu_name.replace("_cpu", "_cuda")
    names = (
        ERROR_NAMES.get(op),
        _NAMES.get(op),
        same,
        f"{base}_cuda",
        f"{op}_cuda",
        f"{op}_out_cuda",
        cpu_name,
        base,
        op,
        f"{op}_",
    )
    return next((name for name in names if name and in_cuda_library(name + "\0")), cpu_name)


def cuda_error(op: str, error: Exception) -> Exception:
    """Return the error that CUDA's kernel of an op, by its short name, raises where the CPU's raises an error."""
    text = str(error)
    for cpu, cuda in _TEXTS:
        match = cpu.search(text)
        if match is not None and in_cuda_library(_GROUP.split(cuda)[0] or match.expand(cuda)):
            return (RuntimeError if isinstance(error, NotImplementedError) else type(error))(cpu.sub(cuda, text))
    if (match := _UNSUPPORTED.search(text)) is not None and (name := _cuda_name(match[1], op)) != match[1]:
        return type(error)(text.replace(f'"{match[1]}"', f'"{name}"'))
    return error


def accepted_arguments(op: str, error: Exception, args: list[Any]) -> list[Any] | None:
    """Return arguments that give CUDA's result of arguments that only the CPU's kernel refuses, or None.

    A GPU divides integers by zero: a quotient may be any value. It does not look at the weights of no scores.
    """
    if "ZeroDivisionError" in str(error) and op.removesuffix("_") in _DIVISIONS and len(args) > 1:
        divisor = args[1]
        return [args[0], divisor.masked_fill(divisor == 0, 1) if isinstance(divisor, torch.Tensor) else divisor or 1, *args[2:]]
    if op == "nll_loss_forward" and not args[0].numel() and args[2] is not None:
        return [*args[:2], None, *args[3:]]
    return None


def computes_wider(op: str, error: Exception, args: Sequence[Any]) -> bool:
    """Return whether an error is only that a number is too large for the type of the first tensor: CUDA's kernel computes."""
    dtypes = _WIDE_NUMBERS.get(op.removesuffix("_"))
    return dtypes is not None and getattr(args[0], "dtype", None) in dtypes and _OVERFLOW.search(str(error)) is not None
