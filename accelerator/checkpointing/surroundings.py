"""What a function's result depends on beside its arguments: random numbers, autocast, the default device.

Taken when a checkpoint's forward starts, put in force while it is recomputed, and undone whatever happens there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from .._torch import runtime
from . import bindings
from .rng import read_state, tracker, write_state

_cpu_generator: torch.Generator = torch.default_generator
_read_cpu = _cpu_generator.get_state
_write_cpu = _cpu_generator.set_state
_autocast_on = torch.is_autocast_enabled
_function_modes = bindings.function_modes

# For each device type: enabled, dtype; and whether casts are cached.
_Autocast = tuple[tuple[tuple[str, bool, torch.dtype], ...], bool]
_States = tuple[tuple[torch.Generator, torch.Tensor | int], ...]

_looked = False


def accelerator_is_up() -> bool:
    """Whether the accelerator has random state to keep; never initializes it."""
    global _looked
    if runtime.up:
        return True
    if _looked and runtime.kind == "cpu":
        return False
    if not _looked:
        _looked = True
        try:
            runtime.look()
        except RuntimeError:
            # A forked child that cannot use the accelerator may still checkpoint on the CPU.
            return False
    return runtime.look(poisoned=True).up


def default_generators(devices: set[torch.device] | None) -> list[torch.Generator]:
    """The default generators of these devices and of the current one, of an accelerator that is up."""
    numbers = {runtime.get_index()}
    for device in devices or ():
        if device.type == runtime.kind:
            numbers.add(device.index)
    return [runtime.generator(number) for number in sorted(numbers)]


def _autocast_state(kinds: tuple[str, ...]) -> _Autocast | None:
    """The state of autocast on these device types, None where it is off on all of them."""
    for kind in kinds:
        if _autocast_on(kind):
            states = tuple((each, _autocast_on(each), torch.get_autocast_dtype(each)) for each in kinds)
            return states, torch.is_autocast_cache_enabled()
    return None


_CPU_ONLY = ("cpu",)


class Surroundings:
    """The surroundings of one forward."""

    __slots__ = ("_autocast", "_cpu", "_device", "_generators", "_kinds", "_random", "_snapshot", "up")

    def __init__(self, random: bool, devices: set[torch.device] | None) -> None:
        up = self.up = bool(runtime.up) or accelerator_is_up()
        if up:
            self._kinds: tuple[str, ...] = ("cpu", runtime.kind)
            self._autocast = _autocast_state(self._kinds)
        else:
            self._kinds = _CPU_ONLY
            self._autocast = _autocast_state(_CPU_ONLY) if _autocast_on("cpu") else None
        self._device = torch.get_default_device() if _function_modes() else None
        self._random = random
        if random:
            self._cpu = _read_cpu()
            self._snapshot = tracker.snapshot() if tracker.has_streams else None
            self._generators: _States = ()
            if up:
                self._generators = tuple((each, read_state(each)) for each in default_generators(devices))

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call a function in these surroundings; afterwards those of the caller are back, also after an exception."""
        if not self._random:
            self.call(function, args, kwargs)
            return
        snapshot = self._snapshot
        undo = None if snapshot is None else tracker.rewind(snapshot)
        try:
            cpu = _read_cpu()
            generators = self._generators
            others = [(each, read_state(each)) for each, _ in generators] if generators else ()
            try:
                _write_cpu(self._cpu)
                for generator, state in generators:
                    write_state(generator, state)
                self.call(function, args, kwargs)
            finally:
                _write_cpu(cpu)
                for generator, state in others:
                    write_state(generator, state)
        finally:
            if snapshot is not None and undo is not None:
                tracker.restore(snapshot, undo)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._device is None and self._autocast == _autocast_state(self._kinds):
            function(*args, **kwargs)
            return
        with ExitStack() as stack:
            if self._autocast is None:
                for kind in self._kinds:
                    stack.enter_context(torch.autocast(kind, enabled=False))
            else:
                states, cached = self._autocast
                for kind, enabled, dtype in states:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
            if self._device is not None:
                stack.enter_context(self._device)
            function(*args, **kwargs)
