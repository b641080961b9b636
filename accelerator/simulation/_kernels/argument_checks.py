"""Checks of CUDA's kernels that depend on more than the type of the first tensor.

The texts follow torch's sources, such as ScatterGatherKernel.cu and Blas.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .dtypes import TYPES_WITHOUT_PRODUCTS, raise_unsupported_dtype
from .schemas import binder, short_name

__all__ = ["checked_dtypes", "with_argument_checks"]

_Arguments = dict[str, Any]
_WITHOUT_PRODUCTS = frozenset((torch.bool, torch.complex64, torch.complex128))


def _check_scatter(arguments: _Arguments) -> None:
    """For bool and complex numbers, CUDA supports only sums in scatter."""
    tensor = arguments["self"]
    if tensor.dtype in _WITHOUT_PRODUCTS and arguments.get("reduce") in ("multiply", "prod", "amax", "amin", "mean"):
        fills = isinstance(arguments.get("value"), (bool, int, float, complex))
        raise_unsupported_dtype("scatter_value" if fills else "scatter_reduce", tensor.dtype)


def _check_scaled_mm(arguments: _Arguments) -> None:
    if torch.cuda.get_device_capability(arguments["self"].device) < (8, 9):
        raise RuntimeError(
            "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm MI300+"
        )


def _check_product(name: str) -> Callable[[_Arguments], None]:
    """Return a check of the type in which an op of two tensors or numbers computes."""

    def check(arguments: _Arguments) -> None:
        dtype = torch.result_type(arguments["self"], arguments["other"])
        if dtype in TYPES_WITHOUT_PRODUCTS:
            raise_unsupported_dtype(name, dtype)

    return check


def _check_elements(name: str) -> Callable[[_Arguments], None]:
    """Return a check of the first tensor's type that a tensor without elements passes."""

    def check(arguments: _Arguments) -> None:
        tensor = arguments["self"]
        if tensor.dtype in TYPES_WITHOUT_PRODUCTS and tensor.numel():
            raise_unsupported_dtype(name, tensor.dtype)

    return check


def _check_median(arguments: _Arguments) -> None:
    if "dim" not in arguments:
        return
    if arguments["self"].dim() >= _MOST_DIMENSIONS:  # as torch's TensorInfo.cuh, despite its text
        raise RuntimeError(f"CUDA Tensors cannot have more than {_MOST_DIMENSIONS} dimensions")
    if arguments["self"].dtype is torch.bool:
        raise_unsupported_dtype("median_out_impl", torch.bool)


def _check_lstsq(arguments: _Arguments) -> None:
    if arguments.get("driver") not in (None, "gels"):
        raise RuntimeError("torch.linalg.lstsq: `driver` other than `gels` is not supported on CUDA")


def _check_batch_norm(arguments: _Arguments) -> None:
    out, is_training = arguments["save_invstd"], arguments.get("training", True)
    if is_training and out.size() == arguments["input"].shape[1:2] and not out.is_contiguous():
        raise RuntimeError(
            "out_invstd.dim() == 1 && out_invstd.is_contiguous() && out_invstd.sizes()[0] INTERNAL ASSERT FAILED at"
            ' "/pytorch/aten/src/ATen/native/cuda/Normalization.cuh", please report a bug to PyTorch.'
        )


_MOST_DIMENSIONS = 25
_PRODUCTS = ("mul", "bitwise_and", "bitwise_or", "bitwise_xor")
_BATCH_NORMS = ("native_batch_norm.out", "_native_batch_norm_legit.out", "_native_batch_norm_legit.no_stats_out")
_ALL_TYPES = frozenset(value for value in vars(torch).values() if isinstance(value, torch.dtype))


class _Check(NamedTuple):
    """A check of an op's arguments, and the types of a first tensor for which it is made."""

    raise_if_refused: Callable[[_Arguments], None]
    dtypes: frozenset[torch.dtype]


# By the name of an op, or of an overload.
_CHECKS = {
    **dict.fromkeys(("scatter", "scatter_", "scatter_reduce", "scatter_reduce_"), _Check(_check_scatter, _WITHOUT_PRODUCTS)),
    **{name + suffix: _Check(_check_product(name), TYPES_WITHOUT_PRODUCTS) for name in _PRODUCTS for suffix in ("", "_")},
    **{name: _Check(_check_elements(name), TYPES_WITHOUT_PRODUCTS) for name in ("roll", "sort")},
    **dict.fromkeys(("median", "nanmedian"), _Check(_check_median, _ALL_TYPES)),
    **dict.fromkeys(_BATCH_NORMS, _Check(_check_batch_norm, _ALL_TYPES)),
    "linalg_lstsq": _Check(_check_lstsq, _ALL_TYPES),
    "_scaled_mm": _Check(_check_scaled_mm, _WITHOUT_PRODUCTS),
}


def _find_check(name: str) -> _Check | None:
    return _CHECKS.get(short_name(name)) or _CHECKS.get(name.removeprefix("aten::"))


def checked_dtypes(name: str) -> frozenset[torch.dtype]:
    """Return the types of a first tensor for which ``with_argument_checks`` checks an op."""
    check = _find_check(name)
    return check.dtypes if check is not None else frozenset()


def with_argument_checks(name: str, override: Callable[..., Any]) -> Callable[..., Any]:
    """Return an op's kernel override with the op's check, if it has one."""
    check = _find_check(name)
    if check is None:
        return override
    bind = binder(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        check.raise_if_refused(bind(args, kwargs))
        return override(*args, **kwargs)

    return run
