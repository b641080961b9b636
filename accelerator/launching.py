"""The environment of processes to start: what they may see, what to forward to them, how they talk to each other."""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Iterable, MutableMapping
from typing import Any, NamedTuple, TypeVar

from . import discovery
from ._machine import discovery_cache, grammar, process, torch_build

__all__ = [
    "communication_backend_name",
    "communication_backend_version",
    "export_envs",
    "set_visible_devices_envs",
    "visible_devices_envs",
]

Environment = TypeVar("Environment", bound=MutableMapping[str, str])

# CUDA's and ROCm's are their backends' own.
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
        >>> acc.visible_devices_envs()
        ('CUDA_VISIBLE_DEVICES',)
    """
    name = _VISIBLE.get(torch_build.accelerator_type() or "cuda")
    return (name,) if name else discovery_cache.backend().VARIABLES


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
            every device; or if the variable has a value whose grammar is not known here. Nothing is changed then.
        TypeError: if the environment is no mapping that can be changed, or the ids are not a series of them.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.set_visible_devices_envs({"CUDA_VISIBLE_DEVICES": "4,5"}, [1])["CUDA_VISIBLE_DEVICES"]
        '5'
    """
    if not isinstance(current_env, MutableMapping):
        raise TypeError(f"An environment is a mapping that can be changed, as a dict, not {type(current_env).__name__}")
    if isinstance(local_accelerator_ids, (str, bytes)) or not isinstance(local_accelerator_ids, Iterable):
        raise TypeError(f"The ids are a series of indices, as a list, not {type(local_accelerator_ids).__name__}")
    variable = visible_devices_envs()[0]
    let_through = _let_through(current_env, variable)
    chosen = [_entry(identifier, let_through) for identifier in local_accelerator_ids]
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"A device comes twice among {','.join(chosen)}, which would hide every device")
    current_env[variable] = ",".join(chosen)
    return current_env


class _LetThrough(NamedTuple):
    """What a variable lets through: how each device is named in it; None where it is not set."""

    variable: str
    value: str
    entries: tuple[str, ...] | None


def _let_through(env: MutableMapping[str, str], variable: str) -> _LetThrough:
    others = variable in _VISIBLE.values()
    limiting = variable if others else discovery_cache.backend().limiting(env)
    value = env.get(limiting)
    if value is None:
        return _LetThrough(limiting, "", None)
    if variable == "ZE_AFFINITY_MASK":
        entries = _tiles(value, whole_cards=env.get("ZE_FLAT_DEVICE_HIERARCHY") == "COMPOSITE")
    elif others:
        entries = () if not value else tuple(value.split(",")) if re.fullmatch("[0-9]+(,[0-9]+)*", value) else None
    else:
        entries = grammar.listed(value)
    if entries is None:
        raise ValueError(f"{limiting}={grammar.quoted(value)} is no list of devices that ids could be counted in; unset it")
    return _LetThrough(limiting, value, entries)


def _tiles(mask: str, *, whole_cards: bool) -> tuple[str, ...] | None:
    """The devices of an affinity mask of Level Zero: cards as in "0", or tiles of them as in "0.1", whatever their order.

    Args:
        mask: the value.
        whole_cards: whether all tiles of a card that it lets through are one device.
    """
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?(,[0-9]+(\.[0-9]+)?)*", mask) is None:
        return () if mask == "" else None
    tiles = sorted({tuple(int(number) for number in entry.split(".")) for entry in mask.split(",")})
    if not whole_cards:
        return tuple(".".join(map(str, tile)) for tile in tiles)
    cards = sorted({tile[0] for tile in tiles})
    return tuple(",".join(".".join(map(str, tile)) for tile in tiles if tile[0] == card) for card in cards)


def _entry(identifier: int | str, let_through: _LetThrough) -> str:
    try:
        if isinstance(identifier, bool):
            raise TypeError
        index = int(identifier) if isinstance(identifier, str) else operator.index(identifier)
    except (TypeError, ValueError):
        raise ValueError(f"A local accelerator id is the index of a device, not {identifier!r}") from None
    if index < 0:
        raise ValueError(f"A local accelerator id is not negative, as {identifier!r} is")
    variable, value, entries = let_through
    if entries is None:
        return str(index)
    if index >= len(entries):
        raise ValueError(f"There is no device {index} among the {len(entries)} of {variable}={grammar.quoted(value)}")
    return entries[index]


def export_envs() -> tuple[str, ...]:
    """Return the prefixes of the variables that a launcher should forward to the processes that it starts.

    Returns:
        Prefixes of names, such as "NCCL"; none when no accelerator is available.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.export_envs()
        ('NCCL',)
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
        >>> acc.communication_backend_name()
        'nccl'
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
        >>> acc.communication_backend_version() >= (2, 20)
        True
    """
    if communication_backend_name() != "nccl":
        return None
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        try:
            version: tuple[int, ...] = torch.cuda.nccl.version()
        except AttributeError:  # built without NCCL, torch has no binding for it
            return None
        return version
    build = torch_build.read()
    if build is None or build.cuda is None:
        return None
    process.import_modules("importlib.metadata")
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as version_of

    try:
        return tuple(int(part) for part in version_of(f"nvidia-nccl-cu{build.cuda.partition('.')[0]}").split(".")[:3])
    except (PackageNotFoundError, ValueError):
        return None
