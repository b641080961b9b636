"""Lets Triton's interpreter compute the functions of ``triton.language.extra.libdevice``.

The bodies of these functions are empty: Triton's compiler replaces them, and in the interpreter they would return None. Here
torch's functions compute them on the CPU, and a function without a counterpart raises an error that names it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

__all__ = ["hook_libdevice"]

_SAME_NAME = (
    "abs acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh erf erfc erfinv exp exp2 expm1 floor fmod hypot lgamma"
    " log log10 log1p log2 nextafter pow rsqrt sin sinh sqrt tan tanh trunc"
).split()


def _to_flag(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *values: function(*values).to(torch.int32)


def _round_away_from_zero(x: torch.Tensor) -> torch.Tensor:
    return torch.trunc(x + torch.copysign(torch.full_like(x, 0.5), x))


def _cube_root(x: torch.Tensor) -> torch.Tensor:
    return torch.copysign(torch.abs(x).pow(1 / 3), x)


def _remainder(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x - y * torch.round(x / y)


def _fma(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(z, x, y)


def _round_to_int(x: torch.Tensor) -> torch.Tensor:
    return torch.round(x).to(torch.int64)


_OTHER_NAMES: dict[str, Callable[..., torch.Tensor]] = {
    "rint": torch.round,
    "nearbyint": torch.round,
    "llrint": _round_to_int,
    "round": _round_away_from_zero,
    "isnan": _to_flag(torch.isnan),
    "isinf": _to_flag(torch.isinf),
    "finitef": _to_flag(torch.isfinite),
    "isfinited": _to_flag(torch.isfinite),
    "signbit": _to_flag(torch.signbit),
    "remainder": _remainder,
    "fma": _fma,
    "div_rn": torch.div,
    "sqrt_rn": torch.sqrt,
    "rsqrt_rn": torch.rsqrt,
    "cbrt": _cube_root,
    "ldexp": torch.ldexp,
    "j0": torch.special.bessel_j0,
    "j1": torch.special.bessel_j1,
    "y0": torch.special.bessel_y0,
    "y1": torch.special.bessel_y1,
    "cyl_bessel_i0": torch.special.i0,
    "cyl_bessel_i1": torch.special.i1,
    "erfcx": torch.special.erfcx,
    "normcdf": torch.special.ndtr,
    "normcdfinv": torch.special.ndtri,
    "fast_dividef": torch.div,
    "fast_powf": torch.pow,
    **{f"fast_{name}f": getattr(torch, name) for name in ("sin", "cos", "log2", "log", "exp", "tanh", "tan", "log10")},
}
_FUNCTIONS = {**{name: getattr(torch, name) for name in _SAME_NAME}, **_OTHER_NAMES}


def hook_libdevice(libdevice: ModuleType) -> None:
    """Replace the functions of a module such as ``triton.language.extra.libdevice``."""
    for name, value in list(vars(libdevice).items()):
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", None) == libdevice.__name__:
            setattr(libdevice, name, _interpreted(name, _FUNCTIONS.get(name)))


def _interpreted(name: str, function: Callable[..., torch.Tensor] | None) -> Callable[..., Any]:
    def compute(*arguments: Any, _semantic: Any = None, _builder: Any = None) -> Any:
        interpreter: Any = sys.modules["triton.runtime.interpreter"]
        tl = interpreter.tl
        tensors = [each for each in arguments if isinstance(each, tl.tensor)]
        if function is None or not tensors:
            raise NotImplementedError(f"libdevice.{name} is not simulated{' without tensors' if function else ''}")
        dtype = tensors[0].type.scalar
        data_type = torch.from_numpy(tensors[0].handle.data).dtype
        result = function(
            *(
                torch.from_numpy(each.handle.data) if isinstance(each, tl.tensor) else torch.tensor(each, dtype=data_type)
                for each in arguments
            )
        )
        if not result.is_floating_point():
            integers = {torch.int32: tl.int32, torch.int64: tl.int64}
            if result.dtype not in integers:
                raise NotImplementedError(f"libdevice.{name} is not simulated for {result.dtype}")
            dtype = integers[result.dtype]
        data = result.numpy().astype(interpreter._get_np_dtype(dtype))
        shape = list(data.shape)
        is_block = any(each.type.is_block() for each in tensors)
        return tl.tensor(interpreter.TensorHandle(data, dtype), tl.block_type(dtype, shape) if is_block else dtype)

    compute.__name__ = name
    return compute
