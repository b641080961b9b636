"""Applies the hooks to the modules of torch and Triton that a program imports."""

from __future__ import annotations

import os

from . import inductor
from .import_hook import after_import

__all__ = ["install"]


def install() -> None:
    """Prepare this process for compiled code. Imports and initializes nothing."""
    if os.environ.get("ACCELERATOR_SIM_COMPILE") == "cpp":
        after_import("torch._inductor.compile_fx", inductor.hook)
