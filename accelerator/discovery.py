"""Is there an accelerator, how many, which: answered without importing torch and without touching the device's runtime."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from ._machine import cuda, description, device_argument, driver, nvml, probe, process, rocm, strict, torch_build
from ._machine.compiled import constant
from ._machine.cuda import Found, Seen
from ._machine.description import VisibleDevice
from ._machine.device_argument import Device

__all__ = [
    "Device",
    "VisibleDevice",
    "device_count",
    "driver_cuda_version",
    "driver_version",
    "get_device_name",
    "is_available",
    "is_fork_safe",
    "is_in_bad_fork",
    "is_initialized",
    "refresh",
    "unavailable_reason",
    "visible_devices",
]

BAD_FORK = (
    "this process was forked after its parent had initialized the accelerator, which cannot be used again in the child; "
    "start processes with 'spawn' or 'forkserver', or fork before the accelerator is used"
)


_driver_count = driver.device_count
_torch_accelerator = process.torch_accelerator
_environment = process.environment

# The last answer, with all that it was an answer to: the environment, the accelerator's type, the driver's count if it is up.
_asked: object = None
_found: Found = Found(0, None, "")

# The same for an answer that has to be looked into again on every call, and until when it holds.
_passing: tuple[object, float] = (None, 0.0)

_FOREVER = float("inf")


@constant
def device_count() -> int:
    """Return how many devices torch can use: what the driver would enumerate in a fresh process.

    The present ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER`` are followed until something in this process initializes
    the driver; from then on its count stands. MIG instances are counted as the driver counts them, and there is no cap.

    Returns:
        The number of visible devices; 0 when this torch could use none, for the reason that ``unavailable_reason`` gives.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.device_count() >= 0
        True
    """
    key = _driver_count(), _torch_accelerator(), _environment()
    return _found.number if key == _asked else _answer(key).number


def _answer(key: tuple[int | None, Any, tuple[Any, ...]]) -> Found:
    """Find out anew, and remember the answer for as long as nothing that it depends on changes."""
    global _asked, _found, _passing
    rocm = torch_build.is_rocm()
    # ROCm's runtime cannot be asked whether it is up without starting it: torch's word has to do, and costs more.
    full_key = (rocm and process.torch_is_up(), *key)
    if full_key == _passing[0] and time.monotonic() < _passing[1]:
        return _found
    _found = _count(key[0])
    _asked = key if _found.lasting and not rocm else None
    _passing = full_key, _FOREVER if _found.lasting else time.monotonic() + nvml.RETRY_AFTER_S
    return _found


def _count(driver_count: int | None) -> Found:
    accelerator = torch_build.accelerator_type()
    if accelerator is None:
        return Found(0, _no_accelerator(), "torch's build", ())
    if accelerator != "cuda" or (torch_build.is_rocm() and process.torch_is_up()):
        return _count_of_torch(accelerator)
    if torch_build.is_rocm():
        return rocm.find(os.environ)
    if driver_count is not None:
        return cuda.of_driver(driver_count)
    return cuda.count(os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"))


def _no_accelerator() -> str:
    if os.environ.get("ACCELERATOR_BACKEND") == "cpu":
        return "ACCELERATOR_BACKEND=cpu keeps the accelerator out of use; unset it"
    build = torch_build.read()
    if build is None:
        return "torch is not installed in this Python; install it with 'pip install torch'"
    return f"torch {build.version} is a CPU build; install one that is built for the accelerator"


def _count_of_torch(accelerator: str) -> Found:
    import torch

    module: Any = getattr(torch, accelerator)
    count: int = module.device_count() if hasattr(module, "device_count") else int(module.is_available())
    devices = tuple(Seen(None, None, probe.Device(None, accelerator, None, None, None)) for _ in range(count))
    return Found(count, None if count else f"torch finds no usable {accelerator} device", "torch", devices)


def last_found() -> Found:
    """The answer that ``device_count`` gave last, for the rooms that need more of it than the count."""
    return _found


@constant
def is_available(*, strict: bool = False) -> bool:
    """Return whether at least one device is there that torch could use.

    Args:
        strict: also have a child process create a context on every visible device, which tells devices that are listed
            but broken, or kept by others. Its answer is kept for the present environment.

    Returns:
        True if torch can be expected to work on the accelerator. A child forked from a process that had initialized the
        accelerator cannot use it and gets False.

    Fork: safe, initializes nothing; with ``strict`` a child process initializes the driver for itself.

    Example:
        >>> import accelerator as acc
        >>> acc.is_available() == (acc.unavailable_reason() is None)
        True
    """
    if device_count() == 0 or process.is_in_bad_fork():
        return False
    return not strict or _strict_problem() is None


# What the strict look found wrong, and the answer whose devices it looked at.
_tried: tuple[Found | None, str | None] = (None, None)


def _strict_problem() -> str | None:
    """What a child process finds wrong with the visible devices."""
    global _tried
    devices = devices_found()
    if _tried[0] is not _found:
        _tried = _found, strict.problem(devices)
    return _tried[1]


def unavailable_reason() -> str | None:
    """Return why no accelerator is available.

    Returns:
        None when ``is_available()``; else one sentence that names the most specific cause and what to do about it. After
        ``is_available(strict=True)`` found a device that is listed but unusable, that device and its error.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> reason = acc.unavailable_reason()
        >>> reason is None or reason.count(chr(10)) == 0
        True
    """
    if device_count() == 0:
        return _found.problem
    if process.is_in_bad_fork():
        return BAD_FORK
    return _tried[1] if _tried[0] is _found else None


def visible_devices(env: Mapping[str, str] | None = None) -> tuple[VisibleDevice, ...]:
    """Return the devices that torch can use, in torch's order.

    Args:
        env: the environment of a process yet to be started, whose variables decide what it will see; this process's own
            if None.

    Returns:
        One entry a device, the position being the index that torch uses; empty when no accelerator is available.

    Fork: safe, initializes nothing; where only the driver can tell, a child process asks it.

    Example:
        >>> import accelerator as acc
        >>> [device.index for device in acc.visible_devices()] == list(range(acc.device_count()))
        True
    """
    devices = _devices_of(env) if env is not None else devices_found()
    return tuple(description.describe(index, device) for index, device in enumerate(devices))


def _devices_of(env: Mapping[str, str]) -> tuple[Seen, ...]:
    accelerator = torch_build.accelerator_type(env)
    if accelerator is None:
        return ()
    if accelerator != "cuda":
        return devices_found()
    if torch_build.is_rocm():
        return rocm.find(env).devices or ()
    return cuda.devices(env.get("CUDA_VISIBLE_DEVICES"), env.get("CUDA_DEVICE_ORDER")).devices or ()


def devices_found() -> tuple[Seen, ...]:
    """The visible devices with their NVML handles, kept as long as the count is."""
    global _found
    if device_count() and _found.devices is None:
        _found = cuda.devices(os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"))
    return _found.devices or ()


def get_device_name(device: Device = None) -> str:
    """Return the product name of a device.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device (0 while nothing is initialized).

    Returns:
        The name, from NVML before the accelerator is initialized; "cpu" when the CPU stands in.

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> isinstance(acc.get_device_name(), str)
        True
    """
    index = visible_index(device)
    return visible_devices()[index].name if device_count() else "cpu"


def visible_index(device: Device) -> int:
    """The index of a visible device, or 0 for the CPU where it stands in; None is the current device, 0 before there is one."""
    count = device_count()
    accelerator = (torch_build.accelerator_type() if count else None) or "cpu"
    index = device_argument.index(device, accelerator)
    if index is None:
        return _current_index()
    return device_argument.check(index, count or 1, accelerator)


def _current_index() -> int:
    if not process.torch_is_up():
        return 0
    torch: Any = sys.modules["torch"]
    index: int = torch.accelerator.current_device_index()
    return index


@constant
def is_initialized() -> bool:
    """Return whether torch has initialized the accelerator in this process.

    Returns:
        False before the first use of the accelerator, without torch, and in a child forked from a process that used it.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> isinstance(acc.is_initialized(), bool)
        True
    """
    return process.torch_is_up()


def is_in_bad_fork() -> bool:
    """Return whether this process was forked from one that had initialized the accelerator, whoever had done so.

    Returns:
        True if the accelerator cannot be used here for that reason. Where this package was imported only after the fork,
        what torch knows.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.is_in_bad_fork()
        False
    """
    return process.is_in_bad_fork()


def is_fork_safe() -> bool:
    """Return whether a child forked now could use the accelerator.

    A driver library that is loaded but not initialized does no harm; initialized by anything in this process, torch or
    other, it does. No library is loaded to find out.

    Returns:
        True if nothing in this process has initialized the accelerator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> isinstance(acc.is_fork_safe(), bool)
        True
    """
    return process.is_fork_safe()


def refresh() -> None:
    """Forget which devices were enumerated, as after a device was lost or MIG was reconfigured; the next question looks anew.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.refresh()
    """
    global _asked, _passing, _tried
    _asked, _passing, _tried = None, (None, 0.0), (None, None)
    nvml.forget()
    cuda.forget()
    rocm.forget()


def driver_version() -> str | None:
    """Return the version of the installed NVIDIA driver, such as "580.65.06".

    Returns:
        The version, or None where NVML cannot tell.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> version = acc.driver_version()
    """
    try:
        return nvml.driver_version()
    except nvml.Unavailable:
        return None


def driver_cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the installed driver supports.

    Returns:
        Major and minor, such as (13, 0), or None where NVML cannot tell.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> version = acc.driver_cuda_version()
    """
    try:
        return nvml.cuda_version()
    except nvml.Unavailable:
        return None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=refresh)
