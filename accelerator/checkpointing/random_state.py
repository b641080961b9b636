"""Reading and writing the random states of generators."""

from __future__ import annotations

import torch

from .._machine import process
from .._torch import generators

# A ModuleGenerator calls the functions of the accelerator's module, for an accelerator without generator objects.
Generator = torch.Generator | generators.ModuleGenerator

# A generator's state: a tensor, or its seed and offset if those are the whole state and cheaper to read.
State = torch.Tensor | tuple[int, int]


class Accelerator:
    """torch's accelerator, initialized in this process, with the default generators of its devices."""

    __slots__ = ("_generators", "device_type")

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._generators: dict[int, Generator] = {}

    def default_generator(self, index: int) -> Generator:
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


def read_state(generator: Generator) -> State:
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


def write_state(generator: Generator, state: State) -> None:
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
