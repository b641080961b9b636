"""The state that a function depends on besides its arguments: what it changes itself, random numbers, devices, modes, switches.

It is captured when the forward starts, reproduced for the recomputation, and always undone. The devices are those of the
arguments and torch's own accelerator, regardless of ``ACCELERATOR_BACKEND``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from .._machine import process
from .._torch import generators
from .._torch.bindings import get_index, restore_index
from . import bindings
from .changing_state import find_state
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


class _Contexts(threading.local):
    """How many contexts of ``context_fn`` are open in this thread."""

    open = 0


_contexts = _Contexts()


def enter_context(stack: ExitStack, context: AbstractContextManager[Any]) -> None:
    """Enter a context of ``context_fn``, or of torch's debug switch."""
    _contexts.open += 1
    stack.callback(_leave_context)
    stack.enter_context(context)


def _leave_context() -> None:
    _contexts.open -= 1


class ForwardState:
    """The state that one forward started with."""

    __slots__ = (
        "_accelerator",
        "_autocast",
        "_changing",
        "_cpu_state",
        "_device_index",
        "_device_states",
        "_devices",
        "_modes",
        "_snapshot",
        "_switches",
        "memory",
    )

    def __init__(
        self,
        preserve_rng_state: bool,
        devices: set[torch.device],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """
        Args:
            preserve_rng_state: whether the recomputation draws the same random numbers.
            devices: the devices of the arguments, without the CPU.
            function: the function.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        self._devices = devices
        accelerator = self._accelerator = initialized_accelerator()
        self._autocast = _autocast_state(self._autocast_types()) if bindings.any_autocast() else None
        switches = self._switches = bindings.switches(accelerator is not None)
        modes = bindings.modes() if switches.has_modes else bindings.NO_MODES
        # None leaves the modes as they are: those of ``context_fn`` are new for each run.
        self._modes = None if _contexts.open else modes
        self._device_index = None if accelerator is None else get_index()
        # The memory of the state that the function changes, None if it changes none.
        self.memory: set[int] | None = None
        changing = self._changing = find_state(function, args, kwargs)
        if changing is not None:
            # The modes do not see the copies.
            with _without_modes(modes):
                changing.copy()
            self.memory = changing.memory()
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
            if changing is not None and changing.generators:
                self._device_states += [(each, read_state(each)) for each in changing.generators]

    def forward_ended(self) -> None:
        """Release the state that the forward did not change.

        Raises:
            RuntimeError: if the function initialized the accelerator.
        """
        if self._changing is not None:
            with _without_modes(bindings.modes()):
                has_changed = self._changing.forward_ended()
            self.memory = self._changing.memory() if has_changed else None
            self._changing = self._changing if has_changed else None
        if self._accelerator is None and self._cpu_state is not None and process.is_initialized():
            raise RuntimeError(
                "the accelerator was initialized inside of a checkpoint, so that its random numbers cannot be drawn again; "
                "initialize it before, or configure(preserve_rng_state=False)"
            )

    def _autocast_types(self) -> tuple[str, ...]:
        """The device types whose autocast state counts."""
        types = {each.type for each in self._devices if torch.amp.is_autocast_available(each.type)}
        if self._accelerator is not None:
            types.add(self._accelerator.device_type)
        return tuple(sorted({"cpu", *types}))

    def reproduce(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context: AbstractContextManager[Any] | None,
        backward: Any,
    ) -> None:
        """Call a function in this state, and restore the caller's state afterwards. ``backward`` is the present run of it."""
        switches = self._switches
        if (
            bindings.switches_in(backward, switches.accelerated) is not switches
            or switches.has_modes
            or context is not None
            or self._changing is not None
            or self._autocast is not None
            or bindings.any_autocast()
        ):
            function = partial(self._call, function, context)
        # Creates no context on a device that the forward did not use.
        wanted = self._device_index
        previous = None if wanted is None else get_index()
        if previous != wanted:
            restore_index(wanted)
        undo = None
        try:
            if self._cpu_state is None:
                function(*args, **kwargs)
                return
            if self._snapshot is not None:
                undo = tracker.rewind(self._snapshot)
            current_cpu_state = torch.default_generator.get_state()
            current = [(each, read_state(each)) for each, _ in self._device_states] if self._device_states else ()
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
            if previous != wanted:
                restore_index(previous)

    def _call(
        self, function: Callable[..., Any], context: AbstractContextManager[Any] | None, /, *args: Any, **kwargs: Any
    ) -> None:
        """Call a function with the forward's changing state, modes, switches and autocast, and inside of a context."""
        accelerated, wanted = self._switches.accelerated, self._switches.values
        modes, switches = bindings.modes(), bindings.read_switches(accelerated)
        with ExitStack() as stack:
            if self._changing is not None:
                with _without_modes(modes):
                    restore = self._changing.rewind()
                stack.callback(_restore_without_modes, restore)
            if self._modes is not None and modes != self._modes:
                stack.callback(bindings.set_modes, modes)
                bindings.set_modes(self._modes)
            if switches != wanted:
                stack.callback(bindings.set_switches, accelerated, switches)
                bindings.set_switches(accelerated, wanted)
            if self._autocast is not None or bindings.any_autocast():
                self._enter_autocast(stack)
            if context is not None:
                enter_context(stack, context)
            function(*args, **kwargs)

    def _enter_autocast(self, stack: ExitStack) -> None:
        types = self._autocast_types()
        states, cached = self._autocast or (tuple((each, False, None) for each in types), True)
        if (states, cached) != _autocast_state(types):
            for device_type, enabled, dtype in states:
                stack.enter_context(torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cached))


@contextmanager
def _without_modes(modes: bindings.Modes) -> Generator[None, None, None]:
    """Run the block without the modes of this thread, which are ``modes``."""
    if modes == bindings.NO_MODES:
        yield
        return
    bindings.set_modes(bindings.NO_MODES)
    try:
        yield
    finally:
        bindings.set_modes(modes)


def clone_unseen(tensor: torch.Tensor) -> torch.Tensor:
    """Clone a tensor. Modes, among them those of selective checkpoints, do not see it."""
    with _without_modes(bindings.modes()):
        return tensor.clone()


def _restore_without_modes(restore: Callable[[], None]) -> None:
    with _without_modes(bindings.modes()):
        restore()
