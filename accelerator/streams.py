"""Streams, events and synchronization."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import discovery
from ._machine import discovery_cache
from ._machine.device_argument import Device
from ._machine.discovery_result import DiscoveryResult
from ._machine.dynamo import assume_constant
from ._torch import bindings, state, tracing
from ._torch.bindings import get_index, get_stream
from ._torch.contexts import StreamContext
from ._torch.cpu_streams import CPUEvent, CPUStream, cpu_stream
from ._torch.state import cached_index, device_indices, initialized
from ._torch.tracing import traced_as

__all__ = [
    "Event",
    "Stream",
    "current_stream",
    "default_stream",
    "external_stream",
    "handles_memory_backpressure",
    "is_synchronized_device",
    "record_stream",
    "resolves_data_dependency",
    "set_stream",
    "stream",
    "synchronize",
    "use_host_timers",
]

if TYPE_CHECKING:
    Event = torch.Event
    Stream = torch.Stream

_discovered = discovery_cache.current
_set_stream = bindings.set_stream
_synchronize = bindings.synchronize


@traced_as(tracing.current_stream)
def current_stream(device: Device = None, /) -> torch.Stream:
    """Return the current stream of a device.

    Args:
        device: an index, "cuda:1", a ``torch.device``; None or a negative index for the current device.

    Returns:
        The stream, an ``acc.Stream``; the CPU's only stream under the CPU fallback. Mirrors
        ``torch.accelerator.current_stream``.

    Initializes: the accelerator.

    Example:
        >>> isinstance(acc.current_stream(), acc.Stream)
        True
    """
    if device is None:
        if initialized:
            return get_stream(get_index())
    else:
        index = device if type(device) is int else cached_index(device)
        if index in device_indices:
            return get_stream(index)
    runtime = state.initialize(device, allow_negative=True)
    return cpu_stream() if runtime.device_type == "cpu" else get_stream(runtime.device_index)


@traced_as(tracing.set_stream)
def set_stream(stream: torch.Stream) -> None:
    """Make a stream the current one of its device, and its device the current one.

    Args:
        stream: a stream of the accelerator.

    Raises:
        TypeError: if the argument is not a stream.
        RuntimeError: if the stream is of another device type.

    Mirrors ``torch.accelerator.set_stream``; does nothing under the CPU fallback.

    Example:
        >>> acc.set_stream(acc.current_stream())
    """
    if initialized or state.current().device_type != "cpu":
        try:
            return _set_stream(stream)
        except TypeError:
            pass  # the binding's message has several lines
        except (RuntimeError, UnicodeDecodeError):  # the binding's message says nothing of device types, or is no UTF-8
            device_type = state.current().device_type
            if stream.device.type == device_type:
                raise
            raise RuntimeError(f"{stream.device.type} doesn't match the current accelerator {device_type}.") from None
    elif isinstance(stream, torch.Stream):
        return
    raise TypeError(f"set_stream() takes a torch.Stream, not {type(stream).__name__}")


@traced_as(tracing.synchronize)
def synchronize(device: Device = None, /) -> None:
    """Wait until all work on a device has finished.

    Args:
        device: an index, "cuda:1", a ``torch.device``; None or a negative index for the current device.

    Before initialization and under the CPU fallback this only checks its argument. Mirrors ``torch.accelerator.synchronize``.

    Example:
        >>> acc.synchronize()
    """
    if device is None:
        if initialized:
            return _synchronize(get_index())
    else:
        index = device if type(device) is int else cached_index(device)
        if index in device_indices:
            return _synchronize(index)
    runtime = state.current(device, allow_negative=True)
    if runtime.is_initialized:
        _synchronize(runtime.device_index)


@traced_as(tracing.stream)
def stream(stream: torch.Stream | None) -> AbstractContextManager[None]:
    """Return a context manager that makes a stream and its device the current ones and restores the previous ones on exit.

    Args:
        stream: a stream of the accelerator, for example an ``acc.Stream`` or a ``torch.cuda.Stream``. None changes nothing.

    Returns:
        The context manager. On exit it restores the current device, its stream, and the former stream of the device of
        ``stream``. It is re-entrant, and several threads can enter it at once. Mirrors ``torch.cuda.stream``; changes nothing
        under the CPU fallback.

    Raises:
        TypeError: if the argument is neither a stream nor None.
        ValueError: if the stream is of another device type.
        RuntimeError: in a bad fork.

    Example:
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
    """Return the default stream of a device, which is current until ``set_stream`` or ``stream`` changes it.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        The stream, an ``acc.Stream``; the current stream on accelerators without a default stream; the CPU's only stream under
        the CPU fallback. Mirrors ``torch.cuda.default_stream``.

    Initializes: the accelerator.

    Example:
        >>> acc.current_stream() == acc.default_stream()
        True
    """
    runtime = state.initialize(device)
    if runtime.device_type == "cpu":
        return cpu_stream()
    # Some modules have no default stream. DeepSpeed's accelerators use the current one then.
    read = runtime.find_function("default_stream")
    return _as_torch_stream(read(runtime.device_index)) if read else get_stream(runtime.device_index)


def _as_torch_stream(stream: torch.Stream) -> torch.Stream:
    # current_stream() is a torch.Stream, and no torch.cuda.Stream compares equal to one.
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def external_stream(data_ptr: int, device: Device = None) -> torch.Stream:
    """Return a ``torch.Stream`` for a stream that another library created.

    Args:
        data_ptr: the address of the stream, on CUDA a ``cudaStream_t``. The other library must keep the stream alive.
        device: the stream's device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        The stream, an ``acc.Stream``. Mirrors ``torch.cuda.get_stream_from_external``.

    Raises:
        TypeError: if the address is not an int.
        ValueError: if the address is out of range.
        RuntimeError: under the CPU fallback, in a bad fork, and if torch has no such function for this accelerator.

    Initializes: the accelerator.

    Example:
        >>> address = torch.cuda.Stream(1).cuda_stream  # as another library would have it
        >>> acc.external_stream(address, 1).device
        device(type='cuda', index=1)
    """
    address = operator.index(data_ptr)
    if not 0 <= address < 2**64:
        raise ValueError(f"The address of a stream must be from 0 to 2**64 - 1, not {address}")
    if state.current(device).device_type == "cpu":
        raise RuntimeError("external_stream() needs an accelerator: under the CPU fallback there are no other streams")
    runtime = state.initialize(device)
    # Older releases of torch have a class for CUDA only, not the function.
    create = runtime.find_function("ExternalStream") or runtime.function("get_stream_from_external")
    return _as_torch_stream(create(address, runtime.device_index))


def record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Keep a tensor's memory from being used again until the work that a stream has now is done.

    The allocator knows only the stream on which a tensor was allocated. Call this for each other stream that uses the tensor,
    before the tensor is freed.

    Args:
        tensor: a tensor. Nothing is recorded for one that is not on the accelerator.
        stream: a stream of the tensor's device that uses it.

    Mirrors ``torch.Tensor.record_stream``; does nothing under the CPU fallback, where the method raises.

    Raises:
        TypeError: if an argument is of another type.
        RuntimeError: if torch cannot record streams for this accelerator; in a bad fork.

    Example:
        >>> x, side = acc.FloatTensor([1.0]), acc.Stream()
        >>> side.wait_stream(acc.current_stream())
        >>> with acc.stream(side):
        ...     y = x + 1
        >>> acc.record_stream(x, side)
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"record_stream() takes a torch.Tensor, not {type(tensor).__name__}")
    if not isinstance(stream, torch.Stream):
        raise TypeError(f"record_stream() takes a torch.Stream, not {type(stream).__name__}")
    device_type = state.current().device_type
    if device_type == "cpu" or tensor.device.type != device_type:
        return
    try:
        tensor.record_stream(stream)
    except NotImplementedError:
        raise RuntimeError(f"torch {torch.__version__} cannot record streams of {device_type} tensors") from None


@assume_constant
def is_synchronized_device() -> bool:
    """Return whether work on the device has finished when the call that issued it returns.

    Returns:
        False on an accelerator, True under the CPU fallback.

    Example:
        >>> acc.is_synchronized_device()
        False
    """
    return state.current(allow_bad_fork=True).vendor.is_synchronized


@assume_constant
def use_host_timers() -> bool:
    """Return whether to time the device's work with the host's clock.

    Returns:
        False on an accelerator, which has events for that, True under the CPU fallback.

    Example:
        >>> acc.use_host_timers()
        False
    """
    return state.current(allow_bad_fork=True).vendor.use_host_timers


@assume_constant
def resolves_data_dependency() -> bool:
    """Return whether work can use the results of earlier work on another stream without waiting for it.

    Returns:
        False on an accelerator, True under the CPU fallback.

    Example:
        >>> acc.resolves_data_dependency()
        False
    """
    return state.current(allow_bad_fork=True).vendor.resolves_data_dependency


@assume_constant
def handles_memory_backpressure() -> bool:
    """Return whether work can be issued faster than it finishes without running out of memory.

    Returns:
        False on an accelerator, True under the CPU fallback.

    Example:
        >>> acc.handles_memory_backpressure()
        False
    """
    return state.current(allow_bad_fork=True).vendor.handles_memory_backpressure


class _NoStream(torch.Stream):
    """``Stream`` in a bad fork."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        state.raise_bad_fork()


class _NoEvent(torch.Event):
    """``Event`` in a bad fork."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        state.raise_bad_fork()


class _Classes(NamedTuple):
    Stream: type
    Event: type


_ON_ACCELERATOR = _Classes(torch.Stream, torch.Event)
_ON_CPU = _Classes(CPUStream, CPUEvent)
_IN_BAD_FORK = _Classes(_NoStream, _NoEvent)

# The classes before initialization, and the discovery result that they were chosen for. A forked child discovers again.
_chosen: tuple[DiscoveryResult | None, _Classes] = None, _ON_CPU


def class_reader(name: str) -> Callable[..., type]:
    """Return a function that returns the class that ``Stream`` or ``Event`` is now.

    Before initialization the environment can change the class. Each access calls the function, so it makes one call only.
    """
    index = _Classes._fields.index(name)

    def current_class(*_: object) -> type:
        if initialized:
            return _ON_ACCELERATOR[index]
        result, classes = _chosen
        discovered = _discovered()
        return (classes if discovered is result else _choose(discovered))[index]

    return current_class


def _choose(discovered: DiscoveryResult) -> _Classes:
    global _chosen
    in_bad_fork = discovery.is_in_bad_fork()
    classes = _ON_CPU if not discovered.count else _IN_BAD_FORK if in_bad_fork else _ON_ACCELERATOR
    _chosen = discovered, classes
    return classes


if not TYPE_CHECKING:

    def __getattr__(name: str) -> type:
        if name not in _Classes._fields:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return class_reader(name)()
