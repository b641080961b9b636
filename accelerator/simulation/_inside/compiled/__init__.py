"""Compiled code on simulated GPUs: ``torch.compile``, Triton, and ops of other libraries.

The folder is loaded as `ops` is: by file name, into processes on a simulated machine. It imports torch, its own modules and
those of `ops`.
"""

from __future__ import annotations

from .install import install

__all__ = ["install"]
