"""First imports that a fork can wait for.

CPython locks a module while it is imported. A child forked meanwhile would inherit the lock of a thread that is gone, and its
own import of that module would never return. So a fork waits until the current import is done, for a moment at most. A query
imports one module at a time. Before each it takes the lock ``_gate``, which a waiting fork holds.
"""

from __future__ import annotations

import sys
from _thread import RLock  # importing threading takes longer than all of this module
from time import monotonic

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

try:
    import _signal  # type: ignore[import-not-found]  # importing signal takes longer

    # All but those that the interpreter's own faults raise.
    _deferred = _signal.valid_signals() - {
        getattr(_signal, name) for name in ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT")
    }

    def _block(signals: Any) -> Any:
        return _signal.pthread_sigmask(_signal.SIG_BLOCK, signals)

    def _restore(mask: Any) -> None:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, mask)

except AttributeError:  # Windows

    def _block(signals: Any) -> Any:
        return None

    def _restore(mask: Any) -> None:
        return

    _deferred = None

_FORK_WAITS_S = 0.1

_importing, _gate = RLock(), RLock()

# What the first query imports, each module after those that it imports itself, so that no step takes long.
_FIRST = (
    *("collections", "functools", "contextlib", "enum", "re", "typing", "json", "threading", "importlib.util"),
    *("._machine.limits", "._machine.driver_child", "._machine.visibility", "._machine.discovery_result", "._machine.nvml"),
    *("._machine.visibility_variables", "._machine.child_process", "._machine.driver_probe", "._machine.torch_child"),
    *("._machine.torch_probe", "._machine.nvml_telemetry", "._machine.torch_build", "._machine.cuda", "._machine.amdsmi"),
    *("._machine.rocm", "._machine.vendors", "._machine.torch_runtime", "._machine.discovery_cache"),
    *("._machine.host_memory", "._machine.description", "._machine.device_argument", "._machine.usability"),
    *("._machine.dynamo", ".discovery"),
)


class InterruptedImportError(RuntimeError):
    """A signal handler interrupted the first import of a module, so a query that the handler makes has no answer."""

    def __init__(self, name: str) -> None:
        super().__init__(f"a signal handler interrupted the first import of {name}; query once before you set it")


def import_public(name: str, package: str) -> Any:
    """Import a module of public functions; only for modules that do not import torch, which takes longer than a fork waits."""
    return import_modules(*_FIRST, f".{name}", package=package)


def import_modules(*names: str, package: str | None = None) -> Any:
    """Import modules one after the other and return the last; a fork waits for one of them at most.

    Raises:
        ImportError: if a module is missing.
        RuntimeError: in a signal handler that interrupted the first import of a module, and while the interpreter shuts down.
    """
    module: Any = None
    for name in names:
        with _gate:
            pass
        with _importing:
            # The handler of a signal that interrupts an import would meet a part of the module.
            mask = _block(_deferred)
            try:
                from importlib import import_module

                module = import_module(name, package)
            except ImportError as error:
                if not sys.meta_path:
                    raise RuntimeError(f"{name} cannot be imported while the interpreter shuts down; use it before") from error
                if error.name == "importlib":
                    raise InterruptedImportError(error.name) from error
                raise
            finally:
                _restore(mask)
        # With several threads the signal interrupts the import nevertheless, and the handler cannot wait for its end.
        if getattr(module.__spec__, "_initializing", False):
            raise InterruptedImportError(name)
    return module


def before_fork() -> None:
    """Acquire ``_gate``, so that no import starts, and wait for the current import."""
    until = monotonic() + _FORK_WAITS_S
    _gate.acquire(timeout=_FORK_WAITS_S)
    _importing.acquire(timeout=max(until - monotonic(), 0))


def after_fork_in_parent() -> None:
    """Release the locks."""
    _release(_importing)
    _release(_gate)


def reset_after_fork() -> None:
    """Replace the locks in a forked child."""
    global _importing, _gate
    _importing, _gate = RLock(), RLock()


def _release(lock: Any) -> None:
    try:
        lock.release()
    except RuntimeError:  # this thread did not acquire it in time
        pass
