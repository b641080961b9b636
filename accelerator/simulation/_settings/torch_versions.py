"""Which releases of torch the simulation knows, and what it does not do for old ones."""

from __future__ import annotations

NEWEST_TORCH = (2, 15)
"""The newest release of torch that the tables of simulated GPUs describe: the newest one in ``_inside/ops/dtypes.json``."""


def release(torch_version: str) -> tuple[int, int]:
    """Return the major and minor version of a torch."""
    major, minor = torch_version.split(".")[:2]
    return int(major), int(minor)
