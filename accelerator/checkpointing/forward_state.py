"""What a function's result depends on beside its arguments: random numbers, autocast, the default device, torch's switches.

Taken when a checkpoint's forward starts, put in force while it is recomputed, and undone whatever happens there. Devices are
those of the arguments and torch's own accelerator, whatever the environment says of the one to use.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from .._machine import process
from .._torch import runtime
from . import bindings
from .rng import read_state, tracker, write_state

_cpu_generator: torch.Generator = torch.default_generator
_read_cpu = _cpu_generator.get_state
_write_cpu = _cpu_generator.set_state
_any_autocast = bindings.any_autocast
_function_modes = bindings.function_modes
_default_device = bindings.default_device
_switches = bindings.switches

# For each device type: enabled, dtype; and whether casts are cached.
_Autocast = tuple[tuple[tuple[str, bool, torch.dtype | None], ...], bool]

# The type of torch's accelerator, once it is initialized in this process, and what tells whether it is.
_up: list[str] = []
_asked: list[tuple[str, Callable[[], bool]]] = []

# The default generators of its devices, by number.
_generators: dict[int, torch.Generator] = {}


def accelerator() -> str | None:
    """The type of torch's accelerator if it is initialized, so that it has random state to keep; initializes nothing."""
    if _up:
        return _up[0]
    if not _asked:
        found = process.torch_accelerator()
        if found is None:
            return None
        module = getattr(torch, found.type)
        # Backends without lazy initialization are up as soon as they are there.
        _asked.append((found.type, getattr(module, "is_initialized", module.is_available)))
    kind, is_up = _asked[0]
    if not is_up():
        return None
    _up.append(kind)
    return kind


@process.reset_after_fork
def _reset_after_fork() -> None:
    _up.clear()
    _generators.clear()


def _generator(kind: str, number: int) -> torch.Generator:
    """The default generator of a device of torch's accelerator."""
    found = _generators.get(number)
    if found is None:
        generators = getattr(getattr(torch, kind), "default_generators", ())
        if number < len(generators):
            found = generators[number]
        elif bindings.default_generator is not None:
            found = bindings.default_generator(number)
        else:
            raise RuntimeError(f"torch {torch.__version__} knows no generator of {kind}:{number}")
        _generators[number] = found
    return found


def _autocast_state(kinds: tuple[str, ...]) -> _Autocast:
    states = tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    return states, torch.is_autocast_cache_enabled()


class ForwardState:
    """The surroundings of one forward."""

    __slots__ = ("_autocast", "_cpu", "_device", "_devices", "_generators", "_random", "_snapshot", "_switches", "up")

    def __init__(self, random: bool, devices: set[torch.device] | None) -> None:
        """
        Args:
            random: whether random numbers are to be the same again.
            devices: of the arguments, beside the CPU.
        """
        kind = self.up = _up[0] if _up else accelerator()
        self._devices = devices
        self._autocast = _autocast_state(self._kinds()) if _any_autocast() else None
        self._device = _default_device() if _function_modes() else None
        self._switches = _switches()
        self._random = random
        if random:
            self._cpu = _read_cpu()
            self._snapshot = tracker.snapshot() if tracker.has_streams else None
            self._generators: tuple[tuple[torch.Generator, Any], ...] = ()
            if kind is not None:
                current = runtime.get_index()
                generator = _generator(kind, current)
                self._generators = ((generator, read_state(generator, kind)),)
                for device in devices or ():
                    if device.index != current and device.type == kind:
                        generator = _generator(kind, device.index)
                        self._generators += ((generator, read_state(generator, kind)),)

    def _kinds(self) -> tuple[str, ...]:
        """The device types that autocast knows among those concerned."""
        found = {"cpu"} if self.up is None else {"cpu", self.up}
        for each in self._devices or ():
            if torch.amp.is_autocast_available(each.type):
                found.add(each.type)
        return tuple(sorted(found))

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: AbstractContextManager[Any] | None,
    ) -> None:
        """Call a function in these surroundings; afterwards those of the caller are back, also after an exception."""
        if not self._random:
            self._call(function, args, kwargs, context)
            return
        snapshot = self._snapshot
        undo = None if snapshot is None else tracker.rewind(snapshot)
        try:
            cpu = _read_cpu()
            generators = self._generators
            others = [(each, read_state(each, self.up)) for each, _ in generators] if generators else []
            try:
                _write_cpu(self._cpu)
                for (generator, state), (_, now) in zip(generators, others, strict=True):
                    # Pairs are quicker compared than written; tensors are not.
                    if type(state) is not tuple or state != now:
                        write_state(generator, state)
                self._call(function, args, kwargs, context)
            finally:
                _write_cpu(cpu)
                for generator, state in others:
                    write_state(generator, state)
        finally:
            if snapshot is not None and undo is not None:
                tracker.restore(snapshot, undo)

    def _call(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: AbstractContextManager[Any] | None,
    ) -> None:
        casts = self._autocast is not None or _any_autocast()
        device = _default_device() if _function_modes() else None
        switches = _switches()
        if not casts and device == self._device and switches == self._switches and context is None:
            function(*args, **kwargs)
            return
        with ExitStack() as stack:
            if switches != self._switches:
                stack.callback(_switch, *switches)
                _switch(*self._switches)
            if casts:
                kinds = self._kinds()
                states, cached = self._autocast or (tuple((kind, False, None) for kind in kinds), True)
                if (states, cached) != _autocast_state(kinds):
                    for kind, enabled, dtype in states:
                        stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
            if context is not None:
                stack.enter_context(context)
            if device != self._device:
                stack.enter_context(self._device or torch.device("cpu"))
            function(*args, **kwargs)


def _switch(deterministic: bool, only_warns: bool, dtype: torch.dtype) -> None:
    torch.use_deterministic_algorithms(deterministic, warn_only=only_warns)
    torch.set_default_dtype(dtype)
