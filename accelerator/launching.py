"""The environment of processes to start: what they may see, what to forward to them, how they talk to each other."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable, MutableMapping
from typing import Any, TypeVar

from . import discovery
from ._machine import grammar, torch_build

__all__ = [
    "communication_backend_name",
    "communication_backend_version",
    "export_envs",
    "set_visible_devices_envs",
    "visible_devices_envs",
]

Environment = TypeVar("Environment", bound=MutableMapping[str, str])

_VISIBLE = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "mlu": "MLU_VISIBLE_DEVICES",
}
_BACKENDS = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl", "hpu": "hccl", "mlu": "cncl"}
_PREFIXES = {
    "cuda": ("NCCL",),
    "xpu": ("CCL", "ZE"),
    "npu": ("ASCEND", "HCCL"),
    "hpu": ("HCCL", "HABANA"),
    "mlu": ("CNCL", "MLU"),
}


def device_type() -> str:
    """The type of the accelerator that processes will use, "cpu" where none is available here."""
    return (torch_build.accelerator_type() if discovery.device_count() else None) or "cpu"


def visible_devices_envs() -> tuple[str, ...]:
    """Return the variables that decide which devices a process sees.

    Returns:
        Their names, the one to set first; CUDA's also where no accelerator is available, as processes may be started
        elsewhere. On ROCm, HIP's variable comes first.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> len(acc.visible_devices_envs()) > 0
        True
    """
    accelerator = torch_build.accelerator_type() or "cuda"
    if accelerator == "cuda" and torch_build.is_rocm():
        return ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    return (_VISIBLE.get(accelerator, "CUDA_VISIBLE_DEVICES"),)


def set_visible_devices_envs(current_env: Environment, local_accelerator_ids: Iterable[int | str]) -> Environment:
    """Set which devices a process to be started will see.

    Args:
        current_env: the environment of that process, which is changed. Where it already limits the visible devices, the
            ids count what it lets through: with ``CUDA_VISIBLE_DEVICES=4,5`` there, id 1 is GPU 5.
        local_accelerator_ids: indices of devices, in the order in which the process shall have them.

    Returns:
        The environment given.

    Raises:
        ValueError: if an id is no index of a device that the environment lets through, or comes twice, which would hide
            every device; nothing is changed then.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.set_visible_devices_envs({"CUDA_VISIBLE_DEVICES": "4,5"}, [1])["CUDA_VISIBLE_DEVICES"]
        '5'
    """
    variable = visible_devices_envs()[0]
    # HIP reads CUDA's variable where its own is not set.
    limiting = "CUDA_VISIBLE_DEVICES" if torch_build.is_rocm() and variable not in current_env else variable
    listed = current_env.get(limiting)
    entries = None if listed is None else grammar.listed(listed)
    chosen = [_entry(identifier, entries, limiting, listed) for identifier in local_accelerator_ids]
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"A device comes twice among {','.join(chosen)}, which would hide every device")
    current_env[variable] = ",".join(chosen)
    return current_env


def _entry(identifier: int | str, entries: tuple[str, ...] | None, variable: str, listed: str | None) -> str:
    try:
        index = int(identifier) if isinstance(identifier, str) else operator.index(identifier)
    except (TypeError, ValueError):
        raise ValueError(f"A local accelerator id is the index of a device, not {identifier!r}") from None
    if index < 0:
        raise ValueError(f"A local accelerator id is not negative, as {identifier!r} is")
    if entries is None:
        return str(index)
    if index >= len(entries):
        raise ValueError(f"There is no device {index} among the {len(entries)} of {variable}={listed!r}")
    return entries[index]


def export_envs() -> tuple[str, ...]:
    """Return the prefixes of the variables that a launcher should forward to the processes that it starts.

    Returns:
        Prefixes of names, such as "NCCL"; none when no accelerator is available.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> forwarded = acc.export_envs()
    """
    return _PREFIXES.get(device_type(), ())


def communication_backend_name() -> str:
    """Return the backend of ``torch.distributed`` that serves the device.

    Returns:
        "nccl" (also for ROCm's RCCL), "xccl", ..., and "gloo" for the CPU, for accelerators without one of their own,
        and on Windows, for which there is no NCCL.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.communication_backend_name() in ("nccl", "gloo", "xccl", "hccl", "cncl")
        True
    """
    return "gloo" if sys.platform == "win32" else _BACKENDS.get(device_type(), "gloo")


def communication_backend_version() -> tuple[int, ...] | None:
    """Return the version of that backend.

    Returns:
        Major, minor and patch of NCCL, read from an imported torch, else from the installed package; None for backends
        without a version of their own, and where it cannot be read.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> version = acc.communication_backend_version()
    """
    if communication_backend_name() != "nccl":
        return None
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        version: tuple[int, ...] = torch.cuda.nccl.version()
        return version
    build = torch_build.read()
    if build is None or build.cuda is None:
        return None
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    try:
        return tuple(int(part) for part in version_of(f"nvidia-nccl-cu{build.cuda.partition('.')[0]}").split(".")[:3])
    except (PackageNotFoundError, ValueError):
        return None
