"""Which device: the current one, changing it for a while or for good, naming it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from . import discovery
from ._machine import discovery_cache
from ._machine.device_argument import Device
from ._machine.dynamo import assume_constant
from ._torch import runtime, tracing
from ._torch.contexts import DeviceContext, FirstDeviceContext
from ._torch.runtime import get_index, set_index, up
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
        check_available: return it only if ``is_available()``.

    Returns:
        The device, or None on a CPU build, or with ``ACCELERATOR_BACKEND=cpu``, or where it is not available and that was
        asked. Mirrors ``torch.accelerator.current_accelerator``.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> device = acc.current_accelerator(check_available=True)
        >>> (device is not None) == acc.is_available()
        True
    """
    kind = discovery_cache.current().accelerator_type
    if kind is None or (check_available and not discovery.is_available()):
        return None
    return torch.device(kind)


@traced_as(tracing.current_device_index)
def current_device_index() -> int:
    """Return the index of the current device.

    Returns:
        The index; 0 before the accelerator is initialized, and when the CPU stands in. Mirrors
        ``torch.accelerator.current_device_index``, which would initialize it.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.current_device_index()
        0
    """
    if up:
        return get_index()
    return runtime.look().number


def set_device_index(device: Device, /) -> None:
    """Make a device the current one.

    Args:
        device: an index, "cuda:1", or a ``torch.device`` with an index. A negative index does nothing.

    Raises:
        ValueError: if the index is missing or out of range, or the device is of another type.
        TypeError: if it is no device at all.

    Mirrors ``torch.accelerator.set_device_index``; does nothing when the CPU stands in.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> acc.set_device_index(0)
    """
    if not up:
        seen = runtime.look(device, optional=False, negative=True)
        if seen.kind == "cpu" or (seen.given is not None and seen.given < 0):
            return
        runtime.initialize()
    number = device if type(device) is int else runtime.resolve(device, optional=False, negative=True)
    try:
        set_index(number)
    except (RuntimeError, TypeError) as error:
        if number >= 0:  # a negative index may be so far out of range that the binding does not take it
            raise runtime.explain(number, error) from None


_Device = torch.device
_known = runtime.known.get
_NO_CHANGE: AbstractContextManager[None] = nullcontext()


@traced_as(tracing.device_index)
def device_index(device: Device, /) -> AbstractContextManager[None]:
    """Return a context manager that makes a device the current one, and the previous one again at the end.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or a tensor for the device that it is on. None, a negative index and
            a device without an index change nothing.

    Returns:
        The context manager. It can be entered again while it is entered, and restores on exceptions too.
        ``torch.compile(fullgraph=True)`` traces it.

    Mirrors ``torch.accelerator.device_index``; changes nothing when the CPU stands in.

    Fork: entering it initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> with acc.device_index(0):
        ...     acc.current_device_index()
        0
    """
    if up:
        if type(device) is int:
            if device >= 0:
                return DeviceContext(device)
        elif type(device) is _Device or type(device) is str:
            number = _known(device)
            if number is not None:
                return DeviceContext(number)
    if isinstance(device, torch.Tensor):
        device = device.device
    seen = runtime.look(device, negative=True)
    if seen.kind == "cpu" or seen.given is None or seen.given < 0:
        return _NO_CHANGE
    return DeviceContext(seen.given) if seen.up else FirstDeviceContext(seen.given)


@traced_as(tracing.device_of)
def device_of(obj: Any) -> AbstractContextManager[None]:
    """Return a context manager that makes the device of a tensor or storage the current one, and the previous one again.

    Args:
        obj: a tensor or a storage. One that is not on the accelerator changes nothing.

    Returns:
        The context manager, as ``device_index`` returns it. Mirrors ``torch.cuda.device_of``.

    Raises:
        TypeError: if it is neither tensor nor storage.
        RuntimeError: in a child forked from a process that had initialized the accelerator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc, torch
        >>> with acc.device_of(torch.ones(2)):
        ...     acc.current_device_index()
        0
    """
    if isinstance(obj, torch.TypedStorage):
        # Its own ``device`` warns that the class is deprecated.
        obj = obj._untyped_storage  # pyright: ignore[reportPrivateUsage]
    if not isinstance(obj, (torch.Tensor, torch.UntypedStorage)):
        raise TypeError(f"device_of() takes a tensor or a storage, not {type(obj).__name__}")
    place = obj.device
    return device_index(place if place.type == runtime.look().kind else None)


@traced_as(tracing.device)
def device(device_index: Device = None) -> torch.device:
    """Return a device as torch names it.

    This is a value. ``with acc.device(1):`` is ``with torch.device(...)``, which changes where torch creates tensors and not
    which device is current; for that there is ``device_index``.

    Args:
        device_index: an index, "cuda:1", a ``torch.device``, or None for the accelerator without an index.

    Returns:
        ``torch.device("cuda")``, ``torch.device("cuda", 1)``, ...; ``torch.device("cpu")`` when the CPU stands in.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc, torch
        >>> torch.ones(2, device=acc.device()).device.type == acc.device_name()
        True
    """
    kind, number, _ = runtime.look(device_index, poisoned=True)
    return torch.device(kind) if number is None or kind == "cpu" else torch.device(kind, number)


def current_device() -> int:
    """Return the index of the current device: ``current_device_index`` under the name that ``torch.cuda`` has for it.

    Returns:
        The index, always an int; 0 before the accelerator is initialized, and when the CPU stands in.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.current_device()
        0
    """
    return current_device_index()


def current_device_name() -> str:
    """Return the current device's name in torch.

    Returns:
        "cuda:0", "cuda:1", ...; "cpu" when the CPU stands in.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.current_device_name() == acc.device_name(acc.current_device_index())
        True
    """
    return str(device(current_device_index()))


def set_device(device: Device) -> None:
    """Make a device the current one: ``set_device_index`` under the name that ``torch.cuda`` has for it.

    Args:
        device: an index, "cuda:1", or a ``torch.device`` with an index. A negative index does nothing.

    Raises:
        ValueError: if the index is missing or out of range, or the device is of another type.
        TypeError: if it is no device at all.

    Does nothing when the CPU stands in.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> acc.set_device(0)
    """
    set_device_index(device)
