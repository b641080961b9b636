"""Which releases of torch the simulation knows, and what it does not do for old ones."""

from __future__ import annotations

__all__ = ["NEWEST_TORCH", "release", "runs_compiled_code"]

NEWEST_TORCH = (2, 15)
"""The newest release of torch that the tables of simulated GPUs describe: the newest one in ``_kernels/dtypes.json``."""

_OLDEST_COMPILING_TORCH = (2, 8)


def release(torch_version: str) -> tuple[int, int]:
    """Return the major and minor version of a torch."""
    major, minor = torch_version.split(".")[:2]
    return int(major), int(minor)


def runs_compiled_code(torch_version: str) -> bool:
    """Return whether a torch has the functions of Dynamo, Inductor and Triton that the simulation replaces."""
    return release(torch_version) >= _OLDEST_COMPILING_TORCH
