"""The current device: which one it is, changing it, and its name."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from . import discovery
from ._machine import discovery_cache
from ._machine.device_argument import Device, check_bool
from ._machine.dynamo import assume_constant
from ._torch import bindings, state, tracing
from ._torch.bindings import get_index, set_index
from ._torch.contexts import DeviceContext, InitializingDeviceContext
from ._torch.state import cached_index, device_indices, initialized
from ._torch.tracing import traced_as

__all__ = [
    "current_accelerator",
    "current_device",
    "current_device_index",
    "current_device_name",
    "device",
    "device_index",
    "device_of",
    "set_device",
    "set_device_index",
]


@assume_constant
def current_accelerator(check_available: bool = False) -> torch.device | None:
    """Return the accelerator that torch is built for, as a device without an index.

    Args:
        check_available: return None unless ``is_available()``.

    Returns:
        The device; None on a CPU build and with ``ACCELERATOR_BACKEND=cpu``. Mirrors
        ``torch.accelerator.current_accelerator``.

    Raises:
        TypeError: if the argument is not a bool, such as a device.

    Example:
        >>> acc.current_accelerator(check_available=True)
        device(type='cuda')
    """
    check_bool("check_available", check_available)
    device_type = discovery_cache.current().accelerator_type
    if device_type is None or (check_available and not discovery.is_available()):
        return None
    return torch.device(device_type)


@traced_as(tracing.current_device_index)
def current_device_index() -> int:
    """Return the index of the current device.

    Returns:
        The index; 0 before initialization and under the CPU fallback. Mirrors ``torch.accelerator.current_device_index``,
        which initializes the accelerator.

    Example:
        >>> acc.current_device_index()
        0
    """
    if initialized:
        return get_index()
    return state.current().device_index


def set_device_index(device: Device, /) -> None:
    """Make a device the current one.

    Args:
        device: an index, "cuda:1", or a ``torch.device`` with an index. A negative index does nothing.

    Raises:
        ValueError: if the device has no index, is out of range, or is of another type.
        TypeError: if the argument is not a device.

    Mirrors ``torch.accelerator.set_device_index``; does nothing under the CPU fallback.

    Initializes: the accelerator.

    Example:
        >>> acc.set_device_index(0)
    """
    index = device if type(device) is int else cached_index(device)
    if index in device_indices:
        return set_index(index)
    runtime = state.current(device, optional=False, allow_negative=True)
    index = runtime.requested_index
    if runtime.device_type != "cpu" and index is not None and index >= 0:
        state.initialize()
        set_index(index)


@traced_as(tracing.device_index)
def device_index(device: Device, /) -> AbstractContextManager[None]:
    """Return a context manager that makes a device the current one and restores the previous one on exit.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or a tensor, which names its device. None, a negative index and a
            device without an index change nothing.

    Returns:
        The context manager. It is re-entrant, and ``torch.compile(fullgraph=True)``
        traces it. Mirrors ``torch.accelerator.device_index``; changes nothing under the CPU fallback.

    Initializes: the accelerator.

    Example:
        >>> with acc.device_index(0):
        ...     acc.current_device_index()
        0
    """
    index = device if type(device) is int else cached_index(device)
    if index in device_indices:
        return DeviceContext(index)
    if isinstance(device, torch.Tensor):
        device = device.device
    runtime = state.current(device, allow_negative=True)
    index = runtime.requested_index
    if runtime.device_type == "cpu" or index is None or index < 0:
        return nullcontext()
    return DeviceContext(index) if runtime.is_initialized else InitializingDeviceContext(index)


@traced_as(tracing.device_of)
def device_of(obj: Any) -> AbstractContextManager[None]:
    """Return a context manager that makes the device of a tensor or storage the current one and restores the previous one.

    Args:
        obj: a tensor or a storage. If it is not on the accelerator, the context manager changes nothing.

    Returns:
        The context manager, as ``device_index`` returns it. Mirrors ``torch.cuda.device_of``.

    Raises:
        TypeError: for any other object.
        RuntimeError: in a bad fork.

    Example:
        >>> with acc.device_of(torch.ones(2)):
        ...     acc.current_device_index()
        0
    """
    if isinstance(obj, torch.TypedStorage):
        obj = bindings.untyped_storage(obj)
    if not isinstance(obj, (torch.Tensor, torch.UntypedStorage)):
        raise TypeError(f"device_of() takes a tensor or a storage, not {type(obj).__name__}")
    return device_index(obj.device if obj.device.type == state.current().device_type else None)


@traced_as(tracing.device)
def device(device_index: Device = None) -> torch.device:
    """Return a ``torch.device`` of the accelerator.

    Use ``device_index`` to change the current device: ``with acc.device(1):`` only changes the device on which torch creates
    tensors, as every ``torch.device`` does.

    Args:
        device_index: an index, "cuda:1", a ``torch.device``, or None for the accelerator without an index.

    Returns:
        ``torch.device("cuda")``, ``torch.device("cuda", 1)``, ...; ``torch.device("cpu")`` under the CPU fallback.

    Example:
        >>> torch.ones(2, device=acc.device(1)).device
        device(type='cuda', index=1)
    """
    runtime = state.current(device_index, allow_bad_fork=True)
    if runtime.requested_index is None or runtime.device_type == "cpu":
        return torch.device(runtime.device_type)
    return torch.device(runtime.device_type, runtime.requested_index)


def current_device() -> int:
    """Return the index of the current device. ``torch.cuda``'s name for ``current_device_index``.

    Returns:
        The index; 0 before initialization and under the CPU fallback.

    Example:
        >>> acc.current_device()
        0
    """
    return current_device_index()


def current_device_name() -> str:
    """Return torch's name of the current device.

    Returns:
        "cuda:0", "cuda:1", ...; "cpu" under the CPU fallback.

    Example:
        >>> acc.current_device_name()
        'cuda:0'
    """
    return str(device(current_device_index()))


def set_device(device: Device) -> None:
    """Make a device the current one. ``torch.cuda``'s name for ``set_device_index``.

    Args:
        device: an index, "cuda:1", or a ``torch.device`` with an index. A negative index does nothing.

    Raises:
        ValueError: if the device has no index, is out of range, or is of another type.
        TypeError: if the argument is not a device.

    Does nothing under the CPU fallback.

    Initializes: the accelerator.

    Example:
        >>> acc.set_device(0)
    """
    set_device_index(device)
