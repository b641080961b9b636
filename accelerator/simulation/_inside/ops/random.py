"""Random numbers: each op draws from a CPU generator that is seeded from the CUDA generator's seed and offset.

As on a GPU, a CUDA generator has a seed, and an offset that each op advances. A restored state gives the same
numbers again, and equal seeds give equal numbers in every process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from . import bindings
from .library_texts import has_text

_OFFSET_STEP = 4  # offsets of CUDA generators are multiples of it
_MASK = 2**64 - 1
_default_generator_lock = threading.RLock()


def default_generator(index: int) -> torch.Generator:
    return torch.cuda.default_generators[index]


# Generators that were registered with a graph. Kept for the process, since nothing unregisters them.
_registered: list[torch.Generator] = []


def track_registrations() -> None:
    """Remember the generators that are registered with graphs."""
    graph: Any = bindings.CudaGraph
    register = graph.register_generator_state

    def register_generator_state(self: Any, generator: torch.Generator) -> None:
        register(self, generator)
        _registered.append(generator)

    graph.register_generator_state = register_generator_state


def raise_if_not_registered(generator: torch.Generator) -> None:
    """Raise CUDA's error for a capture that draws from a generator that no graph knows, if this torch has that error.

    A newer torch registers a generator with the capture that draws from it first.
    """

    def pointer(generator: Any) -> int:
        return generator._cdata  # the dispatcher makes a new Python object for each call

    is_known = pointer(generator) in map(pointer, (*torch.cuda.default_generators, *_registered))
    if not is_known and has_text("libtorch_cuda.so", "a CUDA generator not in capture mode"):
        raise RuntimeError("Attempt to increase offset for a CUDA generator not in capture mode.")


def _next_seed(generator: torch.Generator) -> int:
    """Advance a CUDA generator, and hash its seed and offset to 32 bits (SplitMix64), as many as a CPU generator uses."""
    offset = generator.get_offset()
    generator.set_offset(offset + _OFFSET_STEP)
    bits = (generator.initial_seed() + 0x9E3779B97F4A7C15 * (offset // _OFFSET_STEP + 1)) & _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return (bits ^ (bits >> 31)) & 0xFFFFFFFF


def draw_with_generator(
    generator: torch.Generator, compute: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], names: list[str]
) -> Any:
    """Call a function that takes a generator with the next random numbers of a CUDA generator."""
    cpu_generator = torch.Generator()
    cpu_generator.manual_seed(_next_seed(generator))
    position = names.index("generator") if "generator" in names else len(args)
    if position < len(args):
        args = [*args[:position], cpu_generator, *args[position + 1 :]]
    else:
        kwargs = {**kwargs, "generator": cpu_generator}
    return compute(*args, **kwargs)


def draw(generator: torch.Generator, compute: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call an op with the CPU's default generator seeded from a CUDA generator, and restore the CPU's afterwards."""
    seed = _next_seed(generator)
    with _default_generator_lock:
        default = torch.default_generator
        state = default.get_state()
        try:
            default.manual_seed(seed)
            return compute(*args, **kwargs)
        finally:
            default.set_state(state)
