"""LU factorization without pivoting, which torch's CPU kernels do not support, and singular vectors in cuSOLVER's layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .common import Need, write_structured


def _factor_without_pivoting(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return both factors in one matrix, the pivots, and the index (from 1) of the first zero pivot, 0 if there is none."""
    lu = A.clone()
    diagonal_length = min(A.shape[-2:])
    info = torch.zeros(A.shape[:-2], dtype=torch.int32)
    for k in range(diagonal_length):
        pivot = lu[..., k, k]
        info = torch.where((pivot == 0) & (info == 0), k + 1, info)
        lu[..., k + 1 :, k] /= pivot.unsqueeze(-1)
        lu[..., k + 1 :, k + 1 :] -= lu[..., k + 1 :, k, None] * lu[..., None, k, k + 1 :]
    pivots = torch.arange(1, diagonal_length + 1, dtype=torch.int32).expand(*A.shape[:-2], diagonal_length).contiguous()
    return lu, pivots, info.to(torch.int32)


def lu_factor_ex(A: Tensor, *, pivot: bool = True, check_errors: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    if pivot:
        return torch.linalg.lu_factor_ex(A, check_errors=check_errors)
    lu, pivots, info = _factor_without_pivoting(A)
    if check_errors and info.any():
        raise torch.linalg.LinAlgError(f"torch.linalg.lu_factor_ex: U[{int(info.max())},{int(info.max())}] is zero")  # type: ignore[attr-defined]
    return lu.mT.contiguous().mT, pivots, info  # column-major, as LAPACK returns it


def lu_factor_ex_out(
    A: Tensor, *, pivot: bool = True, check_errors: bool = False, LU: Tensor, pivots: Tensor, info: Tensor
) -> tuple[Tensor, ...]:
    results = lu_factor_ex(A, pivot=pivot, check_errors=check_errors)
    return tuple(write_structured(out, result) for out, result in zip((LU, pivots, info), results, strict=True))


def lu(A: Tensor, *, pivot: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    if pivot:
        return torch.linalg.lu(A)
    diagonal_length = min(A.shape[-2:])
    factors, _, _ = _factor_without_pivoting(A)
    lower = factors[..., :diagonal_length].tril(-1) + torch.eye(A.size(-2), diagonal_length, dtype=A.dtype)
    return A.new_empty(0), lower, factors[..., :diagonal_length, :].triu()


def lu_out(A: Tensor, *, pivot: bool = True, P: Tensor, L: Tensor, U: Tensor) -> tuple[Tensor, ...]:
    return tuple(write_structured(out, result) for out, result in zip((P, L, U), lu(A, pivot=pivot), strict=True))


def svd(A: Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None) -> tuple[Tensor, ...]:
    U, S, Vh = torch._linalg_svd(A, full_matrices, compute_uv)
    return U, S, Vh.contiguous()


def svd_out(*arguments: Any, driver: str | None = None, U: Tensor, S: Tensor, Vh: Tensor) -> tuple[Tensor, ...]:
    return tuple(write_structured(out, result) for out, result in zip((U, S, Vh), svd(*arguments), strict=True))


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "aten::_linalg_svd": svd,
    "aten::_linalg_svd.U": svd_out,
    "aten::linalg_lu_factor_ex": lu_factor_ex,
    "aten::linalg_lu_factor_ex.out": lu_factor_ex_out,
    "aten::linalg_lu": lu,
    "aten::linalg_lu.out": lu_out,
}
# All calls with `out=` need it: the CPU writes triangles to a wrong place, as outputs.py says.
NEEDS = {name: Need(flag="pivot", flag_value=False) for name in DECOMPOSITIONS if "lu" in name and not name.endswith("lu.out")}
