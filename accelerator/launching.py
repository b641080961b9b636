"""Launching processes: their visible devices, the variables to forward to them, their communication backend.

The functions are fork-safe: they initialize nothing. If NVML cannot list the GPUs, the first call starts a child process.
"""

from __future__ import annotations

import operator
import os
import re
import sys
from collections.abc import Iterable, MutableMapping
from typing import Any, NamedTuple, TypeVar

from ._machine import discovery_cache, imports, torch_build, vendors, visibility, visibility_variables

__all__ = [
    "communication_backend_name",
    "communication_backend_version",
    "export_envs",
    "set_visible_devices_envs",
    "visible_devices_envs",
]

Environment = TypeVar("Environment", bound=MutableMapping[str, str])


def device_type() -> str:
    """The type of the accelerator that processes will use, "cpu" if none is available here."""
    return discovery_cache.current().device_type


def _row() -> vendors.Vendor:
    """The vendor's row for the accelerator that torch is built for; CUDA's for a CPU build."""
    # Processes may be started on another machine than this, so the accelerator need not be present.
    device_type = discovery_cache.current().accelerator_type or "cuda"
    return vendors.get_row(device_type, is_hip=torch_build.is_rocm())


def visible_devices_envs() -> tuple[str, ...]:
    """Return the variables that decide which devices a process sees.

    Returns:
        Their names; the first is the one to set. A CPU build of torch has CUDA's variable, because processes may be started on
        another machine. On ROCm, HIP's variable comes first. Empty for an accelerator whose variables are unknown.

    Example:
        >>> acc.visible_devices_envs()
        ('CUDA_VISIBLE_DEVICES',)
    """
    return _row().visible_devices


def set_visible_devices_envs(current_env: Environment, local_accelerator_ids: Iterable[int | str]) -> Environment:
    """Set the visible devices in the environment of a new process.

    Args:
        current_env: the environment of that process, changed in place. If it already limits the visible devices, the ids are
            indices into its list: with ``CUDA_VISIBLE_DEVICES=4,5``, id 1 is GPU 5.
        local_accelerator_ids: indices of devices, in the order that the process will see.

    Returns:
        ``current_env``.

    Raises:
        ValueError: if an id is not the index of a device in the environment's list, if an id is repeated, or if the variable's
            value is not understood. The environment is unchanged then.
        TypeError: if the environment is no mutable mapping of strings, or the ids are not iterable.
        RuntimeError: if no such variable is known for the accelerator.

    Example:
        >>> acc.set_visible_devices_envs({"CUDA_VISIBLE_DEVICES": "4,5"}, [1])["CUDA_VISIBLE_DEVICES"]
        '5'
    """
    if not isinstance(current_env, MutableMapping):
        raise TypeError(f"An environment must be a mutable mapping, such as a dict, not {type(current_env).__name__}")
    if isinstance(local_accelerator_ids, (str, bytes)) or not isinstance(local_accelerator_ids, Iterable):
        raise TypeError(f"The ids must be a list of indices, not {type(local_accelerator_ids).__name__}")
    row = _row()
    if not row.visible_devices:
        raise RuntimeError(f"No variable is known that decides which {row.device_type} devices a process sees")
    variable = row.visible_devices[0]
    limit = _limit(current_env, row)
    entries = [_entry(identifier, limit) for identifier in local_accelerator_ids]
    if len(set(entries)) < len(entries):
        raise ValueError(f"{','.join(entries)} repeats a device, which would hide every device")
    current_env[variable] = ",".join(entries)
    return current_env


class _Limit(NamedTuple):
    """The variable that limits an environment, its value, and its entry for each device; None if unlimited."""

    variable: str
    value: str
    entries: tuple[str, ...] | None


def _limit(env: MutableMapping[str, str], row: vendors.Vendor) -> _Limit:
    is_cuda_list = row.grammar == vendors.CUDA_LIST
    variable = discovery_cache.backend().limiting_variable(env) if is_cuda_list else row.visible_devices[0]
    visibility_variables.check(env, (*row.visible_devices, variable))
    value = env.get(variable)
    if value is None:
        count = _count(env, row)
        return _Limit(variable, "", None if count is None else tuple(map(str, range(count))))
    if is_cuda_list:
        entries: tuple[str, ...] | None = visibility.listed(value)
    elif row.grammar == vendors.TILES:
        entries = _tiles(value, whole_cards=env.get("ZE_FLAT_DEVICE_HIERARCHY") == "COMPOSITE")
    else:
        entries = () if not value else tuple(value.split(",")) if re.fullmatch("[0-9]+(,[0-9]+)*", value) else None
    if entries is None:
        raise ValueError(f"{variable}={visibility.quoted(value)} is not a list of devices; unset it")
    return _Limit(variable, value, entries)


def _count(env: MutableMapping[str, str], row: vendors.Vendor) -> int | None:
    """How many devices a process with this environment, which sets no variable, would see here; None if unknown."""
    if row.grammar == vendors.CUDA_LIST:
        return discovery_cache.for_environment(env).count or None
    # The other process sees as many devices as this one, unless a variable limits this one.
    return None if any(name in os.environ for name in row.visible_devices) else discovery_cache.current().count or None


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
    index = _index(identifier)
    variable, value, entries = limit
    if entries is None:
        return str(index)
    if index >= len(entries):
        state = f"{variable}={visibility.quoted(value)} lists" if value or not entries else "the number of visible devices is"
        raise ValueError(f"Device {index} is out of range: {state} {len(entries)}")
    return entries[index]


def _index(identifier: int | str) -> int:
    try:
        if isinstance(identifier, bool):
            raise TypeError
        index = operator.index(identifier)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    except TypeError:
        # int() would also take "1_0", "+1", " 1 ", "01" and the digits of other scripts.
        if not isinstance(identifier, str) or re.fullmatch("-?(0|[1-9][0-9]*)", identifier) is None:
            raise ValueError(f"A local accelerator id must be the index of a device, not {identifier!r}") from None
        index = int(identifier)
    if index < 0:
        raise ValueError(f"A local accelerator id must not be negative, but is {identifier!r}")
    return index


def export_envs() -> tuple[str, ...]:
    """Return the prefixes of the variables that a launcher should forward to its processes.

    Returns:
        Prefixes of names, such as "NCCL"; none if no accelerator is available.

    Example:
        >>> acc.export_envs()
        ('NCCL',)
    """
    return _row().export_prefixes if discovery_cache.current().count else ()


def communication_backend_name() -> str:
    """Return the backend of ``torch.distributed`` for the device.

    Returns:
        "nccl" (also for ROCm's RCCL), "xccl", ...; a backend that a plug-in registered with ``torch.distributed`` for its
        device; "gloo" for the CPU, for accelerators without a backend of their own, and on Windows, which has no NCCL.

    Example:
        >>> acc.communication_backend_name()
        'nccl'
    """
    used = device_type()
    # A plug-in registers its backend with torch.distributed, which has to be imported for that.
    backends = getattr(getattr(sys.modules.get("torch.distributed"), "Backend", None), "default_device_backend_map", {})
    registered: str | None = backends.get(used)
    # torch's backend for tests registers itself for each device type that has none.
    name = registered if registered not in (None, "fake") else vendors.get_row(used).communication_backend
    return "gloo" if name == "nccl" and sys.platform == "win32" else name


def communication_backend_version() -> tuple[int, ...] | None:
    """Return the version of the communication backend.

    Returns:
        Major, minor and patch of NCCL, from an imported torch, else from the installed package; None for other backends, and if
        unknown.

    Example:
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
