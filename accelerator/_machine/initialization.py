"""Why torch could not initialize the accelerator in this process. torch itself does not remember it.

Every first use of an accelerator, also in C++, calls the function ``_lazy_init`` of torch's module for it. Until that has
succeeded, it is replaced by a function that calls it and records its exception.
"""

from __future__ import annotations

import sys

from . import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_failure: str | None = None
_watched: Any = None
_listeners: list[Callable[[], None]] = []


def failure() -> str | None:
    """Why the initialization failed, as one sentence; None if it did not fail since the last ``forget``."""
    return _failure


def record(error: Exception) -> None:
    """Record a failed initialization; not in a bad fork, where the fork is the reason."""
    global _failure
    if not process.is_in_bad_fork():
        # torch's message continues with advice, or with the traceback of a queued call.
        cause = str(error).strip().partition("\n")[0].rstrip(".")
        _failure = f"torch could not initialize the accelerator in this process: {cause}; refresh() allows another attempt"
        _notify()


def forget() -> None:
    """Forget the failure."""
    global _failure
    if _failure is not None:
        _failure = None
        _notify()


def on_change(function: Callable[[], None]) -> Callable[[], None]:
    """Call a function when a failure is recorded or forgotten; usable as a decorator."""
    _listeners.append(function)
    return function


def _notify() -> None:
    for listener in _listeners:
        listener()


class _Watcher:
    """Finds no module. Each import calls it, so that it sees torch's module for the accelerator soon after its import."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        if process.is_torch_imported():
            watch()


def watch() -> None:
    """Replace ``_lazy_init`` of the accelerator's module, once. A plug-in that is imported later may bring another module."""
    global _watched
    module = process.torch_device_module()
    initialize = getattr(module, "_lazy_init", None)
    if initialize is None or module is _watched:
        return
    _watched = module

    def _lazy_init() -> None:
        try:
            initialize()
        except Exception as error:
            record(error)
            raise
        forget()
        # Calls that were queued run before it is initialized, and call this function too.
        if process.is_initialized():
            module._lazy_init = initialize

    module._lazy_init = _lazy_init


sys.meta_path.insert(0, _Watcher)
if process.is_torch_imported():
    watch()
process.reset_after_fork(forget)
