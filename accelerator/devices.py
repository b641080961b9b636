"""Which device: the current one, changing it for a while or for good, naming it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from . import discovery
from ._machine import torch_build
from ._machine.device_argument import Device
from ._torch import runtime
from ._torch.runtime import exchange_index, get_index, restore_index, set_index, up

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
    kind = torch_build.accelerator_type()
    if kind is None or (check_available and not discovery.is_available()):
        return None
    return torch.device(kind)


def current_device_index() -> int:
    """Return the index of the current device.

    Returns:
        The index; 0 before the accelerator is initialized, and when the CPU stands in. Mirrors
        ``torch.accelerator.current_device_index``, which would initialize it.

    Raises:
        RuntimeError: in a child forked from a process that had initialized the accelerator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.current_device_index()
        0
    """
    if is_dynamo_compiling():
        return 0 if runtime.kind == "cpu" else torch.accelerator.current_device_index()
    if up:
        return get_index()
    return get_index() if not runtime.absent() and up else 0


def set_device_index(device: Device, /) -> None:
    """Make a device the current one.

    Args:
        device: an index, "cuda:1", or a ``torch.device`` with an index. A negative index does nothing.

    Raises:
        ValueError: if the index is missing or out of range, or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: for a string that names no device, and in a child forked from a process that had initialized the
            accelerator.

    Mirrors ``torch.accelerator.set_device_index``; does nothing when the CPU stands in.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> acc.set_device_index(0)
    """
    if up:
        number = device if type(device) is int else runtime.resolve(device, optional=False)
        try:
            return set_index(number)
        except (RuntimeError, TypeError) as error:
            if number < 0:  # so far out of range that the binding does not take it
                return
            raise runtime.explain(number, error) from None
    named = runtime.index(device, optional=False)
    if named is not None and named >= 0 and not runtime.absent():
        runtime.initialize()
        set_index(named)


class _DeviceIndex:
    """Makes a device current, and the previous one again; may be entered while it is entered."""

    __slots__ = ("_number", "_previous")

    _previous: tuple[int, Any] | None

    def __init__(self, number: int) -> None:
        self._number = number
        self._previous = None

    def __enter__(self) -> None:
        try:
            self._previous = (exchange_index(self._number), self._previous)
        except (RuntimeError, TypeError) as error:
            raise runtime.explain(self._number, error) from None

    def __exit__(self, *exc_info: object) -> None:
        previous, self._previous = self._previous  # type: ignore[misc]
        restore_index(previous)


_NO_CHANGE: AbstractContextManager[None] = nullcontext()


def device_index(device: Device, /) -> AbstractContextManager[None]:
    """Return a context manager that makes a device the current one, and the previous one again at the end.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or a tensor for the device that it is on. None, a negative index and
            a device without an index change nothing.

    Returns:
        The context manager. It can be entered again while it is entered, and restores on exceptions too.
        ``torch.compile(fullgraph=True)`` traces it.

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: for a string that names no device, and in a child forked from a process that had initialized the
            accelerator.

    Mirrors ``torch.accelerator.device_index``; changes nothing when the CPU stands in.

    Fork: entering it initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> with acc.device_index(0):
        ...     acc.current_device_index()
        0
    """
    if is_dynamo_compiling():
        return _traceable_device_index(device)
    if up:
        if type(device) is int and device >= 0:
            return _DeviceIndex(device)
        if type(device) is str or type(device) is torch.device:
            number = runtime.known.get(device)
            if number is not None:
                return _DeviceIndex(number)
    if isinstance(device, torch.Tensor):
        device = device.device
    number = runtime.index(device)
    if number is None or number < 0 or runtime.absent():
        return _NO_CHANGE
    runtime.initialize()
    return _DeviceIndex(number)


def _traceable_device_index(device: Any) -> AbstractContextManager[None]:
    # torch.compile breaks the graph at context managers that it does not know, and has known torch.cuda's for longest.
    if isinstance(device, torch.Tensor):
        device = device.device
    elif isinstance(device, str):
        device = torch.device(device)
    number = device.index if isinstance(device, torch.device) else device
    if number is None or number < 0 or runtime.kind == "cpu":
        return nullcontext()
    if runtime.kind == "cuda":
        return torch.cuda.device(number)
    return torch.accelerator.device_index(number)


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
    if is_dynamo_compiling():
        return _traceable_device_index(place if place.type == runtime.kind else None)
    return device_index(place if place.type == runtime.device_type() else None)


def device(device_index: Device = None) -> torch.device:
    """Return a device as torch names it.

    This is a value. ``with acc.device(1):`` is ``with torch.device(...)``, which changes where torch creates tensors and not
    which device is current; for that there is ``device_index``.

    Args:
        device_index: an index, "cuda:1", a ``torch.device``, or None for the accelerator without an index.

    Returns:
        ``torch.device("cuda")``, ``torch.device("cuda", 1)``, ...; ``torch.device("cpu")`` when the CPU stands in.

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: for a string that names no device, and in a child forked from a process that had initialized the
            accelerator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc, torch
        >>> torch.ones(2, device=acc.device()).device.type == acc.device_name()
        True
    """
    if is_dynamo_compiling():
        return _traceable_device(device_index)
    if device_index is None:
        return torch.device(runtime.device_type())
    number = runtime.index(device_index)
    if number is None:
        return torch.device(runtime.kind)
    runtime.check(number)
    return torch.device("cpu") if runtime.kind == "cpu" else torch.device(runtime.kind, number)


def _traceable_device(device: Any) -> torch.device:
    if device is None or runtime.kind == "cpu":
        return torch.device(runtime.kind)
    return torch.device(runtime.kind, device) if isinstance(device, int) else torch.device(device)


def current_device() -> int:
    """Return the index of the current device: ``current_device_index`` under the name that ``torch.cuda`` has for it.

    Returns:
        The index, always an int; 0 before the accelerator is initialized, and when the CPU stands in.

    Raises:
        RuntimeError: in a child forked from a process that had initialized the accelerator.

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

    Raises:
        RuntimeError: in a child forked from a process that had initialized the accelerator.

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
        RuntimeError: for a string that names no device, and in a child forked from a process that had initialized the
            accelerator.

    Does nothing when the CPU stands in.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> acc.set_device(0)
    """
    set_device_index(device)
