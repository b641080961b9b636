"""Calls that are queued until the accelerator is initialized. They run in the order in which they were queued.

torch runs queued seeds after all other queued calls, so that a seed would override a state that was set after it. Therefore
queued seeds are moved to their place before anything else is queued.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import bindings, generators, state


class RandomCall:
    """A call that sets generator states. A later seed for all devices makes it needless."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def __call__(self) -> None:
        self._call()


class SavedStates(RandomCall):
    """The generator states of some devices, saved when the object is called.

    While the object is in the queue it also marks a position: a seed for all devices replaces only the seeds queued after it.
    """

    def __init__(self, devices: list[tuple[str, int]]) -> None:
        super().__init__(self._save)
        self._devices = devices
        self._states: list[torch.Tensor] = []

    def _save(self) -> None:
        self._states = [generators.find_generator(*device).get_state() for device in self._devices]

    def restore(self) -> None:
        """Set the generators to the saved states."""
        # No states were saved if the initialization failed earlier.
        for device, rng_state in zip(self._devices, self._states, strict=False):
            generators.find_generator(*device).set_state(rng_state)


def run(call: Callable[[], object], *, uses_device: bool = True) -> None:
    """Run a call now if the accelerator is initialized, else queue it.

    Args:
        call: the call.
        uses_device: whether the call uses the accelerator, which every queue of torch's own modules allows.
    """
    _run_or_queue(lambda module: _append(module, call), call, uses_device)


def run_seed(call: Callable[[], object], *, every_device: bool) -> None:
    """As ``run`` for a call that seeds. Only the latest one stays queued."""
    call = RandomCall(call)

    def queue(module: Any) -> None:
        tracker = bindings.seed_tracker(module)
        if tracker is None:
            _append(module, call)
        elif every_device:
            tracker.queue_seed_all(call, [])
        else:
            tracker.queue_seed(call, [])

    _run_or_queue(queue, call, True)


def drop_since(saved: SavedStates) -> None:
    """Remove a queued ``SavedStates`` and the random calls that were queued after it."""
    module = state.current(allow_bad_fork=True).device_module
    # A queued call holds the lock. Its own states were saved at once, not queued.
    if _is_initialized() or bindings.is_initializing(module):
        return
    with bindings.initialization_lock(module):
        calls = bindings.queued_calls(module) or []
        positions = [position for position, (call, _) in enumerate(calls) if call is saved]
        if positions and not _is_initialized():
            _append_seeds(module)
            del calls[positions[0]]
            _drop_random(calls, positions[0], module)


def _run_or_queue(queue: Callable[[Any], None], call: Callable[[], object], uses_device: bool) -> None:
    module = state.current(allow_bad_fork=True).device_module
    has_queue = bindings.queued_calls(module) is not None and (bindings.queue_allows_device(module) or not uses_device)
    # While torch runs the queue the accelerator is not marked as initialized, but this thread can use it.
    if not _is_initialized() and not bindings.is_initializing(module):
        with bindings.initialization_lock(module):
            if has_queue and not _is_initialized():
                queue(module)
                return
    call()


def _is_initialized() -> bool:
    # As torch does, a bad fork queues calls too.
    return state.current(allow_bad_fork=True).is_initialized


def _append(module: Any, call: Callable[[], object]) -> None:
    _append_seeds(module)
    calls = bindings.queued_calls(module)
    assert calls is not None  # checked before
    calls.append((call, []))


def _append_seeds(module: Any) -> None:
    """Move the seeds that torch keeps apart to the end of the queue."""
    tracker, calls = bindings.seed_tracker(module), bindings.queued_calls(module)
    if tracker is None or calls is None:
        return
    if tracker.manual_seed_all_cb is not None:
        saved = [position for position, (call, _) in enumerate(calls) if isinstance(call, SavedStates)]
        _drop_random(calls, saved[-1] + 1 if saved else 0, module)
    calls.extend(entry for entry in tracker.get_calls() if entry)
    bindings.clear_seed_tracker(module)


def _drop_random(calls: list[tuple[Any, Any]], start: int, module: Any) -> None:
    # torch's own random calls are functions inside of functions of this module.
    of_torch = f"{module.__name__}.random"
    calls[start:] = [
        (call, stack)
        for call, stack in calls[start:]
        if not isinstance(call, RandomCall) and getattr(call, "__module__", None) != of_torch
    ]
