"""The architectures that this torch was compiled for."""

from __future__ import annotations

from functools import cache

from .._machine import process, torch_probe
from . import bindings
from .state import initialized


def arch_flags() -> str | None:
    """Return the architectures in one string, or None if this torch names none; initializes nothing."""
    device_type = process.torch_accelerator_type() or ""
    binding = bindings.arch_flags(device_type)
    if binding is None:
        return None
    if device_type == "cuda" and not initialized:
        # The binding would make torch refuse to work in children that are forked afterwards.
        return _read_in_child(bindings.name_of(binding))
    flags: str | None = binding()
    return flags


@cache
def _read_in_child(binding: str) -> str | None:
    try:
        flags: str | None = torch_probe.call(binding)
    except RuntimeError as error:
        raise RuntimeError(
            f"the architectures of this torch could not be read: {error}; after init() no child process is needed"
        ) from None
    return flags
