"""Reading and writing the random states of generators."""

from __future__ import annotations

from typing import Any

import torch

from .._machine import process
from .._torch import generators

# A generator's state: a tensor, or its seed and offset if those are the whole state and cheaper to read.
State = torch.Tensor | tuple[int, int]


class Accelerator:
    """torch's accelerator, initialized in this process, with the default generators of its devices."""

    __slots__ = ("_generators", "device_type")

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self._generators: dict[int, Any] = {}

    def default_generator(self, index: int) -> Any:
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


def read_state(generator: torch.Generator) -> State:
    """Return the state of a generator.

    Raises:
        RuntimeError: if this torch cannot read it while a graph is being captured.
    """
    try:
        if generator.device.type == "cuda":
            return generator.initial_seed(), generator.get_offset()
    except RuntimeError:
        # A graph is being captured. Some releases of torch can still return the whole state.
        pass
    try:
        return generator.get_state()
    except RuntimeError as error:
        raise RuntimeError(
            f"the random state of {generator.device} cannot be read ({error}); while a graph is being captured, this torch "
            "needs configure(preserve_rng_state=False)"
        ) from error


def write_state(generator: torch.Generator, state: State) -> None:
    """Write back what ``read_state`` returned."""
    if not isinstance(state, tuple):
        generator.set_state(state)
        return
    seed, offset = state
    if seed != generator.initial_seed():
        generator.manual_seed(seed)
    generator.set_offset(offset)
