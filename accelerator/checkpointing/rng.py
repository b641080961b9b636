"""Random numbers under model parallelism: named random streams beside the default one."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .._torch import generators
from .._torch.state import initialize

__all__ = ["CudaRNGStatesTracker", "get_cuda_rng_tracker"]

MODEL_PARALLEL = "model-parallel-rng"

# A state is kept as a tensor where a default generator can only be overwritten (the CPU), and as a generator of its own
# where the default one can be made to share its state: that costs no copies and is legal while a graph is captured.
_State = torch.Tensor | torch.Generator


def device_generator() -> torch.Generator:
    """The default generator of the device in use: the accelerator's current device, or the CPU where it stands in."""
    runtime = initialize()
    return generators.default_generator(runtime.device_type, runtime.device_index)


# What is kept of a generator's state: a tensor, or its seed and offset where these are all of it and cheaper to read.
Value = torch.Tensor | tuple[int, int]


def read_state(generator: torch.Generator, kind: str | None = None) -> Value:
    """The state of a generator, whose device type the caller may know.

    Raises:
        RuntimeError: if this torch cannot tell it while a graph is being captured.
    """
    try:
        if (kind or generator.device.type) == "cuda":
            return generator.initial_seed(), generator.get_offset()
    except RuntimeError:
        # A graph is being captured, during which some releases tell the whole state all the same.
        pass
    try:
        return generator.get_state()
    except RuntimeError as error:
        raise RuntimeError(
            f"The random state of {generator.device} cannot be read ({error}). While a graph is being captured, this torch "
            "needs configure(preserve_rng_state=False)."
        ) from error


def write_state(generator: torch.Generator, value: Value) -> None:
    """Put back what ``read_state`` returned."""
    if not isinstance(value, tuple):
        generator.set_state(value)
        return
    seed, offset = value
    if seed != generator.initial_seed():
        generator.manual_seed(seed)
    generator.set_offset(offset)


class _Fork(NamedTuple):
    """A fork that is open: the stream it draws from, the default generator, and what that one held outside."""

    name: str
    default: torch.Generator
    outside: _State


class _OpenForks(threading.local):
    """The forks that are open in this thread, outermost first."""

    forks: list[_Fork]

    def __init__(self) -> None:
        self.forks = []


class Snapshot(NamedTuple):
    """A tracker at the start of a checkpoint: its streams and the names of the forks that were open."""

    states: dict[str, _State]
    values: dict[str, Value]
    names: tuple[str, ...]


class _Undo(NamedTuple):
    states: dict[str, _State]
    values: dict[str, Value]
    forks: list[_Fork]
    default: torch.Generator
    shared: torch.Generator | None


class CudaRNGStatesTracker:
    """Named random streams of the accelerator, or of the CPU where it stands in.

    Inside ``fork(name)`` everything random on the device draws from the stream ``name``; outside, the default generator
    goes on as if nothing had happened. Ranks that share a default seed but not the seed of a named stream so agree outside
    of ``fork`` and differ inside.

    Forks nest: an inner fork of a name that is open already continues its stream. One thread at a time may have a
    device's forks open.
    """

    def __init__(self) -> None:
        self._states: dict[str, _State] = {}
        self._seeds: set[int] = set()
        self._open = _OpenForks()

    @property
    def has_streams(self) -> bool:
        """Whether anything was added."""
        return bool(self._states)

    def reset(self) -> None:
        """Forget every stream and every seed.

        Raises:
            RuntimeError: inside ``fork()``; nothing is forgotten then.
        """
        self._raise_inside_fork("reset()")
        self._states = {}
        self._seeds = set()

    def add(self, name: str, seed: int) -> None:
        """Add a stream.

        Args:
            name: how ``fork`` will call it.
            seed: its seed, not used by another stream.

        Raises:
            ValueError: if the name or the seed is taken; nothing is recorded then.
            TypeError: if the name is no string or the seed no integer.
        """
        _check_name(name)
        check_seed(seed)
        if seed in self._seeds:
            raise ValueError(f"seed {seed} already exists: two streams with one seed would repeat each other.")
        if name in self._states:
            raise ValueError(f"cuda rng state {name} already exists: reset() first, or choose another name.")
        default = device_generator()
        generator = torch.Generator(default.device)
        generator.manual_seed(seed)
        self._states = {**self._states, name: generator if _shares_state(generator) else generator.get_state()}
        self._seeds = self._seeds | {seed}

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return a copy of the state of every stream, by name.

        Returns:
            Byte tensors on the CPU, which ``set_states`` takes; for a fork that is open, where its stream stands now.
        """
        self._write_back()
        return {name: _as_tensor(state) for name, state in self._states.items()}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace all streams by those of ``get_states``. The seeds that ``add`` has seen stay taken.

        Args:
            states: from names to byte tensors on the CPU.

        Raises:
            TypeError: if it is something else; nothing is replaced then.
            RuntimeError: inside ``fork()``, or if a state does not fit the device's generator; nothing is replaced then.
        """
        self._raise_inside_fork("set_states()")
        given: Any = states
        if not isinstance(given, dict):
            raise TypeError(f"set_states() takes what get_states() returned, a dict of names and states, not {given!r}.")
        device = device_generator().device
        replacement: dict[str, _State] = {}
        for name, state in states.items():
            _check_name(name)
            _check_state(name, state)
            generator = torch.Generator(device)
            generator.set_state(state)
            replacement[name] = generator if _shares_state(generator) else state.clone()
        self._states = replacement

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Generator[None, None, None]:
        """Draw from a stream of this tracker inside the ``with`` block.

        Args:
            name: the stream.

        Raises:
            ValueError: if no stream has that name.
        """
        self._enter(name)
        try:
            yield
        finally:
            self._leave()

    def register_graph(self, graph: Any) -> None:
        """Let a graph that will be captured draw from the streams of this tracker.

        Needed before the capture on releases of torch that do not find out by themselves; harmless on the others.

        Args:
            graph: a ``torch.cuda.CUDAGraph``, or whatever has its ``register_generator_state``.

        Raises:
            TypeError: if it has no such method.
            RuntimeError: where the device's generators cannot take part in a graph, as the CPU's cannot.
        """
        for name, state in self._states.items():
            if not isinstance(state, torch.Generator):
                raise RuntimeError(f"The stream {name} belongs to the CPU, which captures no graphs.")
        if not callable(getattr(graph, "register_generator_state", None)):
            raise TypeError(f"register_graph() takes a graph with register_generator_state(), not {type(graph).__name__}.")
        for state in self._states.values():
            graph.register_generator_state(state)

    def _enter(self, name: str) -> None:
        if name not in self._states:
            known = ", ".join(sorted(self._states)) or "none"
            raise ValueError(f"cuda rng state {name} is not added; there are: {known}.")
        default = device_generator()
        state = self._states[name]
        outside: _State
        if isinstance(state, torch.Generator):
            if state.device != default.device:
                state = self._moved(name, state, default.device)
            outside = default.graphsafe_get_state()
            default.graphsafe_set_state(state)
        else:
            live = self._write_back()
            outside = default.get_state() if live is None else live
            # The stream may just have been written back: look again.
            state = self._states[name]
            assert isinstance(state, torch.Tensor)
            default.set_state(state)
        self._open.forks.append(_Fork(name, default, outside))

    def _leave(self) -> None:
        self._write_back()
        fork = self._open.forks.pop()
        if isinstance(fork.outside, torch.Generator):
            fork.default.graphsafe_set_state(fork.outside)
            return
        outside: _State = fork.outside
        if self._open.forks:
            outside = self._states.get(self._open.forks[-1].name, outside)
        assert isinstance(outside, torch.Tensor)
        fork.default.set_state(outside)

    def _write_back(self) -> torch.Tensor | None:
        """Record where the innermost open stream stands, if it is one that the default generator holds a copy of."""
        if not self._open.forks:
            return None
        fork = self._open.forks[-1]
        if isinstance(fork.outside, torch.Generator):
            return None
        current = fork.default.get_state()
        if fork.name in self._states:
            # A new dictionary, so that snapshots of the old one stay what they were.
            self._states = {**self._states, fork.name: current}
        return current

    def _moved(self, name: str, state: torch.Generator, device: torch.device) -> torch.Generator:
        """The stream on another device, which has become the current one since the stream was added."""
        generator = torch.Generator(device)
        generator.set_state(state.get_state())
        self._states = {**self._states, name: generator}
        return generator

    def _raise_inside_fork(self, what: str) -> None:
        if self._open.forks:
            raise RuntimeError(f"{what} inside fork({self._open.forks[-1].name!r}): leave the fork first.")

    def snapshot(self) -> Snapshot | None:
        """What a recomputation needs to draw the same numbers; None when there is no stream."""
        if not self._states:
            return None
        states = self._states
        values = {name: read_state(state) for name, state in states.items() if isinstance(state, torch.Generator)}
        return Snapshot(states, values, tuple(fork.name for fork in self._open.forks))

    def rewind(self, snapshot: Snapshot) -> _Undo:
        """Go back to a snapshot, before the default generators do; ``restore`` undoes it."""
        self._write_back()
        default = device_generator()
        forks = self._open.forks
        shared: torch.Generator | None = None
        outside: _State
        if snapshot.values:
            # The default generator may share its state with a fork that is open, in this thread or in the one that called
            # backward: it gets a state of its own, or shares that of the fork that was open then.
            shared = default.graphsafe_get_state()
            inner = snapshot.states[snapshot.names[-1]] if snapshot.names else torch.Generator(default.device)
            assert isinstance(inner, torch.Generator)
            default.graphsafe_set_state(inner)
            outside = shared
        else:
            outside = default.get_state() if snapshot.names else torch.empty(0)
        values: dict[str, Value] = {}
        for name, value in snapshot.values.items():
            state = snapshot.states[name]
            assert isinstance(state, torch.Generator)
            values[name] = read_state(state)
            write_state(state, value)
        undo = _Undo(self._states, values, forks, default, shared)
        self._states = snapshot.states
        self._open.forks = [_Fork(name, default, outside) for name in snapshot.names]
        return undo

    def restore(self, snapshot: Snapshot, undo: _Undo) -> None:
        """Undo ``rewind``, after the default generators were restored."""
        for name, value in undo.values.items():
            state = snapshot.states[name]
            assert isinstance(state, torch.Generator)
            write_state(state, value)
        if undo.shared is not None:
            undo.default.graphsafe_set_state(undo.shared)
        self._states = undo.states
        self._open.forks = undo.forks


def _shares_state(generator: torch.Generator) -> bool:
    """Whether a default generator can be made to share this one's state."""
    if generator.device.type == "cpu" or not hasattr(generator, "graphsafe_get_state"):
        return False
    try:
        generator.graphsafe_get_state()
    except RuntimeError:
        return False
    return True


def _as_tensor(state: _State) -> torch.Tensor:
    return state.get_state() if isinstance(state, torch.Generator) else state.clone()


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"The name of a random stream is a string, not {name!r}.")


def _check_state(name: str, state: Any) -> None:
    if not isinstance(state, torch.Tensor):
        raise TypeError(f"The state of stream {name!r} is {type(state).__name__}, not a byte tensor.")


def check_seed(seed: Any) -> None:
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"A seed is an integer, not {seed!r}.")


tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return the tracker whose streams checkpoints save and restore.

    Returns:
        The one tracker of this process.

    Raises:
        Nothing.

    Fork: safe, initializes nothing.

    Example:
        >>> from accelerator import checkpointing
        >>> checkpointing.get_cuda_rng_tracker() is checkpointing.get_cuda_rng_tracker()
        True
    """
    return tracker
