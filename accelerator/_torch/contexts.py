"""Context managers that make a device or a stream current and restore the previous one."""

from __future__ import annotations

import threading
from typing import Any

import torch

from . import state
from .bindings import exchange_index, get_index, get_stream, restore_index, set_stream


class _ReentrantContext:
    """Make a target current on entering and restore what was current on leaving.

    One object can be entered again while it is entered, and by several threads at once. Subclasses define ``_exchange``, which
    makes the target current and returns the previous one, and ``_restore``, which takes the previous one.
    """

    __slots__ = ("_is_reentered", "_is_unused", "_previous", "_target")

    _exchange: Any
    _restore: Any

    def __init__(self, target: Any) -> None:
        self._target = target
        # Most objects are entered once. The first entry stores the previous target here, later ones in a thread-local list.
        # The entry that deletes this attribute is the first: deleting is atomic.
        self._is_unused = True
        self._is_reentered = False

    def __enter__(self) -> None:
        try:
            del self._is_unused
        except AttributeError:
            self._is_reentered = True
            _thread.entries.append((self, self._exchange(self._target)))
        else:
            self._previous = self._exchange(self._target)

    def __exit__(self, *exc_info: object) -> None:
        self._restore(self._pop_previous() if self._is_reentered else self._previous)

    def _pop_previous(self) -> Any:
        """Return what was current before this thread last entered the object."""
        for position in reversed(range(len(_thread.entries))):
            if _thread.entries[position][0] is self:
                return _thread.entries.pop(position)[1]
        return self._previous


class _Thread(threading.local):
    """This thread's entries into objects that had been entered before, each with what was current."""

    def __init__(self) -> None:
        self.entries: list[tuple[_ReentrantContext, Any]] = []


_thread = _Thread()


class DeviceContext(_ReentrantContext):
    """Make a device current, by its index. The accelerator is initialized."""

    __slots__ = ()
    _exchange = staticmethod(exchange_index)
    _restore = staticmethod(restore_index)


_CPU = -1  # in place of a previous index


def _initialize_and_exchange(index: int) -> int:
    if state.initialize(index).device_type == "cpu":
        return _CPU  # the initialization has failed since the context was created
    previous: int = exchange_index(index)
    return previous


def _restore_after_initializing(index: int) -> None:
    if index != _CPU:
        restore_index(index)


class InitializingDeviceContext(_ReentrantContext):
    """Make a device current, by its index. Entering initializes the accelerator."""

    __slots__ = ()
    _exchange = staticmethod(_initialize_and_exchange)
    _restore = staticmethod(_restore_after_initializing)


def _exchange_stream(stream: torch.Stream) -> tuple[int, tuple[torch.Stream, ...]]:
    state.initialize()
    index, current_index = stream.device_index, get_index()
    streams = (get_stream(current_index),) if index == current_index else (get_stream(index), get_stream(current_index))
    set_stream(stream)
    return current_index, streams


def _restore_streams(previous: tuple[int, tuple[torch.Stream, ...]]) -> None:
    index, streams = previous
    for stream in streams:
        # Setting a stream makes its device current too, with a context on it.
        if get_stream(stream.device_index) != stream:
            set_stream(stream)
    restore_index(index)


class StreamContext(_ReentrantContext):
    """Make a stream and its device current. Entering initializes the accelerator."""

    __slots__ = ()
    _exchange = staticmethod(_exchange_stream)
    _restore = staticmethod(_restore_streams)
