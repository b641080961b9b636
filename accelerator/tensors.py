"""Tensors on the device, by dtype."""

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
    """Return a bfloat16 tensor with some data on the current device.

    Args:
        data: what ``torch.tensor`` takes: a number, numbers in sequences, an array, or a tensor; always copied.

    Returns:
        A new tensor. A number gives a tensor of no dimensions, not of that size as torch's old ``BFloat16Tensor`` class does.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> acc.BFloat16Tensor([1, 2]).dtype
        torch.bfloat16
    """
    return _tensor(data, torch.bfloat16)


def ByteTensor(data: Any) -> torch.Tensor:
    """Return a uint8 tensor with some data on the current device.

    Args:
        data: what ``torch.tensor`` takes: a number, numbers in sequences, an array, or a tensor; always copied.

    Returns:
        A new tensor. A number gives a tensor of no dimensions, not of that size as torch's old ``ByteTensor`` class does.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> acc.ByteTensor([1, 2]).dtype
        torch.uint8
    """
    return _tensor(data, torch.uint8)


def DoubleTensor(data: Any) -> torch.Tensor:
    """Return a float64 tensor with some data on the current device.

    Args:
        data: what ``torch.tensor`` takes: a number, numbers in sequences, an array, or a tensor; always copied.

    Returns:
        A new tensor. A number gives a tensor of no dimensions, not of that size as torch's old ``DoubleTensor`` class does.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> acc.DoubleTensor([1, 2]).dtype
        torch.float64
    """
    return _tensor(data, torch.float64)


def FloatTensor(data: Any) -> torch.Tensor:
    """Return a float32 tensor with some data on the current device.

    Args:
        data: what ``torch.tensor`` takes: a number, numbers in sequences, an array, or a tensor; always copied.

    Returns:
        A new tensor. A number gives a tensor of no dimensions, not of that size as torch's old ``FloatTensor`` class does.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> acc.FloatTensor([1, 2]).dtype
        torch.float32
    """
    return _tensor(data, torch.float32)


def HalfTensor(data: Any) -> torch.Tensor:
    """Return a float16 tensor with some data on the current device.

    Args:
        data: what ``torch.tensor`` takes: a number, numbers in sequences, an array, or a tensor; always copied.

    Returns:
        A new tensor. A number gives a tensor of no dimensions, not of that size as torch's old ``HalfTensor`` class does.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> acc.HalfTensor([1, 2]).dtype
        torch.float16
    """
    return _tensor(data, torch.float16)


def IntTensor(data: Any) -> torch.Tensor:
    """Return an int32 tensor with some data on the current device.

    Args:
        data: what ``torch.tensor`` takes: a number, numbers in sequences, an array, or a tensor; always copied.

    Returns:
        A new tensor. A number gives a tensor of no dimensions, not of that size as torch's old ``IntTensor`` class does.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> acc.IntTensor([1, 2]).dtype
        torch.int32
    """
    return _tensor(data, torch.int32)


def LongTensor(data: Any) -> torch.Tensor:
    """Return an int64 tensor with some data on the current device.

    Args:
        data: what ``torch.tensor`` takes: a number, numbers in sequences, an array, or a tensor; always copied.

    Returns:
        A new tensor. A number gives a tensor of no dimensions, not of that size as torch's old ``LongTensor`` class does.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> acc.LongTensor([1, 2]).dtype
        torch.int64
    """
    return _tensor(data, torch.int64)


def _tensor(data: Any, dtype: torch.dtype) -> torch.Tensor:
    # Read on the CPU first, so that what is no data initializes nothing.
    given = isinstance(data, torch.Tensor)
    tensor = data.detach() if given else torch.tensor(data, dtype=dtype, device="cpu")
    return tensor.to(torch.device(state.initialize().device_type), dtype, copy=given)


def on_accelerator(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on a device of the accelerator.

    Args:
        tensor: a tensor.

    Returns:
        Whether the tensor's device type is the accelerator's; when the CPU stands in, whether it is on the CPU.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.on_accelerator(acc.FloatTensor([1.0]))
        True
    """
    if not isinstance(tensor, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"on_accelerator() takes a tensor, not {type(tensor).__name__}")
    return tensor.device.type == state.current(allow_bad_fork=True).device_type
