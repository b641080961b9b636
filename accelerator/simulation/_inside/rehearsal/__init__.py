"""Rehearsal: what a process on GPUs that compute nothing needs beside its kernels.

Processes on a simulated machine load this package as they load `ops`. It uses `ops`, and hooks of `compiled`.
"""

from __future__ import annotations

from .install import install

__all__ = ["install"]
