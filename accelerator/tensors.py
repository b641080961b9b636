"""Tensors of each dtype on the current device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._torch import state

__all__ = [
    "BFloat16Tensor",
    "ByteTensor",
    "DoubleTensor",
    "FloatTensor",
    "HalfTensor",
    "IntTensor",
    "LongTensor",
    "on_accelerator",
]


_DOCSTRING = """Return a tensor of dtype {dtype} on the current device.

    Args:
        data: what ``torch.tensor`` takes: a number, a sequence, an array or a tensor. It is copied.

    Returns:
        A new tensor. A number becomes a zero-dimensional tensor; torch's class ``{name}`` takes it as a size.

    Initializes: the accelerator.

    Example:
        >>> acc.{name}([1, 2]).dtype
        torch.{dtype}
    """


def _constructor(name: str, dtype: torch.dtype) -> Callable[[Any], torch.Tensor]:
    def create(data: Any) -> torch.Tensor:
        # Created on the CPU first, so that wrong data initializes nothing.
        is_tensor = isinstance(data, torch.Tensor)
        tensor = data.detach() if is_tensor else torch.tensor(data, dtype=dtype, device="cpu")
        return tensor.to(torch.device(state.initialize().device_type), dtype, copy=is_tensor)

    create.__name__ = create.__qualname__ = name
    create.__doc__ = _DOCSTRING.format(name=name, dtype=str(dtype).removeprefix("torch."))
    return create


BFloat16Tensor = _constructor("BFloat16Tensor", torch.bfloat16)
ByteTensor = _constructor("ByteTensor", torch.uint8)
DoubleTensor = _constructor("DoubleTensor", torch.float64)
FloatTensor = _constructor("FloatTensor", torch.float32)
HalfTensor = _constructor("HalfTensor", torch.float16)
IntTensor = _constructor("IntTensor", torch.int32)
LongTensor = _constructor("LongTensor", torch.int64)


def on_accelerator(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the accelerator.

    Args:
        tensor: a tensor.

    Returns:
        Whether the tensor's device type is the accelerator's, or "cpu" under the CPU fallback.

    Example:
        >>> acc.on_accelerator(acc.FloatTensor([1.0]))
        True
    """
    if not isinstance(tensor, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"on_accelerator() takes a tensor, not {type(tensor).__name__}")
    return tensor.device.type == state.current(allow_bad_fork=True).device_type
