"""What a device is and can do, and what torch was built for."""

from __future__ import annotations

import os
import warnings
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from . import discovery
from ._machine import host_memory, process
from ._machine.device_argument import Device
from ._machine.dynamo import assume_constant
from ._torch import state
from ._torch.arch_flags import arch_flags

__all__ = [
    "can_device_access_peer",
    "get_arch_list",
    "get_device_capability",
    "get_device_properties",
    "get_gencode_flags",
]


@assume_constant
def get_device_capability(device: Device = None, /) -> dict[str, Any]:
    """Return what a device can hold and compute.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        A new dictionary: ``"supported_dtypes"``, the set of dtypes that tensors on the device can have, and on CUDA
        ``"compute_capability"``, major and minor. Mirrors ``torch.accelerator.get_device_capability``, which raises on
        CUDA and keeps answering for the device that was current when it was first asked. Which dtypes a device is worth
        training in says ``supported_dtypes()``.

    Fork: safe, initializes nothing on CUDA; on other accelerators as ``torch.accelerator``.

    Example:
        >>> import accelerator as acc, torch
        >>> torch.float32 in acc.get_device_capability()["supported_dtypes"]
        True
    """
    runtime = state.current(device)
    if runtime.device_type == "cpu":
        return {"supported_dtypes": set(_dtypes())}
    if runtime.device_type == "cuda":
        return {"supported_dtypes": set(_dtypes()), "compute_capability": discovery.compute_capability(runtime.device_index)}
    found: dict[str, Any] = dict(torch.accelerator.get_device_capability(runtime.device_index))
    return found


@cache
def _dtypes() -> frozenset[torch.dtype]:
    """Every dtype that tensors can have and be converted to and from, by trial on the CPU: CUDA holds what the CPU holds."""
    found = {value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that some are experimental is no news to one who asks what there is
        return frozenset(dtype for dtype in found if _converts(dtype))


def _converts(dtype: torch.dtype) -> bool:
    try:
        return torch.empty(1, dtype=dtype, device="cpu").to(torch.float32).to(dtype).dtype == dtype
    except (RuntimeError, TypeError):
        return False


@assume_constant
def get_device_properties(device: Device = None) -> Any:
    """Return the properties of a device as torch has them: ``name``, ``total_memory``, ``multi_processor_count``, ...

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        torch's own object, with the fields that the accelerator has. When the CPU stands in an object with those three:
        "cpu", the host's memory in bytes, the number of processors that this process may use. Mirrors
        ``torch.cuda.get_device_properties``.

    Raises:
        RuntimeError: on accelerators for which torch has no properties.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> acc.get_device_properties().total_memory > 0
        True
    """
    runtime = state.initialize(device)
    if runtime.device_type == "cpu":
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return SimpleNamespace(name="cpu", total_memory=host_memory.total(), multi_processor_count=processors)
    return runtime.function("get_device_properties")(runtime.device_index)


def can_device_access_peer(device: Device, peer_device: Device) -> bool:
    """Return whether a device can reach the memory of another one directly.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.
        peer_device: the device whose memory is to be reached, named in the same ways.

    Returns:
        What the driver says; False for one and the same device, and when the CPU stands in. Mirrors
        ``torch.cuda.can_device_access_peer``.

    Raises:
        RuntimeError: on accelerators for which torch cannot tell.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> acc.can_device_access_peer(0, 0)
        False
    """
    state.current(device)  # an error in the first is to come before one in the second
    peer = state.initialize(peer_device)
    if peer.device_type == "cpu":
        return False
    return bool(peer.function("can_device_access_peer")(state.current(device).device_index, peer.device_index))


@assume_constant
def get_arch_list() -> list[str]:
    """Return the architectures that this torch was compiled for.

    Returns:
        Such as ``["sm_80", "sm_90", "compute_120"]``, from the build, whether there is a device or not; empty for a CPU
        build and for accelerators that have none. Mirrors ``torch.cuda.get_arch_list``. Before CUDA is initialized a child
        process asks torch, once, for asking it here would make torch refuse to work in forked children.

    Raises:
        RuntimeError: if that process cannot be started or fails, as in a frozen program, which has no Python to start.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> "sm_90" in acc.get_arch_list()
        True
    """
    flags = arch_flags()
    return flags.split() if flags else []


def get_gencode_flags() -> str:
    """Return the compiler's flags for the architectures that this torch was compiled for.

    Returns:
        nvcc's ``-gencode`` flags, on ROCm ``--offload-arch``, on XPU ``-device``; empty where ``get_arch_list`` is. Mirrors
        ``torch.cuda.get_gencode_flags``.

    Raises:
        RuntimeError: as ``get_arch_list``.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> "-gencode compute=compute_90,code=sm_90" in acc.get_gencode_flags()
        True
    """
    archs = get_arch_list()
    if not archs or process.torch_accelerator_type() == "xpu":
        return f"-device {','.join(archs)}" if archs else ""
    if torch.version.hip:
        return " ".join(f"--offload-arch={arch}" for arch in archs)
    split = (arch.split("_") for arch in archs)
    return " ".join(f"-gencode compute=compute_{number},code={kind}_{number}" for kind, number in split)
