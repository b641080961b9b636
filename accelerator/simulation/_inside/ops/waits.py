"""Ops whose CUDA kernels wait for the device with some arguments: the host reads a result, a size or an error code.

torch tags the ops that always wait (``data_dependent_output``). The conditions follow torch's sources and an H100's waits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_Arguments = dict[str, Any]
_Condition = Callable[[_Arguments], bool]


def _has_elements(name: str) -> _Condition:
    return lambda arguments: arguments[name].numel() > 0


def _is_on_device(name: str) -> _Condition:
    return lambda arguments: isinstance(arguments[name], torch.Tensor) and arguments[name].is_cuda


def _checks_errors(arguments: _Arguments) -> bool:
    return bool(arguments.get("check_errors"))


def _equal(arguments: _Arguments) -> bool:
    tensor, other = arguments["self"], arguments["other"]
    if tensor.size() != other.size() or not tensor.numel():
        return False
    is_same = tensor.data_ptr() == other.data_ptr() and tensor.stride() == other.stride() and tensor.dtype == other.dtype
    return not is_same or tensor.is_neg() != other.is_neg() or tensor.is_conj() != other.is_conj()


def _isin(arguments: _Arguments) -> bool:
    """Return whether the values are sorted, after those that occur twice are removed. Few values are compared with all."""
    if arguments.get("assume_unique"):
        return False
    elements, tests = arguments.get("elements"), arguments.get("test_elements")
    if not isinstance(tests, torch.Tensor):
        return False
    count = elements.numel() if isinstance(elements, torch.Tensor) else 1
    return count > 0 and tests.numel() >= int(10 * count**0.145)


def _matrix_exp(arguments: _Arguments) -> bool:
    matrices = arguments["self"]
    return matrices.numel() > 0 and matrices.size(-1) > 1


def _segment_reduce(arguments: _Arguments) -> bool:
    return arguments.get("lengths") is not None and not arguments.get("unsafe")


# By op: an argument, and the condition of overloads in which it is a tensor; without an argument that of all overloads.
_CONDITIONS: dict[str, tuple[str, _Condition]] = {
    "equal": ("", _equal),
    "isin": ("test_elements", _isin),
    "index_fill_": ("value", _is_on_device("value")),
    "masked_fill_": ("value", _is_on_device("value")),
    "normal": ("std", _has_elements("std")),
    "segment_reduce": ("", _segment_reduce),
    "linalg_matrix_exp": ("", _matrix_exp),
    # The results of these are checked on the host.
    "_linalg_svd": ("", _has_elements("A")),
    "_linalg_eigh": ("", _has_elements("A")),
    "cholesky": ("", _has_elements("self")),
    **dict.fromkeys(("linalg_eig", "linalg_eigvals", "_linalg_eigvals"), ("", lambda arguments: True)),
    **dict.fromkeys(
        ("linalg_cholesky_ex", "linalg_inv_ex", "linalg_ldl_factor_ex", "linalg_lu_factor_ex", "_linalg_solve_ex"),
        ("", _checks_errors),
    ),
}


def condition_of(op_name: str, tensor_names: frozenset[str]) -> _Condition | None:
    """Return when an overload of an op, with these tensors as arguments, waits; None if its arguments do not decide that."""
    argument, condition = _CONDITIONS.get(op_name, ("", None))
    return condition if not argument or argument in tensor_names else None


@functools.cache
def host_mask_waits() -> bool:
    """Return whether indexing by a mask on the host waits for its indices to be copied: torch before 2.10 does not pin them."""
    try:
        header = (Path(torch.__file__).parent / "include/ATen/native/IndexingUtils.h").read_text(encoding="utf-8")
    except OSError:
        return False
    return "pinned_memory" not in header
