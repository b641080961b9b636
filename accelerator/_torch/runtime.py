"""The accelerator as torch has it: which one, whether it is up, whether the CPU stands in. The only room that imports torch's
private bindings; the other rooms take them from here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from typing import Any

import torch
from torch import _C

from .. import discovery
from .._machine import device_argument, process, torch_build

# Not empty once the accelerator is initialized in this process. It never goes back, but for a fork, so functions that find it
# so may call torch's bindings at once. A list, for the rooms of the hottest calls to hold: a name of their own is looked up
# faster than one of this module's.
up: list[bool] = []

# How many devices there are once it is: the driver's count does not change any more.
count = 0

# What the last look found, for code under torch.compile, which cannot trace the look itself and may be the first to come.
kind: str = (torch_build.accelerator_type() if discovery.device_count() else None) or "cpu"

get_index = _C._accelerator_getDeviceIndex
set_index = _C._accelerator_setDeviceIndex
get_stream = _C._accelerator_getStream
set_stream = _C._accelerator_setStream
synchronize = _C._accelerator_synchronizeDevice


def absent() -> bool:
    """Whether there is no usable accelerator, so that the CPU stands in for it; initializes nothing.

    Raises:
        RuntimeError: in a child forked from a process that had initialized the accelerator.
    """
    global kind
    if up:
        return False
    refuse_in_bad_fork()
    if discovery.device_count() == 0:
        kind = "cpu"
        return True
    kind = torch_build.accelerator_type() or "cpu"
    initialized()
    return False


def refuse_in_bad_fork() -> None:
    """Raise the RuntimeError that names the fix where the accelerator cannot be used for a fork's sake."""
    if process.is_in_bad_fork():
        raise RuntimeError(f"The accelerator cannot be used: {discovery.BAD_FORK}.")


def initialized() -> bool:
    """Whether torch has initialized the accelerator in this process."""
    global count
    # Backends without lazy initialization are up as soon as they are there.
    if not up and kind != "cpu" and (process.torch_is_up() or not hasattr(device_module(), "is_initialized")):
        count = discovery.device_count()
        up.append(True)
    return bool(up)


def initialize() -> None:
    """Initialize the accelerator if there is one and nobody has.

    Raises:
        RuntimeError: if torch cannot, or in a child forked from a process that had.
    """
    if not absent() and not initialized():
        device_module().init()
        initialized()


def device_type() -> str:
    """The type of the device that functions act on: the accelerator's, or "cpu" where the CPU stands in."""
    absent()
    return kind


def device_module() -> Any:
    """torch's module for the device that functions act on: ``torch.cuda``, ``torch.xpu``, ..., ``torch.cpu``."""
    return getattr(torch, kind)


def index(device: Any, *, optional: bool = True) -> int | None:
    """What a device argument names, before it is known whether the accelerator is up.

    Returns:
        A negative index, an index that is visible, or None for the current device.

    Raises:
        ValueError, RuntimeError, TypeError: as ``device_argument.index``; ValueError also for an index that is out of range.
    """
    visible = 1 if absent() else discovery.device_count()
    number = device_argument.index(device, kind, optional=optional)
    if number is not None and number >= 0:
        _remember(device, device_argument.check(number, visible, kind))
    return number


def visible_index(device: Any) -> int:
    """As ``index``, for functions to which a negative index means nothing: it is out of range; None is the current device."""
    number = index(device)
    if number is None:
        return get_index() if up else 0
    return check(number)


def check(number: int) -> int:
    """The index itself if a device has it; to be called after a look at what is there."""
    return device_argument.check(number, 1 if kind == "cpu" else discovery.device_count(), kind)


# What strings and devices with an index turned out to name, all within range: to look one up is cheaper than to read it again.
known: dict[str | torch.device, int] = {}


def resolve(device: Any, *, optional: bool = True) -> int:
    """What a device argument names once the accelerator is up, None being the current device; ranges are left to torch."""
    try:
        return known[device]
    except (KeyError, TypeError):
        number = device_argument.index(device, kind, optional=optional)
    if number is None:
        return get_index()
    _remember(device, number)
    return number


def _remember(device: Any, number: int) -> None:
    if up and isinstance(device, (str, torch.device)) and 0 <= number < count:
        known[device] = number


def compute_capability() -> tuple[int, int]:
    """The current CUDA device's compute capability, without initializing anything; (0, 0) where nobody can tell it."""
    return discovery.visible_devices()[visible_index(None)].compute_capability or (0, 0)


def explain(number: int, error: Exception) -> Exception:
    """What to raise for a call that failed on a device: the clear ValueError if its index is the reason, else the error."""
    try:
        device_argument.check(number, discovery.device_count(), kind)
    except ValueError as out_of_range:
        return out_of_range
    return error


def function(name: str) -> Any:
    """The function of that name that torch has for the accelerator.

    Raises:
        RuntimeError: if it has none.
    """
    found = getattr(device_module(), name, None) or getattr(getattr(device_module(), "memory", None), name, None)
    if found is None:
        raise RuntimeError(f"torch {torch.__version__} has no torch.{kind}.{name}()")
    return found


def without_allocator(error: Exception) -> bool:
    """Whether a call failed because the backend has no allocator that torch knows of, which torch only finds by asserting."""
    return "device_allocator INTERNAL ASSERT" in str(error)


def built_for() -> str | None:
    """The type of the accelerator that this torch is built for, whatever the environment says."""
    return process.torch_accelerator_type()


def arch_flags() -> str | None:
    """The architectures that this torch is compiled for, in one string; initializes nothing."""
    name = f"_{built_for()}_getArchFlags"
    flags: Any = getattr(_C, name, None)
    if flags is None:
        return None
    # CUDA's initializes nothing, but from then on torch refuses to work in forked children.
    return flags() if up or built_for() != "cuda" else _ask_child(name)


@cache
def _ask_child(binding: str) -> str:
    code = f"import sys; sys.path[:] = {sys.path!r}; import torch; print(torch._C.{binding}() or '')"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    if child.returncode:
        raise RuntimeError(f"A child process could not tell what this torch is compiled for: {child.stderr.strip()[-500:]}")
    return child.stdout


def _exchange(number: int) -> int:
    previous: int = get_index()
    set_index(number)
    return previous


def _first(*names: str) -> Any:
    """The first of these bindings that this torch has: newer releases have one for all accelerators, older ones CUDA's."""
    return next((getattr(_C, name) for name in names if hasattr(_C, name)), None)


exchange_index = _first("_accelerator_exchangeDevice", "_cuda_exchangeDevice") or _exchange
restore_index = _first("_accelerator_maybeExchangeDevice", "_cuda_maybeExchangeDevice") or _exchange
memory_statistics = _first("_accelerator_getDeviceStats", "_cuda_memoryStats")
memory_info = _first("_accelerator_getMemoryInfo") or torch.cuda.mem_get_info
reset_peak_memory_stats = _first("_accelerator_resetPeakStats", "_cuda_resetPeakMemoryStats")
reset_accumulated_memory_stats = _first("_accelerator_resetAccumulatedStats", "_cuda_resetAccumulatedMemoryStats")
empty_cache = _first("_accelerator_emptyCache", "_cuda_emptyCache")
empty_host_cache = _first("_accelerator_emptyHostCache", "_host_emptyCache")
host_memory_statistics = _first("_cuda_hostMemoryStats")
set_sync_debug_mode = _first("_cuda_set_sync_debug_mode")
get_sync_debug_mode = _first("_cuda_get_sync_debug_mode")
_default_generator = _first("_accelerator_getDefaultGenerator")

# The bindings of NVTX, which CUDA builds have, or None.
nvtx = _first("_nvtx")


def generator(number: int) -> torch.Generator:
    """The generator that random functions use on a device that is initialized, or the CPU's where it stands in."""
    if kind == "cpu":
        return torch.default_generator
    generators = getattr(device_module(), "default_generators", ())
    if number < len(generators):
        found: torch.Generator = generators[number]
        return found
    if _default_generator is None:
        raise RuntimeError(f"torch {torch.__version__} knows no generator of {kind}:{number}")
    return _default_generator(number)


def _begin_anew() -> None:
    up.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
