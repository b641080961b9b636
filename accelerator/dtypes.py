"""The dtypes that the current device supports, and mixed precision."""

from __future__ import annotations

import os
from types import ModuleType

import torch

from . import identity
from ._machine.device_argument import check_bool
from ._machine.dynamo import assume_constant
from ._torch import bindings, state
from ._torch.amp import amp_module
from ._torch.signatures import takes

__all__ = [
    "amp",
    "is_bf16_supported",
    "is_fp8_supported",
    "is_fp16_supported",
    "is_fp64_supported",
    "is_tf32_supported",
    "supported_dtypes",
]


@assume_constant
def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return whether the current device computes in bfloat16.

    Args:
        including_emulation: return True also if the device can only emulate it.

    Returns:
        With emulation, True. Without it: on CUDA whether the compute capability is at least 8.0, as
        ``torch.cuda.is_bf16_supported``; True on ROCm; whether the CPU has bfloat16 instructions under the CPU fallback.
        On other accelerators the result of torch's function for it, else whether a bfloat16 tensor can be created.

    Raises:
        TypeError: if the argument is not a bool, such as a device.

    Example:
        >>> acc.is_bf16_supported()
        True
    """
    check_bool("including_emulation", including_emulation)
    device_type = state.current().device_type
    if device_type == "cpu":
        return including_emulation or bindings.cpu_has_format("bf16")
    if _is_in_table("bfloat16"):
        return including_emulation or _supports("bfloat16")
    own = state.current().find_function("is_bf16_supported")
    if own is None:
        return _can_create(torch.bfloat16)
    return bool(own(including_emulation) if takes(own, "including_emulation") else own())


@assume_constant
def is_fp16_supported() -> bool:
    """Return whether the current device computes fast enough in float16 for training.

    Returns:
        On CUDA whether the compute capability is at least 7.0, or 6.0 with ``DS_ALLOW_DEPRECATED_FP16=1`` in the environment,
        as DeepSpeed decides; True on ROCm; whether the CPU has float16 instructions under the CPU fallback. On other
        accelerators whether a float16 tensor can be created (the call creates one).

    Example:
        >>> acc.is_fp16_supported()
        True
    """
    if state.current().device_type == "cpu":
        return bindings.cpu_has_format("fp16")
    if os.environ.get("DS_ALLOW_DEPRECATED_FP16") == "1" and _is_in_table("deprecated float16"):
        return _supports("deprecated float16")
    return _supports("float16") if _is_in_table("float16") else _can_create(torch.float16)


@assume_constant
def is_fp64_supported() -> bool:
    """Return whether the current device computes in float64.

    Returns:
        True on CUDA and under the CPU fallback; on other accelerators whether a float64 tensor can be created (the call creates
        one).

    Example:
        >>> acc.is_fp64_supported()
        True
    """
    if state.current().device_type == "cpu":
        return True
    return _supports("float64") if _is_in_table("float64") else _can_create(torch.float64)


@assume_constant
def is_tf32_supported() -> bool:
    """Return whether the current device can multiply float32 matrices in TensorFloat-32.

    Returns:
        On CUDA whether the compute capability is at least 8.0, as ``torch.cuda.is_tf32_supported``; on ROCm, where this
        initializes the accelerator, whether the architecture is gfx94 or gfx95. On other accelerators the result of torch's
        function for it, else False.

    Example:
        >>> acc.is_tf32_supported()
        True
    """
    if _is_in_table("tf32"):
        return _supports("tf32")
    own = state.current().find_function("is_tf32_supported")
    return bool(own and own())


@assume_constant
def is_fp8_supported() -> bool:
    """Return whether the current device can multiply matrices of 8-bit floats, as ``torch._scaled_mm`` does.

    Returns:
        On CUDA whether the compute capability is at least 8.9; on ROCm, where this initializes the accelerator, whether the
        architecture is gfx942, gfx950 or gfx12. False elsewhere.

    Example:
        >>> acc.is_fp8_supported()
        True
    """
    return _is_in_table("fp8") and _supports("fp8")


@assume_constant
def supported_dtypes() -> list[torch.dtype]:
    """Return the dtypes to train in on the current device.

    Returns:
        A new list: float32, then float16 and bfloat16 if supported, as DeepSpeed's ``supported_dtypes``. For all dtypes that
        tensors on the device can have, use ``get_device_capability()["supported_dtypes"]``.

    Example:
        >>> acc.supported_dtypes()
        [torch.float32, torch.float16, torch.bfloat16]
    """
    dtypes = [torch.float32]
    if is_fp16_supported():
        dtypes.append(torch.float16)
    if is_bf16_supported():
        dtypes.append(torch.bfloat16)
    return dtypes


def amp() -> ModuleType:
    """Return a module for automatic mixed precision on the accelerator.

    Returns:
        On CUDA and under the CPU fallback a module with ``autocast``, ``GradScaler``, ``custom_fwd`` and ``custom_bwd`` whose
        parameters are those of ``torch.cuda.amp``, which torch deprecates. On other accelerators the module of their own, or
        ``torch.amp`` if they have none.

    Example:
        >>> acc.amp().autocast().device
        'cuda'
    """
    runtime = state.current()
    module: ModuleType = getattr(runtime.device_module, "amp", torch.amp)
    # torch's own modules for one device type are deprecated.
    is_deprecated = module.__name__ == f"torch.{runtime.device_type}.amp"
    return amp_module(runtime.device_type) if is_deprecated else module


def _is_in_table(format_: str) -> bool:
    vendor = state.current().vendor
    return format_ in vendor.min_capabilities or format_ in vendor.architectures


def _supports(format_: str) -> bool:
    """Whether the current device computes in a format that the vendor table has."""
    vendor = state.current().vendor
    if format_ in vendor.min_capabilities:
        capability = identity.compute_capability()
        return capability is not None and capability >= vendor.min_capabilities[format_]
    prefixes = vendor.architectures[format_]
    if not prefixes:
        return True
    architecture: str = state.current().function("get_device_properties")().gcnArchName
    return architecture.startswith(prefixes)


def _can_create(dtype: torch.dtype) -> bool:
    try:
        torch.empty(1, dtype=dtype, device=state.current().device_type)
    except (RuntimeError, TypeError):
        return False
    return True
