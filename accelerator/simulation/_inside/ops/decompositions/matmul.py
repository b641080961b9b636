"""Products with a result type, and of scaled 8-bit floats."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import bindings
from .common import write

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def mm(self: Tensor, mat2: Tensor, out_dtype: torch.dtype) -> Tensor:
    return self.to(out_dtype) @ mat2.to(out_dtype)


def mm_out(self: Tensor, mat2: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    return write(out, mm(self, mat2, out_dtype))


def addmm(self: Tensor, mat1: Tensor, mat2: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = mm(mat1, mat2, out_dtype) * alpha
    # As in every addmm, beta = 0 ignores self, even if it has NaN.
    return product if beta == 0 else product + self.to(out_dtype) * beta


def addmm_out(
    self: Tensor, mat1: Tensor, mat2: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1, out: Tensor
) -> Tensor:
    return write(out, addmm(self, mat1, mat2, out_dtype, beta=beta, alpha=alpha))


def _limits(dtype: torch.dtype) -> tuple[float, float]:
    info = torch.finfo(dtype)
    return info.min, info.max


def _spread(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Expand scales of the tensor, of rows or columns, or of blocks of up to 128 x 128, to one for each value."""
    if scale.dtype != torch.float32:
        raise NotImplementedError(f"aten::_scaled_mm with scales of {scale.dtype} is not simulated")
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.dim() == 2:
        for size, extent in zip(scale.shape, (rows, columns), strict=True):
            if size not in (1, extent, -(-extent // 128)):
                break
        else:
            for dim, extent in enumerate((rows, columns)):
                if scale.size(dim) not in (1, extent):
                    scale = scale.repeat_interleave(128, dim).narrow(dim, 0, extent)
            return scale
    raise NotImplementedError(f"aten::_scaled_mm with scales of shape {tuple(scale.shape)} is not simulated")


def scaled_mm(
    self: Tensor,
    mat2: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    if self.dtype not in _FLOAT8 or mat2.dtype not in _FLOAT8:
        raise NotImplementedError(f"aten::_scaled_mm of {self.dtype} and {mat2.dtype} is not simulated")
    left = self.to(torch.float32) * _spread(scale_a, self.size(0), self.size(1))
    right = mat2.to(torch.float32) * _spread(scale_b, mat2.size(0), mat2.size(1))
    result = left @ right
    if bias is not None:
        result = result + bias.to(torch.float32)
    dtype = self.dtype if out_dtype is None else out_dtype
    if dtype in _FLOAT8:
        if scale_result is not None:
            result = result * scale_result
        result = result.clamp(*_limits(dtype))
    return result.to(dtype)


def scaled_mm_out(
    self: Tensor,
    mat2: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
    *,
    out: Tensor,
) -> Tensor:
    return write(out, scaled_mm(self, mat2, scale_a, scale_b, bias, scale_result, out_dtype or out.dtype))


def scaled_mm_with_recipes(
    self: Tensor,
    mat2: Tensor,
    scale_a: list[Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: list[Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    contraction_dim: list[int] | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    if len(scale_a) != 1 or len(scale_b) != 1:
        raise NotImplementedError("aten::_scaled_mm_v2 with two levels of scales is not simulated")
    return scaled_mm(self, mat2, scale_a[0], scale_b[0], bias, None, out_dtype or torch.bfloat16)


DECOMPOSITIONS: dict[str, Callable[..., Tensor]] = {
    "aten::mm.dtype": mm,
    "aten::mm.dtype_out": mm_out,
    "aten::bmm.dtype": mm,
    "aten::bmm.dtype_out": mm_out,
    "aten::addmm.dtype": addmm,
    "aten::addmm.dtype_out": addmm_out,
    "aten::baddbmm.dtype": addmm,
    "aten::baddbmm.dtype_out": addmm_out,
    "aten::_scaled_mm": scaled_mm,
    "aten::_scaled_mm.out": scaled_mm_out,
}
_WITH_RECIPES = "aten::_scaled_mm_v2"  # from torch 2.10 on; later, the CPU has a kernel
if _WITH_RECIPES in bindings.all_op_names() and not bindings.has_computed_kernel(_WITH_RECIPES, "CPU"):
    DECOMPOSITIONS[_WITH_RECIPES] = scaled_mm_with_recipes
