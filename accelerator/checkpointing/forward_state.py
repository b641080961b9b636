"""The state that a function depends on besides its arguments: random numbers, autocast, default device and torch's switches.

It is captured when the forward starts, reproduced for the recomputation, and always undone. The devices are those of the
arguments and torch's own accelerator, regardless of ``ACCELERATOR_BACKEND``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch

from .._machine import process
from .._torch import generators
from .._torch.bindings import get_index
from . import bindings
from .rng_tracker import AnyGenerator, State, read_state, tracker, write_state

# For each device type: enabled, dtype; and whether casts are cached.
_Autocast = tuple[tuple[tuple[str, bool, torch.dtype | None], ...], bool]


def _autocast_state(device_types: tuple[str, ...]) -> _Autocast:
    states = tuple((each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in device_types)
    return states, torch.is_autocast_cache_enabled()


class Accelerator:
    """torch's accelerator, initialized in this process, with the default generators of its devices."""

    __slots__ = ("_generators", "device_type")

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._generators: dict[int, AnyGenerator] = {}

    def default_generator(self, index: int) -> AnyGenerator:
        """Return the default generator of a device."""
        if index not in self._generators:
            self._generators[index] = generators.find_generator(self.device_type, index)
        return self._generators[index]


# Cached once it is initialized, because every checkpoint needs it.
_accelerator: Accelerator | None = None


def initialized_accelerator() -> Accelerator | None:
    """Return torch's accelerator if it is initialized in this process, else None. Initializes nothing."""
    global _accelerator
    if _accelerator is None and process.is_initialized():
        _accelerator = Accelerator(process.torch_accelerator().type)
    return _accelerator


@process.reset_after_fork
def _reset_after_fork() -> None:
    global _accelerator
    _accelerator = None


class ForwardState:
    """The state that one forward started with."""

    __slots__ = (
        "_accelerator",
        "_autocast",
        "_cpu_state",
        "_defaults",
        "_device_states",
        "_devices",
        "_snapshot",
    )

    def __init__(self, preserve_rng_state: bool, devices: set[torch.device]) -> None:
        """
        Args:
            preserve_rng_state: whether the recomputation draws the same random numbers.
            devices: the devices of the arguments, without the CPU.
        """
        self._devices = devices
        accelerator = self._accelerator = initialized_accelerator()
        self._autocast = _autocast_state(self._autocast_types()) if bindings.any_autocast() else None
        self._defaults = bindings.defaults()
        # None without preserve_rng_state.
        self._cpu_state: torch.Tensor | None = None
        self._device_states: list[tuple[AnyGenerator, State]] = []
        self._snapshot = None
        if preserve_rng_state:
            self._cpu_state = torch.default_generator.get_state()
            self._snapshot = tracker.snapshot()
            if accelerator is not None:
                indices = {each.index for each in devices if each.type == accelerator.device_type}
                indices.add(get_index())
                for index in indices:
                    generator = accelerator.default_generator(index)
                    self._device_states.append((generator, read_state(generator)))

    def _autocast_types(self) -> tuple[str, ...]:
        """The device types whose autocast state counts."""
        types = {each.type for each in self._devices if torch.amp.is_autocast_available(each.type)}
        if self._accelerator is not None:
            types.add(self._accelerator.device_type)
        return tuple(sorted({"cpu", *types}))

    def check_initialization(self) -> None:
        """Raise a RuntimeError if the forward initialized the accelerator, whose first random state is unknown."""
        if self._accelerator is None and self._cpu_state is not None and initialized_accelerator() is not None:
            raise RuntimeError(
                "the accelerator was initialized inside of a checkpoint, so that its random numbers cannot be drawn again; "
                "initialize it before, or configure(preserve_rng_state=False)"
            )

    def reproduce(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: AbstractContextManager[Any] | None,
    ) -> None:
        """Call a function in this state, and restore the caller's state afterwards."""
        same_defaults = self._defaults == bindings.defaults()
        if not same_defaults or context is not None or self._autocast is not None or bindings.any_autocast():
            function = partial(self._call, function, context)
        if self._cpu_state is None:
            function(*args, **kwargs)
            return
        undo = None if self._snapshot is None else tracker.rewind(self._snapshot)
        try:
            current_cpu_state = torch.default_generator.get_state()
            current = [(generator, read_state(generator)) for generator, _ in self._device_states]
            try:
                torch.default_generator.set_state(self._cpu_state)
                for generator, state in self._device_states:
                    write_state(generator, state)
                function(*args, **kwargs)
            finally:
                torch.default_generator.set_state(current_cpu_state)
                for generator, state in current:
                    write_state(generator, state)
        finally:
            if self._snapshot is not None and undo is not None:
                tracker.restore(self._snapshot, undo)

    def _call(
        self, function: Callable[..., Any], context: AbstractContextManager[Any] | None, /, *args: Any, **kwargs: Any
    ) -> None:
        """Call a function with the forward's autocast and defaults, and inside of a context."""
        now = bindings.defaults()
        with ExitStack() as stack:
            if now[1:] != self._defaults[1:]:
                stack.callback(_set_switches, now)
                _set_switches(self._defaults)
            if self._autocast is not None or bindings.any_autocast():
                self._enter_autocast(stack)
            if context is not None:
                stack.enter_context(context)
            if now[0] != self._defaults[0]:
                stack.enter_context(self._defaults[0] or torch.device("cpu"))
            function(*args, **kwargs)

    def _enter_autocast(self, stack: ExitStack) -> None:
        types = self._autocast_types()
        states, cached = self._autocast or (tuple((each, False, None) for each in types), True)
        if (states, cached) != _autocast_state(types):
            for device_type, enabled, dtype in states:
                stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cached))


def _set_switches(defaults: bindings.Defaults) -> None:
    """Set all defaults except the device, which a context sets."""
    _, dtype, deterministic, only_warns = defaults
    torch.use_deterministic_algorithms(deterministic, warn_only=only_warns)
    torch.set_default_dtype(dtype)
