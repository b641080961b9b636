"""What compiles for the device: the backend for ``torch.compile``, Triton."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from . import discovery
from ._torch import state
from .simulation import is_simulated

__all__ = [
    "get_compile_backend",
    "is_triton_supported",
    "prefer_triton_grouped_mm",
    "set_compile_backend",
]

# Names that every torch has; any other is looked up, which imports torch's compiler and takes seconds.
_ALWAYS_THERE = ("inductor", "eager", "aot_eager")

_backend: str | Callable[..., Any] = "inductor"


def is_triton_supported() -> bool:
    """Return whether Triton is installed and compiles for the current device.

    Returns:
        On CUDA whether Triton can be imported and the compute capability is 8 or more, as DeepSpeed decides; on ROCm and XPU
        whether it can be imported. False elsewhere, and on simulated GPUs that compute, which run none of its kernels.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.is_triton_supported()  # simulated GPUs run no kernel of Triton's
        False
    """
    kind = state.current().device_type
    if kind not in ("cuda", "xpu") or not _has_triton():
        return False
    if kind == "xpu" or torch.version.hip is not None:
        return True
    capability = discovery.compute_capability()
    return capability is not None and capability >= (8, 0)


def prefer_triton_grouped_mm() -> bool:
    """Return whether a Triton kernel multiplies groups of matrices faster on the current device than torch does.

    Returns:
        True on CUDA with Triton if the compute capability is 7 or more and below 9, where torch has no fused kernel, or, from
        7 on, if this torch has no grouped multiplication at all. False elsewhere.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.prefer_triton_grouped_mm()
        False
    """
    if state.current().device_type != "cuda" or torch.version.hip is not None or not _has_triton():
        return False
    capability = discovery.compute_capability()
    if capability is None:
        return False
    return capability >= (7, 0) and (capability < (9, 0) or not hasattr(torch, "_grouped_mm"))


def get_compile_backend() -> str | Callable[..., Any]:
    """Return the backend that ``torch.compile`` is to use.

    Returns:
        "inductor", or what ``set_compile_backend`` set.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.get_compile_backend()
        'inductor'
    """
    return _backend


def set_compile_backend(backend: str | Callable[..., Any]) -> None:
    """Set what ``get_compile_backend`` returns in this process.

    Args:
        backend: a name that ``torch.compile`` knows, or a function to use as a backend. A name other than "inductor",
            "eager" and "aot_eager" is looked up in torch's compiler, whose import takes seconds.

    Raises:
        ValueError: for a name that torch's compiler does not know; the message lists those that it does.
        TypeError: if it is neither a name nor callable.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.set_compile_backend("eager")
        >>> acc.get_compile_backend()
        'eager'
        >>> acc.set_compile_backend("inductor")
    """
    global _backend
    if isinstance(backend, str):
        if backend not in _ALWAYS_THERE:
            known = torch.compiler.list_backends(exclude_tags=())
            if backend not in known:
                raise ValueError(f"torch.compile knows no backend {backend!r}; it knows {', '.join(known)}")
    elif not callable(backend):
        raise TypeError(f"A backend is a name or a callable, not {type(backend).__name__}")
    _backend = backend


def _has_triton() -> bool:
    # Simulated GPUs that compute refuse Triton's kernels.
    return importlib.util.find_spec("triton") is not None and not (
        os.environ.get("ACCELERATOR_SIM_COMPUTE") == "1" and is_simulated()
    )
