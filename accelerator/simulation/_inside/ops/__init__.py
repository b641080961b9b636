"""Kernel overrides of simulated GPUs: each of torch's CUDA kernels is replaced by the CPU's, on CPU aliases.

Simulated device memory is host memory, and a simulated GPU runs work when it is submitted. A kernel override calls the CPU's
kernel on CPU tensors over the memory of its CUDA arguments, and copies new results to new CUDA memory. For the usual calls of
most ops a compiled kernel does this (``engine.py``, ``native/engine``), for all others Python (``dispatch.py``, ``call.py``).
Everything above (autograd, autocast, views, allocation, copies to and from the host, streams and events) is torch's own.

Processes on a simulated machine load this package by file name, with a Python that may not be the one that started them. So
it imports torch, and only those other modules of ``simulation`` that need nothing but Python.
"""

from __future__ import annotations

from .registration import Overrides, install

__all__ = ["Overrides", "install"]
