"""Streams and events: the current stream, switching it, waiting for it."""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from . import discovery
from ._machine.device_argument import Device
from ._torch import bindings, state, tracing
from ._torch.bindings import get_index, get_stream
from ._torch.contexts import StreamContext
from ._torch.cpu_streams import CPUEvent, CPUStream, cpu_stream
from ._torch.state import cached_index, initialized
from ._torch.tracing import traced_as

__all__ = [
    "Event",
    "Stream",
    "current_stream",
    "default_stream",
    "external_stream",
    "handles_memory_backpressure",
    "is_synchronized_device",
    "resolves_data_dependency",
    "set_stream",
    "stream",
    "synchronize",
    "use_host_timers",
]

if TYPE_CHECKING:
    Event = torch.Event
    Stream = torch.Stream

_set_stream = bindings.set_stream
_synchronize = bindings.synchronize


@traced_as(tracing.current_stream)
def current_stream(device: Device = None, /) -> torch.Stream:
    """Return the current stream of a device.

    Args:
        device: an index, "cuda:1", a ``torch.device``; None or a negative index for the current device.

    Returns:
        The stream, an ``acc.Stream``. Mirrors ``torch.accelerator.current_stream``. When the CPU stands in, its only
        stream.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> isinstance(acc.current_stream(), acc.Stream)
        True
    """
    if not initialized and state.initialize(device, allow_negative=True).device_type == "cpu":
        return cpu_stream()
    if device is None:
        return get_stream(get_index())
    index = device if type(device) is int else cached_index(device)
    if index is None or not 0 <= index < initialized[0].device_count:
        index = state.current(device, allow_negative=True).device_index
    return get_stream(index)


@traced_as(tracing.set_stream)
def set_stream(stream: torch.Stream) -> None:
    """Make a stream the current one of its device, and its device the current one.

    Args:
        stream: a stream of the accelerator.

    Raises:
        TypeError: if it is no stream.
        RuntimeError: if it is a stream of something else.

    Mirrors ``torch.accelerator.set_stream``; does nothing when the CPU stands in.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.set_stream(acc.current_stream())
    """
    if initialized or state.current().device_type != "cpu":
        try:
            return _set_stream(stream)
        except TypeError:
            pass  # which the binding tells in several lines
    elif isinstance(stream, torch.Stream):
        return
    raise TypeError(f"set_stream() takes a torch.Stream, not {type(stream).__name__}")


@traced_as(tracing.synchronize)
def synchronize(device: Device = None, /) -> None:
    """Wait until all work on a device is done.

    Args:
        device: an index, "cuda:1", a ``torch.device``; None or a negative index for the current device.

    Mirrors ``torch.accelerator.synchronize``, and really returns at once, checking its argument, while the accelerator is
    not initialized and when the CPU stands in.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.synchronize()
    """
    if not initialized and not state.current(device, allow_negative=True).is_initialized:
        return
    if device is None:
        return _synchronize(get_index())
    index = device if type(device) is int else cached_index(device)
    if index is None or not 0 <= index < initialized[0].device_count:
        index = state.current(device, allow_negative=True).device_index
    _synchronize(index)


@traced_as(tracing.stream)
def stream(stream: torch.Stream | None) -> AbstractContextManager[None]:
    """Return a context manager that makes a stream and its device the current ones, and the previous ones again at the end.

    Args:
        stream: a stream of the accelerator, a ``torch.Stream`` or one of ``torch.cuda``. None changes nothing.

    Returns:
        The context manager. At the end it restores the current device, its stream and the stream of the other device, on
        exceptions too. It can be entered again while it is entered, and by several threads at once. Mirrors
        ``torch.cuda.stream``; changes nothing when the CPU stands in.

    Raises:
        TypeError: if it is no stream.
        ValueError: if it is a stream of another type of device.
        RuntimeError: in a child forked from a process that had initialized the accelerator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> side = acc.Stream()
        >>> with acc.stream(side):
        ...     acc.current_stream() == side
        True
    """
    if stream is None:
        return nullcontext()
    if not isinstance(stream, torch.Stream):
        raise TypeError(f"stream() takes a torch.Stream or None, not {type(stream).__name__}")
    device_type = state.current().device_type
    if device_type == "cpu":
        return nullcontext()
    if stream.device.type != device_type:
        raise ValueError(f"{stream.device.type} doesn't match the current accelerator {device_type}.")
    return StreamContext(stream)


def default_stream(device: Device = None) -> torch.Stream:
    """Return the default stream of a device, the one that is current until another is made so.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        The stream, an ``acc.Stream``. Mirrors ``torch.cuda.default_stream``. When the CPU stands in, its only stream.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> acc.current_stream() == acc.default_stream()
        True
    """
    runtime = state.initialize(device)
    return cpu_stream() if runtime.device_type == "cpu" else _plain(runtime.function("default_stream")(runtime.device_index))


def _plain(stream: torch.Stream) -> torch.Stream:
    # A torch.cuda.Stream equals no torch.Stream, not even the same one, and the current stream is a torch.Stream.
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def external_stream(data_ptr: int, device: Device = None) -> torch.Stream:
    """Return a stream that another library made, as a stream of torch.

    Args:
        data_ptr: the address of the stream, on CUDA a ``cudaStream_t``. Whoever made it keeps it alive.
        device: the device that it is on: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        The stream, an ``acc.Stream``. Mirrors ``torch.cuda.get_stream_from_external``.

    Raises:
        TypeError: if the address is no int.
        ValueError: if it is out of range.
        RuntimeError: when the CPU stands in, which has no streams but its own, and on accelerators for which torch
            cannot do that.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc, torch
        >>> address = torch.cuda.Stream(1).cuda_stream  # as another library would have it
        >>> acc.external_stream(address, 1).device
        device(type='cuda', index=1)
    """
    address = operator.index(data_ptr)
    if not 0 <= address < 2**64:
        raise ValueError(f"The address of a stream is from 0 to 2**64 - 1, not {address}")
    if state.current(device).device_type == "cpu":
        raise RuntimeError(
            "A stream of another library needs an accelerator: the CPU stands in, which has no streams but its own"
        )
    runtime = state.initialize(device)
    if runtime.device_type == "cuda":
        # Older releases have the class only, newer ones also a function of the name that other accelerators use.
        return _plain(torch.cuda.ExternalStream(address, runtime.device_index))  # type: ignore[no-untyped-call]
    return _plain(runtime.function("get_stream_from_external")(address, runtime.device_index))


@traced_as(tracing.is_synchronized_device)
def is_synchronized_device() -> bool:
    """Return whether work on the device is done when the call that issued it returns.

    Returns:
        False on an accelerator, True when the CPU stands in.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.is_synchronized_device() == (not acc.is_available())
        True
    """
    return state.current(allow_bad_fork=True).device_type == "cpu"


def use_host_timers() -> bool:
    """Return whether the host's clock is the one to time the device's work with.

    Returns:
        False on an accelerator, whose events are, True when the CPU stands in.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.use_host_timers() == acc.is_synchronized_device()
        True
    """
    return is_synchronized_device()


def resolves_data_dependency() -> bool:
    """Return whether work may use the results of work issued before it without waiting, on whatever stream.

    Returns:
        False on an accelerator, True when the CPU stands in.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.resolves_data_dependency() == acc.is_synchronized_device()
        True
    """
    return is_synchronized_device()


def handles_memory_backpressure() -> bool:
    """Return whether issuing work faster than it is done cannot use up the memory.

    Returns:
        False on an accelerator, True when the CPU stands in.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.handles_memory_backpressure() == acc.is_synchronized_device()
        True
    """
    return is_synchronized_device()


class _NoStream(torch.Stream):
    """The class in a child that cannot use the accelerator: it can make none."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        state.raise_bad_fork()


class _NoEvent(torch.Event):
    """As ``_NoStream``."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        state.raise_bad_fork()


def __getattr__(name: str) -> Any:
    """Return the class that ``Stream`` or ``Event`` is now; before initialization the environment can change it."""
    if name not in ("Event", "Stream"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if initialized:
        classes: tuple[type, type] = torch.Stream, torch.Event
    elif not discovery.device_count():
        classes = CPUStream, CPUEvent
    else:
        classes = (_NoStream, _NoEvent) if discovery.is_in_bad_fork() else (torch.Stream, torch.Event)
    return classes[name == "Event"]
