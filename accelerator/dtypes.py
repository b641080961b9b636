"""What the device computes in: dtypes worth using, mixed precision."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

import torch

from . import discovery
from ._torch import state

__all__ = [
    "amp",
    "is_bf16_supported",
    "is_fp8_supported",
    "is_fp16_supported",
    "is_fp64_supported",
    "is_tf32_supported",
    "supported_dtypes",
]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return whether the current device computes in bfloat16.

    Args:
        including_emulation: whether it counts if the hardware only emulates it.

    Returns:
        On CUDA whether the compute capability is 8 or more, or emulation counts, as ``torch.cuda.is_bf16_supported``; always
        on ROCm. When the CPU stands in, whether its instructions include bfloat16, or emulation counts.

    Fork: safe, initializes nothing on CUDA; on other accelerators as creating a tensor.

    Example:
        >>> import accelerator as acc
        >>> acc.is_bf16_supported()
        True
    """
    kind = state.current().device_type
    if kind == "cuda":
        return including_emulation or _is_rocm() or _has_capability(8, 0)
    if kind == "cpu":
        return including_emulation or _cpu_has("_is_mkldnn_bf16_supported")
    return _can_hold(torch.bfloat16)


def is_fp16_supported() -> bool:
    """Return whether the current device is worth training on in float16.

    Returns:
        On CUDA whether the compute capability is 7 or more, or 6 with ``DS_ALLOW_DEPRECATED_FP16=1`` in the environment, as
        DeepSpeed decides; always on ROCm. When the CPU stands in, whether its instructions include float16.

    Fork: safe, initializes nothing on CUDA; on other accelerators as creating a tensor.

    Example:
        >>> import accelerator as acc
        >>> acc.is_fp16_supported()
        True
    """
    kind = state.current().device_type
    if kind == "cuda":
        least = 6 if os.environ.get("DS_ALLOW_DEPRECATED_FP16") == "1" else 7
        return _is_rocm() or _has_capability(least, 0)
    if kind == "cpu":
        return _cpu_has("_is_mkldnn_fp16_supported")
    return _can_hold(torch.float16)


def is_fp64_supported() -> bool:
    """Return whether the current device computes in float64.

    Returns:
        True on CUDA and when the CPU stands in; on other accelerators whether a tensor can be float64.

    Fork: safe, initializes nothing on CUDA; on other accelerators as creating a tensor.

    Example:
        >>> import accelerator as acc
        >>> acc.is_fp64_supported()
        True
    """
    return state.current().device_type in ("cuda", "cpu") or _can_hold(torch.float64)


def is_tf32_supported() -> bool:
    """Return whether the current device multiplies float32 matrices in TensorFloat-32 if allowed to.

    Returns:
        On CUDA whether the compute capability is 8 or more, as ``torch.cuda.is_tf32_supported``; on ROCm whether the
        architecture is gfx94 or gfx95. False elsewhere.

    Fork: safe, initializes nothing on CUDA; initializes the accelerator on ROCm.

    Example:
        >>> import accelerator as acc
        >>> acc.is_tf32_supported()
        True
    """
    if state.current().device_type != "cuda":
        return False
    if _is_rocm():
        architecture: str = torch.cuda.get_device_properties().gcnArchName
        return "gfx94" in architecture or "gfx95" in architecture
    return _has_capability(8, 0)


def is_fp8_supported() -> bool:
    """Return whether matrices of 8-bit floats can be multiplied, as ``torch._scaled_mm`` does.

    Returns:
        On CUDA whether the compute capability is 8.9 or more; on ROCm whether the architecture is gfx942, gfx950 or gfx12.
        False elsewhere.

    Fork: safe, initializes nothing on CUDA; initializes the accelerator on ROCm.

    Example:
        >>> import accelerator as acc
        >>> acc.is_fp8_supported()
        True
    """
    if state.current().device_type != "cuda":
        return False
    if _is_rocm():
        architecture: str = torch.cuda.get_device_properties().gcnArchName
        return architecture.startswith(("gfx942", "gfx950", "gfx12"))
    return _has_capability(8, 9)


def supported_dtypes() -> list[torch.dtype]:
    """Return the dtypes that the current device is worth training in.

    Returns:
        A new list of float32 and, where supported, float16 and bfloat16, in this order, as DeepSpeed's ``supported_dtypes``.
        All dtypes that a tensor on the device can have are another thing:
        ``get_device_capability()["supported_dtypes"]``.

    Fork: safe, initializes nothing on CUDA; on other accelerators as creating a tensor.

    Example:
        >>> import accelerator as acc
        >>> acc.supported_dtypes()
        [torch.float32, torch.float16, torch.bfloat16]
    """
    found = [torch.float32]
    if is_fp16_supported():
        found.append(torch.float16)
    if is_bf16_supported():
        found.append(torch.bfloat16)
    return found


def amp() -> ModuleType:
    """Return the module for automatic mixed precision on the device.

    Returns:
        ``torch.cuda.amp``, ``torch.cpu.amp``, ..., or ``torch.amp`` for accelerators that have none of their own.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.amp().__name__
        'torch.cuda.amp'
    """
    module: ModuleType = getattr(state.current().device_module, "amp", torch.amp)
    return module


def _has_capability(major: int, minor: int) -> bool:
    capability = discovery.compute_capability()
    return capability is not None and capability >= (major, minor)


def _is_rocm() -> bool:
    return torch.version.hip is not None


def _cpu_has(question: str) -> bool:
    ask: Any = getattr(torch.ops.mkldnn, question, None)
    return bool(ask and ask())


def _can_hold(dtype: torch.dtype) -> bool:
    try:
        torch.empty(1, dtype=dtype, device=state.current().device_type)
    except (RuntimeError, TypeError):
        return False
    return True
