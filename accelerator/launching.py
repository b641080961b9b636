"""Launching processes: their visible devices, the variables to forward to them, their communication backend.

The functions are fork-safe: they initialize nothing. If NVML cannot list the GPUs, the first call starts a child process.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Iterable, MutableMapping
from typing import Any, NamedTuple, TypeVar

from ._machine import discovery_cache, grammar, imports, torch_build

__all__ = [
    "communication_backend_name",
    "communication_backend_version",
    "export_envs",
    "set_visible_devices_envs",
    "visible_devices_envs",
]

Environment = TypeVar("Environment", bound=MutableMapping[str, str])

# Those of CUDA and ROCm are in their discovery backends.
_VISIBLE = {
    "xpu": "ZE_AFFINITY_MASK",
    "hpu": "HABANA_VISIBLE_MODULES",
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
    """The type of the accelerator that processes will use, "cpu" if none is available here."""
    return discovery_cache.current().device_type


def visible_devices_envs() -> tuple[str, ...]:
    """Return the variables that decide which devices a process sees.

    Returns:
        Their names; the first is the one to set. CUDA's also without an accelerator, because processes may be started on
        another machine. On ROCm, HIP's variable comes first.

    Example:
        >>> import accelerator as acc
        >>> acc.visible_devices_envs()
        ('CUDA_VISIBLE_DEVICES',)
    """
    name = _VISIBLE.get(discovery_cache.current().accelerator_type or "cuda")
    return (name,) if name else discovery_cache.backend().VARIABLES


def set_visible_devices_envs(current_env: Environment, local_accelerator_ids: Iterable[int | str]) -> Environment:
    """Set which devices a process that will be started sees.

    Args:
        current_env: the environment of that process, changed in place. If it already limits the visible devices, the ids are
            indices into its list: with ``CUDA_VISIBLE_DEVICES=4,5``, id 1 is GPU 5.
        local_accelerator_ids: indices of devices, in the order that the process will see.

    Returns:
        ``current_env``.

    Raises:
        ValueError: if an id is not the index of a device in the environment's list, if an id is repeated, or if the variable's
            value is not understood. The environment is unchanged then.
        TypeError: if the environment is no mutable mapping, or the ids are not iterable.

    Example:
        >>> import accelerator as acc
        >>> acc.set_visible_devices_envs({"CUDA_VISIBLE_DEVICES": "4,5"}, [1])["CUDA_VISIBLE_DEVICES"]
        '5'
    """
    if not isinstance(current_env, MutableMapping):
        raise TypeError(f"An environment is a mutable mapping, such as a dict, not {type(current_env).__name__}")
    if isinstance(local_accelerator_ids, (str, bytes)) or not isinstance(local_accelerator_ids, Iterable):
        raise TypeError(f"The ids are a list of indices, not {type(local_accelerator_ids).__name__}")
    variable = visible_devices_envs()[0]
    limit = _limit(current_env, variable)
    entries = [_entry(identifier, limit) for identifier in local_accelerator_ids]
    if len(set(entries)) < len(entries):
        raise ValueError(f"{','.join(entries)} repeats a device, which would hide every device")
    current_env[variable] = ",".join(entries)
    return current_env


class _Limit(NamedTuple):
    """The variable that limits an environment, its value, and its entry for each device; None if it is not set."""

    variable: str
    value: str
    entries: tuple[str, ...] | None


def _limit(env: MutableMapping[str, str], variable: str) -> _Limit:
    is_other = variable in _VISIBLE.values()
    limiting = variable if is_other else discovery_cache.backend().limiting_variable(env)
    value = env.get(limiting)
    if value is None:
        return _Limit(limiting, "", None)
    if variable == "ZE_AFFINITY_MASK":
        entries = _tiles(value, whole_cards=env.get("ZE_FLAT_DEVICE_HIERARCHY") == "COMPOSITE")
    elif is_other:
        entries = () if not value else tuple(value.split(",")) if re.fullmatch("[0-9]+(,[0-9]+)*", value) else None
    else:
        entries = grammar.listed(value)
    if entries is None:
        raise ValueError(f"{limiting}={grammar.quoted(value)} is not a list of devices; unset it")
    return _Limit(limiting, value, entries)


def _tiles(mask: str, *, whole_cards: bool) -> tuple[str, ...] | None:
    """The devices of an affinity mask of Level Zero, in order: cards such as "0", or tiles such as "0.1".

    Args:
        mask: the value.
        whole_cards: whether all visible tiles of a card are one device.
    """
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?(,[0-9]+(\.[0-9]+)?)*", mask) is None:
        return () if mask == "" else None
    tiles = sorted({tuple(int(part) for part in entry.split(".")) for entry in mask.split(",")})
    if not whole_cards:
        return tuple(".".join(map(str, tile)) for tile in tiles)
    cards = sorted({tile[0] for tile in tiles})
    return tuple(",".join(".".join(map(str, tile)) for tile in tiles if tile[0] == card) for card in cards)


def _entry(identifier: int | str, limit: _Limit) -> str:
    try:
        if isinstance(identifier, bool):
            raise TypeError
        index = int(identifier) if isinstance(identifier, str) else operator.index(identifier)
    except (TypeError, ValueError):
        raise ValueError(f"A local accelerator id is the index of a device, not {identifier!r}") from None
    if index < 0:
        raise ValueError(f"A local accelerator id must not be negative, but is {identifier!r}")
    variable, value, entries = limit
    if entries is None:
        return str(index)
    if index >= len(entries):
        raise ValueError(f"Device {index} is out of range: {variable}={grammar.quoted(value)} lists {len(entries)}")
    return entries[index]


def export_envs() -> tuple[str, ...]:
    """Return the prefixes of the variables that a launcher should forward to its processes.

    Returns:
        Prefixes of names, such as "NCCL"; none if no accelerator is available.

    Example:
        >>> import accelerator as acc
        >>> acc.export_envs()
        ('NCCL',)
    """
    return _PREFIXES.get(device_type(), ())


def communication_backend_name() -> str:
    """Return the backend of ``torch.distributed`` for the device.

    Returns:
        "nccl" (also for ROCm's RCCL), "xccl", ...; "gloo" for the CPU, for accelerators without a backend of their own, and on
        Windows, which has no NCCL.

    Example:
        >>> import accelerator as acc
        >>> acc.communication_backend_name()
        'nccl'
    """
    return "gloo" if sys.platform == "win32" else _BACKENDS.get(device_type(), "gloo")


def communication_backend_version() -> tuple[int, ...] | None:
    """Return the version of the communication backend.

    Returns:
        Major, minor and patch of NCCL, from an imported torch, else from the installed package; None for other backends, and if
        unknown.

    Example:
        >>> import accelerator as acc
        >>> acc.communication_backend_version() >= (2, 20)
        True
    """
    if communication_backend_name() != "nccl":
        return None
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        try:
            version: tuple[int, ...] = torch.cuda.nccl.version()
        except AttributeError:  # torch is built without NCCL
            return None
        return version
    build = torch_build.read()
    if build is None or build.cuda is None:
        return None
    imports.import_modules("importlib.metadata")
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    try:
        return tuple(int(part) for part in version_of(f"nvidia-nccl-cu{build.cuda.partition('.')[0]}").split(".")[:3])
    except (PackageNotFoundError, ValueError):
        return None
