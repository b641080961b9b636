"""The one kind of context manager that makes something current for a while: a device, or a stream and its device."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from . import runtime
from .runtime import exchange_index, get_index, get_stream, restore_index, set_stream, up


class Scope:
    """Changes what is current on entering, and back on leaving; may be entered while it is entered, by any thread.

    The accelerator is initialized by entering, not before.

    Args:
        change: what to call on entering; it returns what was current before.
        to: what to call it with.
        back: what to call on leaving, with what was current before.
    """

    __slots__ = ("_back", "_before", "_change", "_to")

    def __init__(self, change: Callable[[Any], Any], to: Any, back: Callable[[Any], object]) -> None:
        self._change = change
        self._to = to
        self._back = back
        # By thread, as each has a current device and streams of its own: what to go back to, and what to after that.
        self._before: dict[int, tuple[Any, Any]] = {}

    def __enter__(self) -> None:
        if not up:
            runtime.initialize()
        thread = get_ident()
        try:
            self._before[thread] = self._change(self._to), self._before.get(thread)
        except (RuntimeError, TypeError) as error:
            raise runtime.explain(self._to, error) from None

    def __exit__(self, *exc_info: object) -> None:
        thread = get_ident()
        before, outer = self._before.pop(thread)
        if outer is not None:
            self._before[thread] = outer
        self._back(before)


def of_device(number: int) -> Scope:
    """A scope in which a device is the current one."""
    return Scope(exchange_index, number, restore_index)


def of_stream(stream: torch.Stream) -> Scope:
    """A scope in which a stream and its device are the current ones."""
    return Scope(_exchange_stream, stream, _restore_streams)


def _exchange_stream(stream: torch.Stream) -> tuple[torch.Stream, ...]:
    index, here = stream.device_index, get_index()
    # Restoring a stream makes its device the current one, so that of the present device is the last to restore.
    before = (get_stream(here),) if index == here else (get_stream(index), get_stream(here))
    set_stream(stream)
    return before


def _restore_streams(before: tuple[torch.Stream, ...]) -> None:
    for stream in before:
        set_stream(stream)
