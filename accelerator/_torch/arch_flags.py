"""The architectures that this torch was compiled for."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

from .._machine import process
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
        return _run_in_child(binding.__name__)
    flags: str | None = binding()
    return flags


@cache
def _run_in_child(binding: str) -> str:
    python = process.python()
    if python is None:
        raise RuntimeError(
            "Before initialization only a child process can read the architectures of this torch, and there is no Python "
            "executable to start one; call init() first"
        )
    folders = [os.fspath(folder) for folder in sys.path]
    code = f"import sys; sys.path[:] = {folders!r}; import torch; print(torch._C.{binding}() or '')"
    problem = "A child process could not read the architectures of this torch"
    try:
        child = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{problem}: {error}") from error
    if child.returncode:
        raise RuntimeError(f"{problem}: {child.stderr.strip()[-500:]}")
    return child.stdout
