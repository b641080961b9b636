"""Tensors of each dtype on the current device."""

from __future__ import annotations

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


def BFloat16Tensor(data: Any) -> torch.Tensor:
    """Return a bfloat16 tensor on the current device.

    Args:
        data: what ``torch.tensor`` takes: a number, a sequence, an array or a tensor. It is copied.

    Returns:
        A new tensor. A number becomes a zero-dimensional tensor; torch's class ``BFloat16Tensor`` takes it as a size.

    Initializes: the accelerator.

    Example:
        >>> import accelerator as acc
        >>> acc.BFloat16Tensor([1, 2]).dtype
        torch.bfloat16
    """
    return _tensor(data, torch.bfloat16)


def ByteTensor(data: Any) -> torch.Tensor:
    """Return a uint8 tensor on the current device.

    Args:
        data: what ``torch.tensor`` takes: a number, a sequence, an array or a tensor. It is copied.

    Returns:
        A new tensor. A number becomes a zero-dimensional tensor; torch's class ``ByteTensor`` takes it as a size.

    Initializes: the accelerator.

    Example:
        >>> import accelerator as acc
        >>> acc.ByteTensor([1, 2]).dtype
        torch.uint8
    """
    return _tensor(data, torch.uint8)


def DoubleTensor(data: Any) -> torch.Tensor:
    """Return a float64 tensor on the current device.

    Args:
        data: what ``torch.tensor`` takes: a number, a sequence, an array or a tensor. It is copied.

    Returns:
        A new tensor. A number becomes a zero-dimensional tensor; torch's class ``DoubleTensor`` takes it as a size.

    Initializes: the accelerator.

    Example:
        >>> import accelerator as acc
        >>> acc.DoubleTensor([1, 2]).dtype
        torch.float64
    """
    return _tensor(data, torch.float64)


def FloatTensor(data: Any) -> torch.Tensor:
    """Return a float32 tensor on the current device.

    Args:
        data: what ``torch.tensor`` takes: a number, a sequence, an array or a tensor. It is copied.

    Returns:
        A new tensor. A number becomes a zero-dimensional tensor; torch's class ``FloatTensor`` takes it as a size.

    Initializes: the accelerator.

    Example:
        >>> import accelerator as acc
        >>> acc.FloatTensor([1, 2]).dtype
        torch.float32
    """
    return _tensor(data, torch.float32)


def HalfTensor(data: Any) -> torch.Tensor:
    """Return a float16 tensor on the current device.

    Args:
        data: what ``torch.tensor`` takes: a number, a sequence, an array or a tensor. It is copied.

    Returns:
        A new tensor. A number becomes a zero-dimensional tensor; torch's class ``HalfTensor`` takes it as a size.

    Initializes: the accelerator.

    Example:
        >>> import accelerator as acc
        >>> acc.HalfTensor([1, 2]).dtype
        torch.float16
    """
    return _tensor(data, torch.float16)


def IntTensor(data: Any) -> torch.Tensor:
    """Return an int32 tensor on the current device.

    Args:
        data: what ``torch.tensor`` takes: a number, a sequence, an array or a tensor. It is copied.

    Returns:
        A new tensor. A number becomes a zero-dimensional tensor; torch's class ``IntTensor`` takes it as a size.

    Initializes: the accelerator.

    Example:
        >>> import accelerator as acc
        >>> acc.IntTensor([1, 2]).dtype
        torch.int32
    """
    return _tensor(data, torch.int32)


def LongTensor(data: Any) -> torch.Tensor:
    """Return an int64 tensor on the current device.

    Args:
        data: what ``torch.tensor`` takes: a number, a sequence, an array or a tensor. It is copied.

    Returns:
        A new tensor. A number becomes a zero-dimensional tensor; torch's class ``LongTensor`` takes it as a size.

    Initializes: the accelerator.

    Example:
        >>> import accelerator as acc
        >>> acc.LongTensor([1, 2]).dtype
        torch.int64
    """
    return _tensor(data, torch.int64)


def _tensor(data: Any, dtype: torch.dtype) -> torch.Tensor:
    # Created on the CPU first, so that wrong data initializes nothing.
    is_tensor = isinstance(data, torch.Tensor)
    tensor = data.detach() if is_tensor else torch.tensor(data, dtype=dtype, device="cpu")
    return tensor.to(torch.device(state.initialize().device_type), dtype, copy=is_tensor)


def on_accelerator(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on the accelerator.

    Args:
        tensor: a tensor.

    Returns:
        Whether the tensor's device type is the accelerator's, or "cpu" under the CPU fallback.

    Example:
        >>> import accelerator as acc
        >>> acc.on_accelerator(acc.FloatTensor([1.0]))
        True
    """
    if not isinstance(tensor, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"on_accelerator() takes a tensor, not {type(tensor).__name__}")
    return tensor.device.type == state.current(allow_bad_fork=True).device_type
