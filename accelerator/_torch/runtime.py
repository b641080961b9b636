"""The accelerator as torch has it: which one, whether it is up, whether the CPU stands in. The only room that imports torch's
private bindings; the other rooms take them from here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from typing import Any, NamedTuple, NoReturn

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

# The type of the device that functions act on, as the last look found it.
kind = "cpu"

# What strings and devices with an index turned out to name once it was up: to look one up is cheaper than to read it again.
known: dict[str | torch.device, int] = {}

get_index = _C._accelerator_getDeviceIndex
set_index = _C._accelerator_setDeviceIndex
get_stream = _C._accelerator_getStream
set_stream = _C._accelerator_setStream
synchronize = _C._accelerator_synchronizeDevice


class Look(NamedTuple):
    """What a look found.

    Attributes:
        kind: the type of the device that functions act on: the accelerator's, or "cpu" where the CPU stands in.
        given: what the device argument names: a visible device, None for the current one, or a negative index.
        up: whether the accelerator is initialized.
    """

    kind: str
    given: int | None
    up: bool

    @property
    def number(self) -> int:
        """The index of the device that is meant: of the current one, 0 before there is one, unless the argument names one."""
        if self.given is None or self.given < 0:
            return get_index() if self.up else 0
        return self.given


def look(device: Any = None, *, optional: bool = True, negative: bool = False, poisoned: bool = False) -> Look:
    """What is there now, and what a device argument names of it; initializes nothing.

    Every function that does not find the accelerator up comes here, and nothing else changes what was found.

    Args:
        device: the device argument.
        optional: whether None and a device without an index may stand for the current device.
        negative: whether a negative index means something to the function; it is out of range otherwise.
        poisoned: whether the function has an answer in a child that cannot use the accelerator for a fork's sake.

    Raises:
        RuntimeError: in such a child otherwise; and for a string that names no device.
        ValueError, TypeError: as ``device_argument.index``; ValueError also for an index that is out of range.
    """
    global count, kind
    visible = count
    if not up:
        in_bad_fork = process.is_in_bad_fork()
        if in_bad_fork and not poisoned:
            refuse()
        visible = discovery.device_count()
        kind = (torch_build.accelerator_type() if visible else None) or "cpu"
        if kind != "cpu" and not in_bad_fork and process.is_initialized():
            count = visible
            up.append(True)
    number = device_argument.index(device, kind, optional=optional or kind == "cpu")
    if number is not None and not (negative and number < 0):
        number = device_argument.check(number, visible or 1, kind)
        if up and isinstance(device, (str, torch.device)):
            known[device] = number
    return Look(kind, number, bool(up))


def refuse() -> NoReturn:
    """Raise the RuntimeError that names the fix where the accelerator cannot be used for a fork's sake."""
    raise RuntimeError(f"The accelerator cannot be used: {discovery.BAD_FORK}.")


def initialize(device: Any = None, *, negative: bool = False) -> Look:
    """Look, and initialize the accelerator if there is one and nobody has; an error in the argument is no reason to.

    Raises:
        RuntimeError, ValueError, TypeError: as ``look``; RuntimeError also if torch cannot.
    """
    seen = look(device, negative=negative)
    if seen.up or seen.kind == "cpu":
        return seen
    device_module().init()
    return look(device, negative=negative)


def resolve(device: Any, *, optional: bool = True, negative: bool = False) -> int:
    """The index of the device that an argument names once the accelerator is up; a negative one may be left as it is."""
    try:
        return known[device]
    except (KeyError, TypeError):
        pass  # and the error that the look may raise is not one that came while handling this
    number = look(device, optional=optional, negative=negative).given
    return get_index() if number is None else number


def device_module() -> Any:
    """torch's module for the device that functions act on: ``torch.cuda``, ``torch.xpu``, ..., ``torch.cpu``."""
    return getattr(torch, kind)


def device_count() -> int:
    """How many devices there are, which no environment changes any more once they are up."""
    return count if up else discovery.device_count()


def compute_capability() -> tuple[int, int]:
    """The current CUDA device's compute capability, without initializing anything; (0, 0) where nobody can tell it."""
    return capability_of(look().number) or (0, 0)


def capability_of(number: int) -> tuple[int, int] | None:
    """A device's compute capability, without initializing anything; None where nobody can tell it, and on ROCm."""
    if up and torch.version.cuda:
        return torch.cuda.get_device_capability(number)
    return discovery.compute_capability(number)


def explain(number: Any, error: Exception) -> Exception:
    """What to raise for a call that failed on a device: the clear ValueError if its index is the reason, else the error."""
    try:
        device_argument.check(number, count, kind)
    except (TypeError, ValueError) as out_of_range:
        return out_of_range if isinstance(out_of_range, ValueError) else error
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
    python = process.python()
    if python is None:
        raise RuntimeError(
            "What this torch is compiled for can only be asked in a child process, and there is no Python executable to start "
            "one; once the accelerator is initialized it is asked here"
        )
    folders = [os.fspath(folder) for folder in sys.path]
    code = f"import sys; sys.path[:] = {folders!r}; import torch; print(torch._C.{binding}() or '')"
    said = "A child process could not tell what this torch is compiled for"
    try:
        child = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=120, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{said}: {error}") from error
    if child.returncode:
        raise RuntimeError(f"{said}: {child.stderr.strip()[-500:]}")
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
set_sync_debug_mode = _first("_cuda_set_sync_debug_mode")
get_sync_debug_mode = _first("_cuda_get_sync_debug_mode")
_default_generator = _first("_accelerator_getDefaultGenerator")

# The bindings of NVTX, which CUDA builds have, or None.
nvtx = _first("_nvtx")


def host_allocator(binding: str) -> Any:
    """A binding for CUDA's allocator of pinned host memory, or None where this torch has none: before 2.7."""
    return _first(f"_cuda_{binding}")


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


@process.reset_after_fork
def _reset_after_fork() -> None:
    up.clear()
    known.clear()
