"""After which op a rehearsed process has taken memory of its GPUs, which is where what it needs is decided.

The driver counts how often memory was taken, and which allocation went beyond a GPU's memory: a rehearsal goes on then.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

_observers: list[Callable[[str], None]] = []
_driver: Any = None  # once it is observed, as the count is the driver's
_count = ctypes.c_uint64()
_seen = 0


def observe(observer: Callable[[str], None]) -> None:
    """Call a function with the name of each op that takes memory of a GPU, or runs when memory was taken without an op."""
    global _count, _driver
    _driver = ctypes.CDLL("libcuda.so.1")
    _count = ctypes.c_uint64.in_dll(_driver, "accelerator_simulation_growths")
    _observers.append(observer)


def watched(name: str, override: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel override that is observed."""

    def run(*args: Any, **kwargs: Any) -> Any:
        global _seen
        result = override(*args, **kwargs)
        count = _count.value
        if count != _seen:
            _seen = count
            op = _outermost_op(sys._getframe(), name)
            for observer in _observers:
                observer(op)
        return result

    return run


def _outermost_op(frame: FrameType, name: str) -> str:
    """Return the op that the program called: ops call others, which take the memory."""
    code, caller = frame.f_code, frame.f_back
    while caller is not None:
        if caller.f_code is code:
            name = str(caller.f_locals["name"])
        caller = caller.f_back
    return name


def excess(device: int) -> tuple[int, int] | None:
    """Return the bytes of the first allocation beyond a device's memory, and those that were free; None without one."""
    requested, free = ctypes.c_uint64(), ctypes.c_uint64()
    is_exceeded = _driver.accelerator_simulation_excess(device, ctypes.byref(requested), ctypes.byref(free))
    return (requested.value, free.value) if is_exceeded else None
