"""Random numbers under model parallelism: named random streams besides the default one."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .._torch import generators
from ..random import default_generator

MODEL_PARALLEL = "model-parallel-rng"

# A ModuleGenerator calls the functions of the accelerator's module, for an accelerator without generator objects.
AnyGenerator = torch.Generator | generators.ModuleGenerator

# A generator's state: a tensor, or its seed and offset if those are the whole state and cheaper to read.
State = torch.Tensor | tuple[int, int]

# A stream is a generator if the default generator can share its state, which costs no copies and works while a graph is
# captured. Otherwise, as on the CPU, it is a tensor that is written into the default generator.
_Stream = torch.Tensor | torch.Generator


def read_state(generator: AnyGenerator) -> State:
    """Return the state of a generator.

    Raises:
        RuntimeError: if it cannot be read: by this torch while a graph is being captured, or from this accelerator at all.
    """
    try:
        if isinstance(generator, torch.Generator) and generator.device.type == "cuda":
            return generator.initial_seed(), generator.get_offset()
    except RuntimeError:
        # A graph is being captured. Some releases of torch can still return the whole state.
        pass
    try:
        return generator.get_state()
    except RuntimeError as error:
        raise RuntimeError(
            f"the random state of {generator.device} cannot be read ({error}); configure(preserve_rng_state=False) recomputes "
            "without it"
        ) from error


def write_state(generator: AnyGenerator, state: State) -> None:
    """Write back what ``read_state`` returned."""
    if isinstance(state, torch.Tensor):
        generator.set_state(state)
        return
    # Only the generators of CUDA have an offset.
    assert isinstance(generator, torch.Generator)
    seed, offset = state
    if seed != generator.initial_seed():
        generator.manual_seed(seed)
    generator.set_offset(offset)


class _Fork(NamedTuple):
    """An open fork: its stream, the default generator, and the state of that generator outside of the fork."""

    name: str
    default: torch.Generator
    outside: _Stream


class _OpenForks(threading.local):
    """The open forks of this thread, the outermost first."""

    forks: list[_Fork]

    def __init__(self) -> None:
        self.forks = []


class Snapshot(NamedTuple):
    """A tracker at the start of a checkpoint: its streams, their states, and the names of the open forks."""

    states: dict[str, _Stream]
    values: dict[str, State]
    names: tuple[str, ...]


class _Undo(NamedTuple):
    states: dict[str, _Stream]
    values: dict[str, State]
    forks: list[_Fork]
    default: torch.Generator
    shared: torch.Generator | None


class CudaRNGStatesTracker:
    """Named random streams of the accelerator, or of the CPU under the CPU fallback.

    Inside ``fork(name)`` random operations on the device draw from the stream ``name``. Outside, the default generator
    continues where it was. If ranks share the default seed but not the seed of a stream, they draw the same numbers outside
    of ``fork`` and different numbers inside.

    Forks nest: an inner fork of the same name continues the stream. Only one thread at a time may have open forks of a device.
    """

    def __init__(self) -> None:
        self._states: dict[str, _Stream] = {}
        self._seeds: set[int] = set()
        self._open = _OpenForks()

    @property
    def has_streams(self) -> bool:
        """Whether the tracker has any stream."""
        return bool(self._states)

    def reset(self) -> None:
        """Remove all streams and seeds.

        Raises:
            RuntimeError: inside ``fork()``; nothing is removed then.
        """
        self._raise_inside_fork("reset()")
        self._states = {}
        self._seeds = set()

    def add(self, name: str, seed: int) -> None:
        """Add a stream.

        Args:
            name: its name, for ``fork``.
            seed: its seed, which no other stream may have.

        Raises:
            ValueError: if the name or the seed is in use; nothing is added then.
            TypeError: if the name is not a string or the seed not an integer.

        Initializes: the accelerator.
        """
        _check_name(name)
        check_seed(seed)
        if seed in self._seeds:
            raise ValueError(f"seed {seed} already exists: two streams with one seed would draw the same numbers")
        if name in self._states:
            raise ValueError(f"cuda rng state {name} already exists: reset() first, or choose another name")
        default = default_generator()
        generator = torch.Generator(default.device)
        generator.manual_seed(seed)
        self._states = {**self._states, name: generator if _shares_state(generator) else generator.get_state()}
        self._seeds = self._seeds | {seed}

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return a copy of the state of every stream, by name.

        Returns:
            Byte tensors on the CPU, for ``set_states``. The stream of an open fork has its current state.
        """
        self._write_back()
        return {name: _as_tensor(state) for name, state in self._states.items()}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace all streams by those of ``get_states``. The seeds that ``add`` got stay in use.

        Args:
            states: a dict from names to byte tensors on the CPU.

        Raises:
            TypeError: for anything else; nothing is replaced then.
            RuntimeError: inside ``fork()``, or if a state does not fit the device's generator; nothing is replaced then.

        Initializes: the accelerator.
        """
        self._raise_inside_fork("set_states()")
        argument: Any = states
        if not isinstance(argument, dict):
            raise TypeError(f"set_states() takes the dict that get_states() returned, not {argument!r}")
        device = default_generator().device
        replacement: dict[str, _Stream] = {}
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
            name: the name of the stream.

        Raises:
            ValueError: if no stream has that name.

        Initializes: the accelerator.
        """
        self._enter(name)
        try:
            yield
        finally:
            self._leave()

    def register_graph(self, graph: Any) -> None:
        """Register the streams of this tracker with a graph, before its capture.

        Some releases of torch need this to draw from the streams in the graph. On others it does no harm.

        Args:
            graph: a ``torch.cuda.CUDAGraph``, or an object with its ``register_generator_state``.

        Raises:
            TypeError: if it has no such method.
            RuntimeError: if the generators of the device do not support graphs, as those of the CPU.
        """
        for name, state in self._states.items():
            if not isinstance(state, torch.Generator):
                raise RuntimeError(f"the stream {name} belongs to the CPU, which captures no graphs")
        if not callable(getattr(graph, "register_generator_state", None)):
            raise TypeError(f"register_graph() takes a graph with register_generator_state(), not {type(graph).__name__}")
        for state in self._states.values():
            graph.register_generator_state(state)

    def _enter(self, name: str) -> None:
        if name not in self._states:
            names = ", ".join(sorted(self._states)) or "none"
            raise ValueError(f"cuda rng state {name} is not added; the streams are: {names}")
        default = default_generator()
        state = self._states[name]
        outside: _Stream
        if isinstance(state, torch.Generator):
            if state.device != default.device:
                state = self._moved(name, state, default.device)
            outside = default.graphsafe_get_state()
            default.graphsafe_set_state(state)
        else:
            live = self._write_back()
            outside = default.get_state() if live is None else live
            # Writing back may have replaced the state.
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
        outside: _Stream = fork.outside
        if self._open.forks:
            outside = self._states.get(self._open.forks[-1].name, outside)
        assert isinstance(outside, torch.Tensor)
        fork.default.set_state(outside)

    def _write_back(self) -> torch.Tensor | None:
        """Store the state of the innermost open stream, and return it, if the default generator has a copy of it."""
        if not self._open.forks:
            return None
        fork = self._open.forks[-1]
        if isinstance(fork.outside, torch.Generator):
            return None
        current = fork.default.get_state()
        if fork.name in self._states:
            # A new dict, so that snapshots of the old one do not change.
            self._states = {**self._states, fork.name: current}
        return current

    def _moved(self, name: str, state: torch.Generator, device: torch.device) -> torch.Generator:
        """Move a stream to the current device, which has changed since the stream was added."""
        generator = torch.Generator(device)
        generator.set_state(state.get_state())
        self._states = {**self._states, name: generator}
        return generator

    def _raise_inside_fork(self, what: str) -> None:
        if self._open.forks:
            raise RuntimeError(f"{what} inside fork({self._open.forks[-1].name!r}): leave the fork first")

    def snapshot(self) -> Snapshot | None:
        """Return what a recomputation needs to draw the same numbers, None without streams."""
        if not self._states:
            return None
        states = self._states
        values = {name: read_state(state) for name, state in states.items() if isinstance(state, torch.Generator)}
        return Snapshot(states, values, tuple(fork.name for fork in self._open.forks))

    def rewind(self, snapshot: Snapshot) -> _Undo:
        """Go back to a snapshot. Call it before the default generators are rewound; ``restore`` undoes it."""
        self._write_back()
        default = default_generator()
        forks = self._open.forks
        shared: torch.Generator | None = None
        outside: _Stream
        if snapshot.values:
            # The default generator may share its state with an open fork, of this thread or of the one that called backward.
            # It gets a state of its own, or that of the fork that was open at the snapshot.
            shared = default.graphsafe_get_state()
            inner = snapshot.states[snapshot.names[-1]] if snapshot.names else torch.Generator(default.device)
            assert isinstance(inner, torch.Generator)
            default.graphsafe_set_state(inner)
            outside = shared
        else:
            outside = default.get_state() if snapshot.names else torch.empty(0)
        values: dict[str, State] = {}
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
        """Undo ``rewind``. Call it after the default generators are restored."""
        for name, value in undo.values.items():
            state = snapshot.states[name]
            assert isinstance(state, torch.Generator)
            write_state(state, value)
        if undo.shared is not None:
            undo.default.graphsafe_set_state(undo.shared)
        self._states = undo.states
        self._open.forks = undo.forks


def _shares_state(generator: torch.Generator) -> bool:
    """Whether a default generator can share the state of this one."""
    if generator.device.type == "cpu" or not hasattr(generator, "graphsafe_get_state"):
        return False
    try:
        generator.graphsafe_get_state()
    except RuntimeError:
        return False
    return True


def _as_tensor(state: _Stream) -> torch.Tensor:
    return state.get_state() if isinstance(state, torch.Generator) else state.clone()


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the name of a random stream must be a string, not {name!r}")


def _check_state(name: str, state: Any) -> None:
    if not isinstance(state, torch.Tensor):
        raise TypeError(f"the state of stream {name!r} is {type(state).__name__}, not a byte tensor")


def check_seed(seed: Any) -> None:
    """Raise a TypeError if a seed is not an integer."""
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"a seed must be an integer, not {seed!r}")


tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return the tracker whose streams checkpoints save and restore.

    Returns:
        The only tracker of this process.

    Example:
        >>> checkpointing.get_cuda_rng_tracker() is checkpointing.get_cuda_rng_tracker()
        True
    """
    return tracker
