"""Rehearsal: what a process on GPUs that compute nothing needs beside its kernels.

Processes on a simulated machine load this package as they load ``_kernels``. It uses `_kernels`, and hooks of `_compile`.
"""

from __future__ import annotations

from .installation import install

__all__ = ["install"]
