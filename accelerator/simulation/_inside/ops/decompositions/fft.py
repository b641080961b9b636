"""Fourier transforms.

Half types, which the CPU lacks, are computed in complex64 and rounded once. Before torch 2.9 the CPU's transforms refuse
expanded tensors, which autograd passes as gradients of sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...._settings.torch_versions import release
from ..library_texts import has_text
from .common import Need, write

# Since https://github.com/pytorch/pytorch/pull/154585 the CPU's transforms do.
_TAKES_EXPANDED = release(torch.__version__) >= (2, 9)
_HALF_TYPES = {torch.float16: "half", torch.complex32: "half", torch.bfloat16: "bfloat16"}
if hasattr(torch, "bcomplex32"):
    _HALF_TYPES[torch.bcomplex32] = "bfloat16"


def _check_sizes(self: Tensor, dims: list[int], last_size: int | None = None) -> None:
    """Raise cuFFT's errors for half types."""
    is_bfloat16 = _HALF_TYPES[self.dtype] == "bfloat16"
    if is_bfloat16 and not has_text("libtorch_cuda.so", "cuFFT doesn't support bfloat16"):
        raise RuntimeError("cuFFT doesn't support tensor of type: BFloat16")
    if is_bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        raise RuntimeError(
            "cuFFT doesn't support bfloat16 with compute capability less than SM_80, but the device containing input bfloat16"
            f" tensor only has SM_{''.join(map(str, torch.cuda.get_device_capability()))}"
        )
    text = f"cuFFT only supports dimensions whose sizes are powers of two when computing in {_HALF_TYPES[self.dtype]} precision"
    if not has_text("libtorch_cuda.so", text):  # of bfloat16, before torch 2.14
        return
    sizes = [self.size(dim) for dim in dims]
    if last_size is not None and sizes:
        sizes[-1] = last_size
    if not all(math.log2(size).is_integer() for size in sizes if size):
        raise RuntimeError(f"{text}, but got a signal size of{sizes}")


def _complex_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_complex else dtype.to_complex()


def _without_expansion(self: Tensor) -> Tensor:
    return self.contiguous() if 0 in self.stride() else self


def real_to_complex(self: Tensor, dim: list[int], normalization: int, onesided: bool) -> Tensor:
    if self.dtype not in _HALF_TYPES or self.is_complex():  # the CPU's kernel refuses complex numbers
        return torch._fft_r2c(_without_expansion(self), dim, normalization, onesided)
    _check_sizes(self, dim)
    return torch._fft_r2c(self.float(), dim, normalization, onesided).to(_complex_dtype(self.dtype))


def complex_to_real(self: Tensor, dim: list[int], normalization: int, last_dim_size: int) -> Tensor:
    if self.dtype not in _HALF_TYPES:
        return torch._fft_c2r(_without_expansion(self), dim, normalization, last_dim_size)
    _check_sizes(self, dim, last_dim_size)
    return torch._fft_c2r(self.to(torch.complex64), dim, normalization, last_dim_size).to(self.dtype.to_real())


def complex_to_complex(self: Tensor, dim: list[int], normalization: int, forward: bool) -> Tensor:
    if self.dtype not in _HALF_TYPES:
        return torch._fft_c2c(_without_expansion(self), dim, normalization, forward)
    _check_sizes(self, dim)
    return torch._fft_c2c(self.to(torch.complex64), dim, normalization, forward).to(self.dtype)


def _with_out(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def with_out(*arguments: Any, out: Tensor) -> Tensor:
        return write(out, function(*arguments))

    return with_out


DECOMPOSITIONS: dict[str, Callable[..., Any]] = {
    "aten::_fft_r2c": real_to_complex,
    "aten::_fft_r2c.out": _with_out(real_to_complex),
    "aten::_fft_c2r": complex_to_real,
    "aten::_fft_c2r.out": _with_out(complex_to_real),
    "aten::_fft_c2c": complex_to_complex,
    "aten::_fft_c2c.out": _with_out(complex_to_complex),
}
NEEDS = dict.fromkeys(DECOMPOSITIONS, Need(frozenset(_HALF_TYPES))) if _TAKES_EXPANDED else {}
