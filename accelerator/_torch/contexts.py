"""The one kind of context manager that makes something current for a while: a device, or a stream and its device."""

from __future__ import annotations

import threading
from typing import Any

import torch

from . import state
from .bindings import exchange_index, get_index, get_stream, restore_index, set_stream
from .state import initialized


class Scope:
    """Changes what is current on entering, and back on leaving; may be entered while it is entered, by any thread.

    Subclasses say how: ``_change`` makes the given device or stream current and returns what was, ``_back`` takes that.
    """

    __slots__ = ("_again", "_before", "_fresh", "_to")

    _change: Any
    _back: Any

    def __init__(self, to: Any) -> None:
        self._to = to
        # As most are entered once, what to go back to is kept here that time, and with the thread every other time. Who is
        # first is who could delete this: one step, in which no other thread comes between.
        self._fresh = True
        self._again = False

    def __enter__(self) -> None:
        try:
            del self._fresh
        except AttributeError:
            self._enter_again()
        else:
            self._before = self._change(self._to)

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._back(self._leave_again() if self._again else self._before)

    def _enter_again(self) -> None:
        self._again = True
        try:
            _mine.entered.append((self, self._change(self._to)))
        except (RuntimeError, TypeError) as error:
            raise state.choose_error(self._to, error) from None

    def _leave_again(self) -> Any:
        """What was current before this thread entered last; what it entered first, it leaves last."""
        for place in reversed(range(len(_mine.entered))):
            if _mine.entered[place][0] is self:
                return _mine.entered.pop(place)[1]
        return self._before


class _Mine(threading.local):
    """The scopes that this thread has entered which had been entered before, with what was current before each."""

    def __init__(self) -> None:
        self.entered: list[tuple[Scope, Any]] = []


_mine = _Mine()


class DeviceContext(Scope):
    """A scope in which a device is the current one, given by its index; the accelerator is up."""

    __slots__ = ()
    _change = exchange_index

    # As the base class does it, with the calls spelled out: looking them up on the class costs a twentieth of the whole.
    def __enter__(self) -> None:
        try:
            del self._fresh
            self._before = exchange_index(self._to)
        except AttributeError:
            self._enter_again()
        except (RuntimeError, TypeError) as error:
            raise state.choose_error(self._to, error) from None

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        restore_index(self._leave_again() if self._again else self._before)


class FirstDeviceContext(DeviceContext):
    """As ``DeviceContext`` where the accelerator was not initialized when this was made: it is initialized by entering."""

    __slots__ = ()

    def __enter__(self) -> None:
        state.initialize(self._to)
        super().__enter__()


def _exchange_stream(stream: torch.Stream) -> tuple[torch.Stream, ...]:
    if not initialized:
        state.initialize()
    index, here = stream.device_index, get_index()
    # Restoring a stream makes its device the current one, so that of the present device is the last to restore.
    before = (get_stream(here),) if index == here else (get_stream(index), get_stream(here))
    set_stream(stream)
    return before


def _restore_streams(before: tuple[torch.Stream, ...]) -> None:
    for stream in before:
        set_stream(stream)


class StreamContext(Scope):
    """A scope in which a stream and its device are the current ones."""

    __slots__ = ()
    _change = staticmethod(_exchange_stream)
    _back = staticmethod(_restore_streams)
