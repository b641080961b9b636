"""Discovery of accelerators: whether one is available, how many devices are visible, and which.

The functions are fork-safe: they initialize nothing in this process. If NVML cannot answer, or does not know the order of
different GPUs, a child process asks the driver. A child process imports torch to find an accelerator that only torch or one of
its plug-ins knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ._machine import description, device_argument, discovery_cache, process, torch_runtime, usability, visibility_variables
from ._machine.description import PhysicalDevice, VisibleDevice
from ._machine.device_argument import Device
from ._machine.discovery_result import DiscoveryResult
from ._machine.dynamo import assume_constant

__all__ = [
    "Device",
    "PhysicalDevice",
    "VisibleDevice",
    "device_count",
    "device_name",
    "get_device_index",
    "is_available",
    "is_fork_safe",
    "is_in_bad_fork",
    "is_initialized",
    "physical_devices",
    "refresh",
    "unavailable_reason",
    "usable_devices",
    "visible_devices",
]

_DIGITS = re.compile("0|[1-9][0-9]*")

_current = discovery_cache.current


@assume_constant
def device_count() -> int:
    """Return how many devices torch can use, which is what the driver would enumerate in a fresh process.

    The count follows ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER`` until something in this process initializes the driver.
    It is then frozen. MIG instances are counted as the driver counts them.

    Returns:
        The number of visible devices; 0 if this torch can use none (``unavailable_reason`` says why). It includes
        devices that NVML lists and whose driver does not start, until a function of this package fails to initialize it;
        ``usable_devices`` leaves them out at once.

    Example:
        >>> acc.device_count()
        2
    """
    return _current().count


@assume_constant
def is_available(*, strict: bool = False) -> bool:
    """Return whether at least one device that torch can use is listed.

    Args:
        strict: also create a context on every visible device, in a child process. This detects devices that are broken or in
            use by others. A success is cached for the environment, a failure for a second, a busy device not at all.

    Returns:
        True if the accelerator is listed and fits torch; False in a child forked from a process that had initialized it, and
        after a function of this package failed to initialize it, until ``refresh()``. Without ``strict``, a listed device whose
        driver does not start counts as available until then.

    May start: a child process.

    Example:
        >>> acc.is_available(), acc.is_available(strict=True)
        (True, True)
    """
    if not strict:
        return _current().count > 0 and not process.is_in_bad_fork()
    return unavailable_reason(strict=True) is None


def unavailable_reason(*, strict: bool = False) -> str | None:
    """Return why no accelerator is available.

    Args:
        strict: also report devices that ``is_available(strict=True)`` finds unusable.

    Returns:
        None if ``is_available(strict=strict)``; else one sentence with the most specific cause and the remedy. After a
        function of this package failed to initialize the accelerator, torch's error.

    May start: a child process.

    Example:
        >>> import os
        >>> os.environ["CUDA_VISIBLE_DEVICES"] = "5"
        >>> acc.unavailable_reason()
        "CUDA_VISIBLE_DEVICES='5' hides every GPU: '5' is beyond the 2 GPUs of this machine, which ends the list"
        >>> del os.environ["CUDA_VISIBLE_DEVICES"]
        >>> acc.unavailable_reason() is None
        True
    """
    result = _current()
    if result.count == 0:
        return result.problem
    if process.is_in_bad_fork():
        return process.BAD_FORK
    return usability.problem(result) if strict else None


def visible_devices(env: Mapping[str, str] | None = None) -> tuple[VisibleDevice, ...]:
    """Return the devices that torch can use, in torch's order.

    Args:
        env: the environment of a process that will be started; None for this process.

    Returns:
        One entry per device, at the position that torch uses as index; empty if no accelerator is available.

    Raises:
        TypeError: if ``env`` is no mapping of strings.

    Example:
        >>> [(device.index, device.name) for device in acc.visible_devices()]
        [(0, 'Simulated GPU'), (1, 'Simulated GPU')]
        >>> [device.physical_index for device in acc.visible_devices({"CUDA_VISIBLE_DEVICES": "1"})]
        [1]
    """
    if env is not None and not isinstance(env, Mapping):
        raise TypeError(f"env must be a mapping of variables, such as os.environ, not {type(env).__name__}")
    if env is None:
        return _described(_current())
    visibility_variables.check(env)
    return _described(discovery_cache.for_environment(env))


def _described(result: DiscoveryResult) -> tuple[VisibleDevice, ...]:
    return tuple(description.visible(index, device, result.backend) for index, device in enumerate(result.devices))


def physical_devices() -> tuple[PhysicalDevice, ...]:
    """Return every GPU and MIG instance of the machine, whatever torch and the environment say.

    This is for schedulers and dashboards. It needs no torch.

    Returns:
        The GPUs in NVML's (or amdsmi's) order, each followed by its MIG instances; empty if neither library lists any.

    Example:
        >>> import os
        >>> os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        >>> [(device.index, device.visible_index) for device in acc.physical_devices()]
        [(0, None), (1, 0)]
        >>> del os.environ["CUDA_VISIBLE_DEVICES"]
    """
    backend, devices = discovery_cache.physical()
    indices = {(device.gpu and device.gpu.physical_index, device.mig): index for index, device in enumerate(_current().devices)}
    return tuple(
        description.physical(device, backend, indices.get((device.gpu and device.gpu.physical_index, device.mig)))
        for device in devices
    )


def usable_devices() -> tuple[VisibleDevice, ...]:
    """Return the visible devices that can be used now: a child process could create a context on them.

    Returns:
        Entries of ``visible_devices`` without devices that are broken, full, or in exclusive use. Every call probes again.
        Empty in a child forked from a process that had initialized the accelerator.

    May start: a child process.

    Example:
        >>> [device.index for device in acc.usable_devices()]
        [0, 1]
    """
    result = _current()
    if result.count == 0 or process.is_in_bad_fork():
        return ()
    is_usable = usability.usable(result)
    return tuple(device for device, usable in zip(_described(result), is_usable, strict=True) if usable)


def get_device_index(device: Device = None, *, optional: bool = True) -> int:
    """Return the index that a device argument names, as the functions of this package read it.

    Args:
        device: a device argument.
        optional: whether None and a device without an index may mean the current device. The default is False in
            ``torch.cuda``'s function of this name.

    Returns:
        The index of a visible device; for None that of the current device, which is 0 before initialization.

    Example:
        >>> acc.get_device_index("cuda:1")
        1
    """
    return index_in(_current(), device, optional=optional)


@assume_constant
def device_name(device_index: Device = None) -> str:
    """Return a device's name in torch, such as "cuda:1"; ``get_device_name`` returns the product name.

    Args:
        device_index: a device argument, or an index as a string of digits; None for the name without an index.

    Returns:
        "cuda", "cuda:1", ...; "cpu" under the CPU fallback.

    Example:
        >>> acc.device_name(), acc.device_name(1)
        ('cuda', 'cuda:1')
    """
    result = _current()
    if isinstance(device_index, str) and _DIGITS.fullmatch(device_index):
        device_index = int(device_index)
    index = device_argument.index(device_index, result.device_type)
    if index is None or result.device_type == "cpu":
        device_argument.check(index or 0, result.count or 1, result.device_type)
        return result.device_type
    return f"{result.device_type}:{device_argument.check(index, result.count, result.device_type)}"


def resolve_device(device: Device) -> tuple[DiscoveryResult, int]:
    """The discovery result, and the index in it that a device argument names; 0 under the CPU fallback."""
    result = _current()
    return result, index_in(result, device)


def index_in(result: DiscoveryResult, device: Device, *, optional: bool = True) -> int:
    """The index in a discovery result that a device argument names."""
    if type(device) is int and 0 <= device < result.count:
        return device
    index = device_argument.index(device, result.device_type, optional=optional)
    if index is None:
        index = current_index()
    return device_argument.check(index, result.count, result.device_type)


def current_index() -> int:
    """The index of the current device, 0 before initialization."""
    return torch_runtime.current_index() if process.is_initialized() else 0


@assume_constant
def is_initialized() -> bool:
    """Return whether the accelerator is initialized in this process, through torch.

    Returns:
        False before the first use of the accelerator, without torch, and in a child forked from a process that used it. A
        backend without lazy initialization is initialized when it is loaded.

    Example:
        >>> acc.init()
        >>> acc.is_initialized()
        True
    """
    return process.is_initialized()


def is_in_bad_fork() -> bool:
    """Return whether this process was forked from one that had initialized the accelerator, through torch or not.

    Returns:
        True if the accelerator cannot be used for that reason. Also True if torch refuses to use it, as in the children of a
        process that counted devices through torch. Only torch's answer counts if this package was imported after the fork.

    Example:
        >>> acc.is_in_bad_fork()
        False
    """
    return process.is_in_bad_fork()


def is_fork_safe() -> bool:
    """Return whether a child forked now could use the accelerator.

    An initialized driver breaks fork, whether torch or other code initialized it. A library that is only loaded does not.
    No library is loaded to find out.

    Returns:
        False after the driver is initialized in this process, and in a child of such a process.

    Example:
        >>> acc.init()
        >>> acc.is_fork_safe()
        False
    """
    return process.is_fork_safe()


def refresh() -> None:
    """Drop the cached discovery result, NVML's session, and the failure of an initialization.

    Call this after a device appeared or was lost, after MIG was reconfigured, or to try an initialization again that failed.

    Example:
        >>> acc.refresh()
        >>> acc.device_count()
        2
    """
    discovery_cache.clear()
