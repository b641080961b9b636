"""The kernels of simulated GPUs: each CUDA kernel of torch is replaced by the CPU's, on the very same bytes.

Simulated device memory is host memory, and a simulated GPU does its work when it is submitted. So a kernel takes the CUDA
tensors it was given, calls the CPU's kernel on CPU tensors over the same memory, and puts what is new into new CUDA memory.
Everything above (autograd, autocast, views, allocation, copies to and from the host, streams and events) is torch's own.

This package is loaded by file name into processes on a simulated machine, whose Python may be another than the one that
started them: it imports torch and nothing else, and uses relative imports within itself alone.
"""

from __future__ import annotations

from .registration import install

__all__ = ["install"]
