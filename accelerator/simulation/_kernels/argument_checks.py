"""Checks of CUDA's kernels that depend on more than the type of the first tensor.

The texts follow torch's sources: ScatterGatherKernel.cu and Blas.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .dtypes import raise_unsupported_dtype
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


_CHECKS = {
    "scatter": _check_scatter,
    "scatter_": _check_scatter,
    "scatter_reduce": _check_scatter,
    "scatter_reduce_": _check_scatter,
    "_scaled_mm": _check_scaled_mm,
}


def checked_dtypes(op_name: str) -> frozenset[torch.dtype]:
    """Return the types of a first tensor for which ``with_argument_checks`` checks an op."""
    return _WITHOUT_PRODUCTS if op_name in _CHECKS else frozenset()


def with_argument_checks(name: str, override: Callable[..., Any]) -> Callable[..., Any]:
    """Return an op's kernel override with the op's check, if it has one."""
    check = _CHECKS.get(short_name(name))
    if check is None:
        return override
    bind = binder(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        check(bind(args, kwargs))
        return override(*args, **kwargs)

    return run
