"""The generators that random functions use."""

from __future__ import annotations

import torch

from . import bindings


def default_generator(device_type: str, index: int) -> torch.Generator:
    """Return the default generator of an initialized device, or the CPU's.

    Raises:
        RuntimeError: if torch has no generator of the device.
    """
    if device_type == "cpu":
        return torch.default_generator
    generators = getattr(getattr(torch, device_type), "default_generators", ())
    if index < len(generators):
        generator: torch.Generator = generators[index]
        return generator
    if bindings.default_generator is None:
        raise RuntimeError(f"torch {torch.__version__} has no generator of {device_type}:{index}")
    return bindings.default_generator(index)
