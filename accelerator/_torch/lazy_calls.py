"""Calls that wait for the accelerator to be initialized, in the order in which they were made.

torch runs what waits in two groups, the seeds last, so that a state set after a seed would be seeded over. Here the seeds that
wait are put in their place before anything else is queued behind them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from . import generators, state

# The room whose calls set random states, by whatever name this package was vendored.
_RANDOM = f"{__name__.rpartition('._torch.')[0]}.random"


class States:
    """The states of some devices' generators, taken when this is called, which may be at the initialization.

    While it waits it marks a place: what was random before it is not to be forgotten.
    """

    def __init__(self, devices: list[tuple[str, int]]) -> None:
        self._devices = devices
        self._states: list[torch.Tensor] = []

    def __call__(self) -> None:
        self._states = [generators.default_generator(*device).get_state() for device in self._devices]

    def restore(self) -> None:
        """Give the generators the states that were taken."""
        # None were taken if the initialization failed before it came to that.
        for device, rng_state in zip(self._devices, self._states, strict=False):
            generators.default_generator(*device).set_state(rng_state)


def run(call: Callable[[], object]) -> None:
    """Run a call now if the accelerator is up, else when it is, after everything that waits by then."""
    _run_or(lambda module: _append(module, call), call)


def run_seed(call: Callable[[], object], *, every_device: bool) -> None:
    """As ``run`` for a call that seeds, of which only the latest is kept waiting."""

    def keep(module: Any) -> None:
        tracker = getattr(module, "_lazy_seed_tracker", None)
        if tracker is None:
            _append(module, call)
        elif every_device:
            tracker.queue_seed_all(call, [])
        else:
            tracker.queue_seed(call, [])

    _run_or(keep, call)


def forget_since(mark: States) -> None:
    """Forget a mark that still waits, and what was to be done to random states after it."""
    runtime = state.current(allow_bad_fork=True)
    module = runtime.device_module
    if _is_up() or not hasattr(module, "_queued_calls"):
        return
    with _lock(module):
        calls = module._queued_calls
        places = [place for place, (call, _) in enumerate(calls) if call is mark]
        if places and not _is_up():
            _settle(module)
            del calls[places[0]]
            _drop_random(calls, places[0], module)


def _run_or(keep: Callable[[Any], None], call: Callable[[], object]) -> None:
    runtime = state.current(allow_bad_fork=True)
    module = runtime.device_module
    # While torch runs what waits it counts as not initialized, but this thread can use the accelerator already.
    if not _is_up() and not hasattr(getattr(module, "_tls", None), "is_initializing"):
        with _lock(module):
            if not _is_up() and hasattr(module, "_queued_calls"):
                keep(module)
                return
    call()


def _is_up() -> bool:
    # A child that cannot use the accelerator can still let things wait for it, as torch does.
    return state.current(allow_bad_fork=True).is_initialized


def _append(module: Any, call: Callable[[], object]) -> None:
    _settle(module)
    module._queued_calls.append((call, []))


def _settle(module: Any) -> None:
    """Put the seeds that wait in their place behind all that was queued before them."""
    tracker = getattr(module, "_lazy_seed_tracker", None)
    if tracker is None:
        return
    calls = module._queued_calls
    if tracker.manual_seed_all_cb is not None:
        marks = [place for place, (call, _) in enumerate(calls) if isinstance(call, States)]
        _drop_random(calls, marks[-1] + 1 if marks else 0, module)
    calls.extend(entry for entry in tracker.get_calls() if entry)
    tracker.__init__()


def _drop_random(calls: list[tuple[Any, Any]], start: int, module: Any) -> None:
    rooms = (__name__, _RANDOM, f"{module.__name__}.random")
    calls[start:] = [entry for entry in calls[start:] if getattr(entry[0], "__module__", None) not in rooms]


def _lock(module: Any) -> AbstractContextManager[Any]:
    lock: AbstractContextManager[Any] = getattr(module, "_initialization_lock", None) or nullcontext()
    return lock
