"""The backend for ``torch.compile``, and Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import identity
from ._machine import triton
from ._torch import state

__all__ = ["get_compile_backend", "is_triton_supported", "prefer_triton_grouped_mm", "set_compile_backend"]

# Backends of every torch. For any other name torch's compiler is imported, which takes seconds.
_BUILT_IN = ("inductor", "eager", "aot_eager")

# Set by set_compile_backend(); None for the accelerator's own.
_backend: str | Callable[..., Any] | None = None


def is_triton_supported() -> bool:
    """Return whether Triton is installed and supports the current device.

    Returns:
        Whether Triton is installed and compiles for this accelerator: for CUDA, ROCm, XPU and some vendors' plug-ins. On CUDA
        the compute capability must be at least 8.0, as DeepSpeed decides. False if Triton's kernels cannot run here.

    Example:
        >>> acc.is_triton_supported()
        True
    """
    vendor = state.current().vendor
    if not vendor.has_triton or not triton.is_usable():
        return False
    if vendor.min_triton_capability is None:
        return True
    capability = identity.compute_capability()
    return capability is not None and capability >= vendor.min_triton_capability


def prefer_triton_grouped_mm() -> bool:
    """Return whether to prefer a Triton kernel to torch's for multiplying groups of matrices.

    Returns:
        On CUDA with Triton: True for compute capabilities from 7.0 to below 9.0, for which torch has no fused kernel; from 9.0
        on, True if this torch has no grouped multiplication. False elsewhere.

    Example:
        >>> acc.prefer_triton_grouped_mm()
        False
    """
    vendor = state.current().vendor
    capability = identity.compute_capability()
    # Only CUDA's devices have a compute capability.
    if not vendor.has_triton or capability is None or not triton.is_usable():
        return False
    return capability >= (7, 0) and (capability < (9, 0) or not hasattr(torch, "_grouped_mm"))


def get_compile_backend() -> str | Callable[..., Any]:
    """Return the backend to pass to ``torch.compile``.

    Returns:
        The name or function that ``set_compile_backend`` set; by default the accelerator's own, "inductor" for most.

    Example:
        >>> acc.get_compile_backend()
        'inductor'
    """
    if _backend is not None:
        return _backend
    return state.current(allow_bad_fork=True).vendor.compile_backend


def set_compile_backend(backend: str | Callable[..., Any]) -> None:
    """Set the backend that ``get_compile_backend`` returns in this process.

    Args:
        backend: a name that ``torch.compile`` takes, or a function. A name other than "inductor", "eager" and "aot_eager"
            imports torch's compiler, which takes seconds.

    Raises:
        ValueError: for an unknown name. The message lists the known ones.
        TypeError: if it is neither a str nor callable.

    Example:
        >>> acc.set_compile_backend("eager")
        >>> acc.get_compile_backend()
        'eager'
        >>> acc.set_compile_backend("inductor")
    """
    global _backend
    if isinstance(backend, str):
        if backend not in _BUILT_IN:
            backends = torch.compiler.list_backends(exclude_tags=())
            if backend not in backends:
                raise ValueError(f"Unknown backend of torch.compile: {backend!r}; use one of {', '.join(backends)}")
    elif not callable(backend):
        raise TypeError(f"A backend must be a str or a callable, not {type(backend).__name__}")
    _backend = backend
