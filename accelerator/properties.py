"""The properties and capabilities of devices, and the architectures that torch was compiled for."""

from __future__ import annotations

import os
import warnings
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from . import identity
from ._machine import host_memory, process
from ._machine.device_argument import Device
from ._machine.discovery_result import NotSupported
from ._machine.dynamo import assume_constant
from ._torch import state
from ._torch.arch_flags import arch_flags

__all__ = ["can_device_access_peer", "get_arch_list", "get_device_capability", "get_device_properties", "get_gencode_flags"]


@assume_constant
def get_device_capability(device: Device = None, /) -> dict[str, Any]:
    """Return the capabilities of a device.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        A new dictionary. ``"supported_dtypes"`` is the set of dtypes that tensors on the device can have; for the dtypes to
        train in, call ``supported_dtypes()``. ``"compute_capability"`` exists on CUDA only: a pair (major, minor), or None if
        unknown. Mirrors ``torch.accelerator.get_device_capability``, which raises on CUDA and caches the first device's result.
        On accelerators other than CUDA, the result is torch's.

    Raises:
        RuntimeError: if torch does not report it for this accelerator; in a bad fork.

    Example:
        >>> torch.float32 in acc.get_device_capability()["supported_dtypes"]
        True
    """
    runtime = state.current(device)
    if runtime.device_type == "cpu":
        return {"supported_dtypes": set(_dtypes())}
    if runtime.vendor.has_compute_capability:
        return {"supported_dtypes": set(_dtypes()), "compute_capability": identity.compute_capability(runtime.device_index)}
    read = getattr(torch.accelerator, "get_device_capability", None)
    if read is None:
        raise NotSupported(f"torch {torch.__version__} has no torch.accelerator.get_device_capability()")
    capability: dict[str, Any] = dict(read(runtime.device_index))
    return capability


@cache
def _dtypes() -> frozenset[torch.dtype]:
    """Return every dtype that tensors can have. CUDA and the CPU have the same dtypes, so a test on the CPU suffices."""
    dtypes = {value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that some dtypes are experimental
        return frozenset(dtype for dtype in dtypes if _is_convertible(dtype))


def _is_convertible(dtype: torch.dtype) -> bool:
    try:
        return torch.empty(1, dtype=dtype, device="cpu").to(torch.float32).to(dtype).dtype == dtype
    except (RuntimeError, TypeError):
        return False


@assume_constant
def get_device_properties(device: Device = None) -> Any:
    """Return torch's properties of a device: ``name``, ``total_memory``, ``multi_processor_count``, ...

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        torch's own object, whose attributes depend on the accelerator. Under the CPU fallback, an object with the three
        attributes above: "cpu", the host's memory in bytes, and the number of processors that this process may use. Mirrors
        ``torch.cuda.get_device_properties``.

    Raises:
        RuntimeError: if torch has no such function for this accelerator, or in a bad fork.

    Initializes: the accelerator.

    Example:
        >>> properties = acc.get_device_properties(1)
        >>> properties.name, properties.total_memory
        ('Simulated GPU', 8589934592)
    """
    runtime = state.initialize(device)
    if runtime.device_type == "cpu":
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return SimpleNamespace(name="cpu", total_memory=host_memory.total(), multi_processor_count=processors)
    return runtime.function("get_device_properties")(runtime.device_index)


def can_device_access_peer(device: Device, peer_device: Device) -> bool:
    """Return whether a device can access the memory of another one directly.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.
        peer_device: the device that has the memory.

    Returns:
        The driver's result. False if both are the same device, and under the CPU fallback. Mirrors
        ``torch.cuda.can_device_access_peer``.

    Raises:
        RuntimeError: if torch has no such function for this accelerator, or in a bad fork.

    Initializes: the accelerator.

    Example:
        >>> acc.can_device_access_peer(0, 0)
        False
    """
    state.current(device)  # an error in the first argument is raised before one in the second
    peer = state.initialize(peer_device)
    if peer.device_type == "cpu":
        return False
    return bool(peer.function("can_device_access_peer")(state.current(device).device_index, peer.device_index))


@assume_constant
def get_arch_list() -> list[str]:
    """Return the architectures that this torch was compiled for.

    Returns:
        For example ``["sm_80", "sm_90", "compute_120"]``. A device is not needed. The list is empty for a CPU build and for
        accelerators without architectures. Mirrors ``torch.cuda.get_arch_list``. Before initialization, torch's binding would
        break fork, so one child process calls it.

    Raises:
        RuntimeError: if that child process fails or cannot start, for example in a frozen program.

    May start: a child process.

    Example:
        >>> "sm_90" in acc.get_arch_list()
        True
    """
    flags = arch_flags()
    return flags.split() if flags else []


def get_gencode_flags() -> str:
    """Return the compiler flags for the architectures that this torch was compiled for.

    Returns:
        nvcc's ``-gencode`` flags, ``--offload-arch`` on ROCm, ``-device`` on XPU; empty if ``get_arch_list()`` is. Mirrors
        ``torch.cuda.get_gencode_flags``.

    Raises:
        RuntimeError: for the same reasons as in ``get_arch_list``.

    May start: a child process.

    Example:
        >>> "-gencode compute=compute_90,code=sm_90" in acc.get_gencode_flags()
        True
    """
    archs = get_arch_list()
    if not archs or process.torch_accelerator_type() == "xpu":
        return f"-device {','.join(archs)}" if archs else ""
    if torch.version.hip:
        return " ".join(f"--offload-arch={arch}" for arch in archs)
    pairs = (arch.split("_") for arch in archs)
    return " ".join(f"-gencode compute=compute_{version},code={target}_{version}" for target, version in pairs)
