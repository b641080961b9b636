"""The one kind of context manager that makes something current for a while: a device, or a stream and its device."""

from __future__ import annotations

import threading
from threading import get_ident
from typing import Any

import torch

from . import runtime
from .runtime import exchange_index, get_index, get_stream, restore_index, set_stream, up


class Scope:
    """Changes what is current on entering, and back on leaving; may be entered while it is entered, by any thread.

    Subclasses say how: ``_change`` makes the given device or stream current and returns what was, ``_back`` takes that.
    """

    __slots__ = ("_before", "_thread", "_to")

    _change: Any
    _back: Any

    def __init__(self, to: Any) -> None:
        self._to = to
        # As most are entered by the thread that made them, and once, what to go back to is kept here, with what to after that.
        self._thread = get_ident()
        self._before: Any = None

    def __enter__(self) -> None:
        try:
            if get_ident() == self._thread:
                self._before = self._change(self._to), self._before
            else:
                _elsewhere.entered.append((self, self._change(self._to)))
        except (RuntimeError, TypeError) as error:
            raise runtime.explain(self._to, error) from None

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if get_ident() == self._thread:
            before, self._before = self._before
        else:
            before = _elsewhere.leave(self)
        self._back(before)


class _Elsewhere(threading.local):
    """The scopes that a thread has entered which another one made, with what was current before each."""

    def __init__(self) -> None:
        self.entered: list[tuple[Scope, Any]] = []

    def leave(self, scope: Scope) -> Any:
        """What was current before this thread entered the scope last."""
        place = max(place for place, (entered, _) in enumerate(self.entered) if entered is scope)
        return self.entered.pop(place)[1]


_elsewhere = _Elsewhere()


class DeviceScope(Scope):
    """A scope in which a device is the current one, given by its index; the accelerator is up."""

    __slots__ = ()
    _change = exchange_index
    _back = restore_index


def _initialize_and_exchange(number: int) -> int:
    runtime.initialize(number)
    previous: int = exchange_index(number)
    return previous


class FirstDeviceScope(DeviceScope):
    """As ``DeviceScope`` where the accelerator was not up when this was made: it is initialized by entering."""

    __slots__ = ()
    _change = staticmethod(_initialize_and_exchange)


def _exchange_stream(stream: torch.Stream) -> tuple[torch.Stream, ...]:
    if not up:
        runtime.initialize()
    index, here = stream.device_index, get_index()
    # Restoring a stream makes its device the current one, so that of the present device is the last to restore.
    before = (get_stream(here),) if index == here else (get_stream(index), get_stream(here))
    set_stream(stream)
    return before


def _restore_streams(before: tuple[torch.Stream, ...]) -> None:
    for stream in before:
        set_stream(stream)


class StreamScope(Scope):
    """A scope in which a stream and its device are the current ones."""

    __slots__ = ()
    _change = staticmethod(_exchange_stream)
    _back = staticmethod(_restore_streams)
