"""Random numbers: a CPU generator for each op, made from the seed and offset of the CUDA generator.

The CUDA generator keeps what it keeps on a GPU, a seed and an offset that each op advances. So states that are saved and
restored repeat, and equal seeds give equal numbers, in whichever process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["default_generator", "draw", "draw_with_generator"]

_STEP = 4  # offsets of CUDA generators are multiples of it
_MASK = 2**64 - 1
_default_lock = threading.RLock()


def default_generator(index: int) -> torch.Generator:
    return torch.cuda.default_generators[index]


def _seed(generator: torch.Generator) -> int:
    """Take the next seed from a CUDA generator: its seed and offset, scattered over 32 bits, of which the CPU takes no more."""
    offset = generator.get_offset()
    generator.set_offset(offset + _STEP)
    number = (generator.initial_seed() + 0x9E3779B97F4A7C15 * (offset // _STEP + 1)) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return (number ^ (number >> 31)) & 0xFFFFFFFF


def draw_with_generator(
    generator: torch.Generator, compute: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], names: list[str]
) -> Any:
    """Compute with the next random numbers of a CUDA generator, by an op that takes a generator."""
    ours = torch.Generator()
    ours.manual_seed(_seed(generator))
    place = names.index("generator")
    if place < len(args):
        args = [*args[:place], ours, *args[place + 1 :]]
    else:
        kwargs = {**kwargs, "generator": ours}
    return compute(*args, **kwargs)


def draw(generator: torch.Generator, compute: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The same by an op that takes none, and draws from the CPU's default generator, which is left as it was."""
    seed = _seed(generator)
    with _default_lock:
        default = torch.default_generator
        before = default.get_state()
        try:
            default.manual_seed(seed)
            return compute(*args, **kwargs)
        finally:
            default.set_state(before)
