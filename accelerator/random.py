"""The accelerator's random numbers: seeds, states and generators.

Before initialization, seeds and states are queued in order. ``accelerator.random`` is this module, and calling it returns
``torch.random``, as DeepSpeed's ``random()`` does.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from . import discovery
from ._machine.device_argument import Device
from ._torch import bindings, generators, lazy_calls, state, tracing
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
        ValueError: if the seed is out of range. Older releases of torch raise a RuntimeError.

    Before initialization the seed is queued, in a bad fork too. Seeds the CPU's generator only under the CPU fallback. Mirrors
    ``torch.cuda.manual_seed``.

    Example:
        >>> acc.manual_seed(42)
    """
    value = _checked_seed(seed)
    device_type = state.current(allow_bad_fork=True).device_type
    if device_type == "cpu":
        torch.default_generator.manual_seed(value)
        return

    def seed_current() -> None:
        generators.find_generator(device_type, _current_index()).manual_seed(value)

    lazy_calls.run_seed(seed_current, every_device=False)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices.

    Args:
        seed: the seed, from -2**63 to 2**64 - 1.

    Raises:
        ValueError: if the seed is out of range. Older releases of torch raise a RuntimeError.

    Before initialization the seed is queued, in a bad fork too. Seeds the CPU's generator only under the CPU fallback. Mirrors
    ``torch.cuda.manual_seed_all``.

    Example:
        >>> acc.manual_seed_all(42)
    """
    value = _checked_seed(seed)
    device_type = state.current(allow_bad_fork=True).device_type
    if device_type == "cpu":
        torch.default_generator.manual_seed(value)
        return

    def seed_every() -> None:
        generators.seed_all(device_type, _count(device_type), value)

    lazy_calls.run_seed(seed_every, every_device=True)


@traced_as(tracing.seed)
def seed() -> None:
    """Seed the current device's generator with a random number.

    Before initialization the call is queued. Seeds the CPU's generator under the CPU fallback. Mirrors ``torch.cuda.seed``.

    Example:
        >>> acc.seed()
    """
    device_type = state.current(allow_bad_fork=True).device_type
    if device_type == "cpu":
        torch.default_generator.seed()
        return

    def seed_current() -> None:
        generators.find_generator(device_type, _current_index()).seed()

    lazy_calls.run_seed(seed_current, every_device=False)


@traced_as(tracing.seed_all)
def seed_all() -> None:
    """Seed the generators of all devices with the same random number.

    Before initialization the call is queued. Seeds the CPU's generator under the CPU fallback. Mirrors
    ``torch.cuda.seed_all``.

    Example:
        >>> acc.seed_all()
    """
    device_type = state.current(allow_bad_fork=True).device_type
    if device_type == "cpu":
        torch.default_generator.seed()
        return

    def seed_every() -> None:
        generators.seed_all(device_type, _count(device_type), torch.Generator().seed())

    lazy_calls.run_seed(seed_every, every_device=True)


def initial_seed(device: Device = None, /) -> int:
    """Return the seed that a device's generator was last seeded with.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        The seed; that of the CPU's generator under the CPU fallback. Mirrors ``torch.accelerator.random.initial_seed``.

    Initializes: the accelerator.

    Example:
        >>> acc.manual_seed_all(42)
        >>> acc.initial_seed()
        42
    """
    return _generator(device).initial_seed()


def get_rng_state(device: Device = None, /) -> torch.Tensor:
    """Return the state of a device's generator.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        A new uint8 tensor on the CPU; the state of the CPU's generator under the CPU fallback. Mirrors
        ``torch.accelerator.random.get_rng_state``.

    Initializes: the accelerator.

    Example:
        >>> state = acc.get_rng_state()
        >>> first = torch.rand(2, device=acc.device())
        >>> acc.set_rng_state(state)
        >>> torch.equal(torch.rand(2, device=acc.device()), first)
        True
    """
    return _generator(device).get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the states of the generators of all devices.

    Returns:
        One uint8 tensor for each device, by index; only the CPU's state under the CPU fallback. Mirrors
        ``torch.accelerator.random.get_rng_state_all``.

    Initializes: the accelerator.

    Example:
        >>> [state.dtype for state in acc.get_rng_state_all()]
        [torch.uint8, torch.uint8]
    """
    device_type = state.initialize().device_type
    return [generator.get_state() for generator in _generators(device_type)]


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    """Set the state of a device's generator.

    Args:
        new_state: a state from ``get_rng_state``.
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Raises:
        TypeError: if the state is not a uint8 tensor.
        RuntimeError: if the state does not fit the generator; in a bad fork.

    Before initialization a copy of the state is queued. Sets the state of the CPU's generator under the CPU fallback. Mirrors
    ``torch.cuda.set_rng_state``.

    Example:
        >>> state = acc.get_rng_state()
        >>> acc.set_rng_state(state, 0)
    """
    _set_state(_checked_state(new_state), state.current(device).requested_index)


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Set the states of the generators of all devices.

    Args:
        new_states: states by device index, from ``get_rng_state_all``. Devices beyond the last one keep their states.

    Raises:
        ValueError: if there are more states than devices. Nothing changes then.
        TypeError: if a state is not a uint8 tensor. Nothing changes then.
        RuntimeError: if a state does not fit the generator; in a bad fork.

    Before initialization the states are queued. Mirrors ``torch.cuda.set_rng_state_all``.

    Example:
        >>> states = acc.get_rng_state_all()
        >>> acc.set_rng_state_all(states)
    """
    states = [_checked_state(each) for each in new_states]
    device_type = state.current().device_type
    count = _count(device_type)
    if len(states) > count:
        raise ValueError(f"set_rng_state_all() got {len(states)} states for {count} {device_type} devices")
    for index, each in enumerate(states):
        _set_state(each, index)


def fork_rng(devices: Iterable[Any] | None = None) -> AbstractContextManager[None]:
    """Return a context manager that restores the states of the generators on exit.

    Args:
        devices: the devices whose states to restore besides the CPU's: indices, "cuda:1", ``torch.device``; None for all.

    Returns:
        The context manager. If the block initializes the accelerator, its generators get their states from before the block.
        Seeds that are still queued at the end of the block are dropped. Mirrors ``torch.random.fork_rng``, which initializes
        all devices.

    Raises:
        TypeError: if ``devices`` is one device, not a list.
        RuntimeError: in a bad fork, unless ``devices`` is empty.

    Example:
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
    if isinstance(devices, (str, torch.device)):
        raise TypeError(f"fork_rng() takes a list of devices, such as [{str(devices)!r}], not one device")
    runtimes = [state.current(device) for device in devices]
    return _forked([(runtime.device_type, runtime.device_index) for runtime in runtimes if runtime.device_type != "cpu"])


def default_generator(device: Device = None) -> torch.Generator:
    """Return the default generator of a device.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        The generator, the same object as in ``torch.cuda.default_generators``; the CPU's under the CPU fallback.

    Raises:
        RuntimeError: if torch has no generator of the accelerator; in a bad fork.

    Initializes: the accelerator.

    Example:
        >>> acc.default_generator(1).device
        device(type='cuda', index=1)
    """
    runtime = state.initialize(device)
    return generators.default_generator(runtime.device_type, runtime.device_index)


def _generator(device: Device) -> torch.Generator | generators.ModuleGenerator:
    runtime = state.initialize(device)
    return generators.find_generator(runtime.device_type, runtime.device_index)


def _current_index() -> int:
    """Return the index of the current device, for a call that ``lazy_calls`` runs."""
    runtime = state.current(allow_bad_fork=True)
    # Without a queue the call runs at once, and reading the index would initialize the accelerator.
    return get_index() if runtime.is_initialized or bindings.queue_allows_device(runtime.device_module) else 0


def _count(device_type: str) -> int:
    return 1 if device_type == "cpu" else discovery.device_count()


def _generators(device_type: str) -> list[torch.Generator | generators.ModuleGenerator]:
    return [generators.find_generator(device_type, index) for index in range(_count(device_type))]


def _checked_seed(seed: int) -> int:
    # A wrong seed must fail now, not when the queue runs.
    try:
        value = int(seed)
        torch.Generator().manual_seed(value)
    except OverflowError:
        raise ValueError(f"A seed must be from -2**63 to 2**64 - 1, not {seed!r}") from None
    return value


def _checked_state(new_state: Any) -> torch.Tensor:
    if isinstance(new_state, torch.Tensor) and new_state.device.type != "cpu":
        raise TypeError(f"RNG state must be a torch.ByteTensor on the CPU, not one on {new_state.device}: pass its .cpu()")
    if not isinstance(new_state, torch.Tensor) or new_state.dtype is not torch.uint8:
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
        device_index = _current_index() if index is None else index
        generators.find_generator(runtime.device_type, device_index).set_state(new_state)

    lazy_calls.run(lazy_calls.RandomCall(set_state))


@contextmanager
def _forked(devices: list[tuple[str, int]]) -> Generator[None, None, None]:
    cpu_state = torch.default_generator.get_state()
    states = lazy_calls.SavedStates(devices)
    if devices:
        lazy_calls.run(states)
    try:
        yield
    finally:
        torch.default_generator.set_state(cpu_state)
        if devices:
            lazy_calls.drop_since(states)
            states.restore()


class CallableModule(ModuleType):
    """The type of this module."""

    if TYPE_CHECKING:
        default_generator = staticmethod(default_generator)
        fork_rng = staticmethod(fork_rng)
        get_rng_state = staticmethod(get_rng_state)
        get_rng_state_all = staticmethod(get_rng_state_all)
        initial_seed = staticmethod(initial_seed)
        manual_seed = staticmethod(manual_seed)
        manual_seed_all = staticmethod(manual_seed_all)
        seed = staticmethod(seed)
        seed_all = staticmethod(seed_all)
        set_rng_state = staticmethod(set_rng_state)
        set_rng_state_all = staticmethod(set_rng_state_all)

    def __call__(self) -> ModuleType:
        """Return ``torch.random``."""
        return torch.random


sys.modules[__name__].__class__ = CallableModule
