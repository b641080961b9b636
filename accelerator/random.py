"""Random numbers of the accelerator: seeds, states, generators. Calling this module gives ``torch.random``.

What is set before the accelerator is initialized waits for it, in order, and initializes nothing. Importing this module binds
it as ``accelerator.random`` in place of a function of that name, which is why it can be called like one.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import torch

from . import discovery
from ._machine.device_argument import Device
from ._torch import generators, lazy_calls, state, tracing
from ._torch.bindings import get_index
from ._torch.tracing import traced_as

__all__ = [
    "default_generator",
    "fork_rng",
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]


@traced_as(tracing.manual_seed)
def manual_seed(seed: int) -> None:
    """Seed the current device's generator.

    Args:
        seed: the seed, from -2**63 to 2**64 - 1.

    Raises:
        ValueError: if the seed is out of range; with older torches a RuntimeError, as their generators raise it.

    Before initialization it waits for it, also in a forked child that can never have it; mirrors ``torch.cuda.manual_seed``.
    When the CPU stands in, seeds the CPU's generator alone.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.manual_seed(42)
    """
    value = _checked_seed(seed)
    device_type = state.current(allow_bad_fork=True).device_type
    if device_type == "cpu":
        torch.default_generator.manual_seed(value)
        return

    def seed_current() -> None:
        generators.default_generator(device_type, get_index()).manual_seed(value)

    lazy_calls.run_seed(seed_current, every_device=False)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices.

    Args:
        seed: the seed, from -2**63 to 2**64 - 1.

    Raises:
        ValueError: if the seed is out of range; with older torches a RuntimeError, as their generators raise it.

    Before initialization it waits for it, also in a forked child that can never have it; mirrors
    ``torch.cuda.manual_seed_all``. When the CPU stands in, seeds the CPU's generator; otherwise leaves that alone.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.manual_seed_all(42)
    """
    value = _checked_seed(seed)
    device_type = state.current(allow_bad_fork=True).device_type
    if device_type == "cpu":
        torch.default_generator.manual_seed(value)
        return

    def seed_every() -> None:
        for generator in _generators(device_type):
            generator.manual_seed(value)

    lazy_calls.run_seed(seed_every, every_device=True)


@traced_as(tracing.seed)
def seed() -> None:
    """Seed the current device's generator with a number that is different each time.

    Before initialization it waits for it; mirrors ``torch.cuda.seed``. When the CPU stands in, seeds the CPU's generator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.seed()
    """
    device_type = state.current(allow_bad_fork=True).device_type
    if device_type == "cpu":
        torch.default_generator.seed()
        return

    def seed_current() -> None:
        generators.default_generator(device_type, get_index()).seed()

    lazy_calls.run_seed(seed_current, every_device=False)


@traced_as(tracing.seed_all)
def seed_all() -> None:
    """Seed the generators of all devices with one number that is different each time.

    Before initialization it waits for it; mirrors ``torch.cuda.seed_all``. When the CPU stands in, seeds the CPU's generator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.seed_all()
    """
    device_type = state.current(allow_bad_fork=True).device_type
    if device_type == "cpu":
        torch.default_generator.seed()
        return

    def seed_every() -> None:
        first, *others = _generators(device_type)
        number = first.seed()
        for generator in others:
            generator.manual_seed(number)

    lazy_calls.run_seed(seed_every, every_device=True)


def initial_seed(device: Device = None, /) -> int:
    """Return the seed that a device's generator was last seeded with.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        The seed; of the CPU's generator when the CPU stands in. Mirrors ``torch.accelerator.random.initial_seed``.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> acc.manual_seed_all(42)
        >>> acc.initial_seed()
        42
    """
    return default_generator(device).initial_seed()


def get_rng_state(device: Device = None, /) -> torch.Tensor:
    """Return the state of a device's generator.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        A new tensor of bytes on the CPU; the state of the CPU's generator when the CPU stands in. Mirrors
        ``torch.accelerator.random.get_rng_state``.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> state = acc.get_rng_state()
        >>> acc.set_rng_state(state)
    """
    return default_generator(device).get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of the generators of all devices.

    Returns:
        One tensor of bytes a device, by index; the state of the CPU's generator alone when the CPU stands in. Mirrors
        ``torch.accelerator.random.get_rng_state_all``.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> len(acc.get_rng_state_all()) == max(1, acc.device_count())
        True
    """
    device_type = state.initialize().device_type
    return [generator.get_state() for generator in _generators(device_type)]


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    """Set the state of a device's generator.

    Args:
        new_state: a state, as ``get_rng_state`` returns it.
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all, or the state no tensor of bytes.
        RuntimeError: for a string that names no device, for a state of another kind of generator, and in a child forked from a
            process that had initialized the accelerator.

    Before initialization it waits for it, with a copy of the state; mirrors ``torch.cuda.set_rng_state``. When the CPU stands
    in, sets the state of the CPU's generator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> state = acc.get_rng_state()
        >>> acc.set_rng_state(state, 0)
    """
    _set_state(_checked_state(new_state), state.current(device).requested_index)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the states of the generators of all devices.

    Args:
        new_states: states by device index, as ``get_rng_state_all`` returns them; devices after the last one keep theirs.

    Raises:
        ValueError: if there are more states than devices; nothing is changed then.
        TypeError: if one is no tensor of bytes; nothing is changed then.
        RuntimeError: for a state of another kind of generator.

    Before initialization they wait for it; mirrors ``torch.cuda.set_rng_state_all``.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> states = acc.get_rng_state_all()
        >>> acc.set_rng_state_all(states)
    """
    states = [_checked_state(each) for each in new_states]
    device_type = state.current().device_type
    count = _count(device_type)
    if len(states) > count:
        raise ValueError(f"{len(states)} states are more than there are devices: {count} of {device_type}")
    for index, each in enumerate(states):
        _set_state(each, index)


def fork_rng(devices: Iterable[Any] | None = None) -> AbstractContextManager[None]:
    """Return a context manager that at its end restores the states of the generators.

    Args:
        devices: the devices whose generators to restore besides the CPU's: indices, "cuda:1", ``torch.device``; None for all.

    Returns:
        The context manager. If the accelerator is initialized inside, the state is restored that it would have had at the
        beginning; seeds set inside that still wait for it at the end are forgotten. Like ``torch.random.fork_rng``, which
        would initialize all devices.

    Raises:
        ValueError: if an index is out of range or a device is of another type.
        TypeError: if one is no device at all.
        RuntimeError: for a string that names no device, and in a child forked from a process that had initialized the
            accelerator, where ``devices=[]`` still works.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.manual_seed_all(1)
        >>> with acc.fork_rng():
        ...     acc.manual_seed_all(2)
        >>> acc.initial_seed()
        1
    """
    if devices is None:
        device_type = state.current().device_type
        indices = range(0 if device_type == "cpu" else discovery.device_count())
        return _forked([(device_type, index) for index in indices])
    runtimes = [state.current(device) for device in devices]
    return _forked([(runtime.device_type, runtime.device_index) for runtime in runtimes if runtime.device_type != "cpu"])


def default_generator(device: Device = None) -> torch.Generator:
    """Return the generator that random functions on a device use.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        The generator, as in ``torch.cuda.default_generators``; the CPU's when the CPU stands in.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> acc.default_generator().device == acc.default_generator(0).device
        True
    """
    runtime = state.initialize(device)
    return generators.default_generator(runtime.device_type, runtime.device_index)


def _count(device_type: str) -> int:
    return 1 if device_type == "cpu" else discovery.device_count()


def _generators(device_type: str) -> list[torch.Generator]:
    return [generators.default_generator(device_type, index) for index in range(_count(device_type))]


def _checked_seed(seed: int) -> int:
    # A seed that no generator takes is to fail here and not at the initialization.
    try:
        number = int(seed)
        torch.Generator().manual_seed(number)
    except OverflowError:
        raise ValueError(f"A seed is from -2**63 to 2**64 - 1, not {seed!r}") from None
    return number


def _checked_state(new_state: Any) -> torch.Tensor:
    if not isinstance(new_state, torch.Tensor) or new_state.dtype is not torch.uint8 or new_state.device.type != "cpu":
        problem = getattr(new_state, "dtype", None) or type(new_state).__name__
        raise TypeError(f"RNG state must be a torch.ByteTensor, not {problem}")
    return new_state


def _set_state(new_state: torch.Tensor, index: int | None) -> None:
    runtime = state.current()
    if runtime.device_type == "cpu":
        torch.default_generator.set_state(new_state)
        return
    if not runtime.is_initialized:
        new_state = new_state.clone(memory_format=torch.contiguous_format)

    def set_state() -> None:
        device_index = get_index() if index is None else index
        generators.default_generator(runtime.device_type, device_index).set_state(new_state)

    lazy_calls.run(set_state)


@contextmanager
def _forked(devices: list[tuple[str, int]]) -> Generator[None, None, None]:
    cpu_state = torch.default_generator.get_state()
    states = lazy_calls.States(devices)
    if devices:
        lazy_calls.run(states)
    try:
        yield
    finally:
        torch.default_generator.set_state(cpu_state)
        if devices:
            lazy_calls.forget_since(states)
            states.restore()


class _Room(ModuleType):
    def __call__(self) -> ModuleType:
        """Return the module ``torch.random``, as DeepSpeed's ``random()`` does."""
        return torch.random


sys.modules[__name__].__class__ = _Room
