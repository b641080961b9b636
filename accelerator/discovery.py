"""Is there an accelerator, how many, which: answered without importing torch and without touching the device's runtime."""

from __future__ import annotations

from collections.abc import Mapping

from ._machine import description, device_argument, discovery_cache, nvml, process, torch_build, torch_runtime, usability
from ._machine.description import PhysicalDevice, VisibleDevice
from ._machine.device_argument import Device
from ._machine.discovery_result import DiscoveryResult, Failed, NotSupported
from ._machine.dynamo import assume_constant

__all__ = [
    "Device",
    "PhysicalDevice",
    "VisibleDevice",
    "compute_capability",
    "device_count",
    "device_name",
    "driver_cuda_version",
    "driver_version",
    "get_device_index",
    "get_device_name",
    "is_available",
    "is_fork_safe",
    "is_in_bad_fork",
    "is_initialized",
    "is_nvlink_connected",
    "numa_node",
    "physical_devices",
    "refresh",
    "unavailable_reason",
    "usable_devices",
    "visible_devices",
]

BAD_FORK = (
    "this process was forked after its parent had initialized the accelerator, which cannot be used again in the child; "
    "start processes with 'spawn' or 'forkserver', or fork before the accelerator is used"
)

_current = discovery_cache.current


@assume_constant
def device_count() -> int:
    """Return how many devices torch can use: what the driver would enumerate in a fresh process.

    The present ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER`` are followed until something in this process initializes
    the driver; from then on its count stands. MIG instances are counted as the driver counts them, and there is no cap.

    Returns:
        The number of visible devices; 0 when this torch could use none, for the reason that ``unavailable_reason`` gives.
        Devices that NVML lists and whose driver does not start count all the same: that only ``usable_devices`` can tell.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.device_count()
        2
    """
    return _current().count


@assume_constant
def is_available(*, strict: bool = False) -> bool:
    """Return whether at least one device is there that torch could use.

    Args:
        strict: also have a child process create a context on every visible device, which tells devices that are listed
            but broken, or kept by others. That all is well is remembered for the environment, a failure for a second, and
            that a device is busy not at all.

    Returns:
        True if torch can be expected to work on the accelerator. A child forked from a process that had initialized the
        accelerator cannot use it and gets False.

    Fork: safe, initializes nothing; with ``strict`` a child process initializes the driver for itself.

    Example:
        >>> import accelerator as acc
        >>> acc.is_available(), acc.is_available(strict=True)
        (True, True)
    """
    if not strict:
        return _current().count > 0 and not process.is_in_bad_fork()
    return unavailable_reason(strict=True) is None


def unavailable_reason(*, strict: bool = False) -> str | None:
    """Return why no accelerator is available.

    Args:
        strict: what ``is_available(strict=True)`` tries out counts too.

    Returns:
        None when ``is_available(strict=strict)``; else one sentence that names the most specific cause and what to do
        about it.

    Fork: safe, initializes nothing; with ``strict`` a child process initializes the driver for itself.

    Example:
        >>> import accelerator as acc, os
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
        return BAD_FORK
    return usability.problem(result) if strict else None


def visible_devices(env: Mapping[str, str] | None = None) -> tuple[VisibleDevice, ...]:
    """Return the devices that torch can use, in torch's order.

    Args:
        env: the environment of a process yet to be started, whose variables decide what it will see; this process's own
            if None.

    Returns:
        One entry a device, the position being the index that torch uses; empty when no accelerator is available.

    Raises:
        TypeError: if ``env`` is no mapping.

    Fork: safe, initializes nothing; where only the driver can tell, a child process asks it.

    Example:
        >>> import accelerator as acc
        >>> [(device.index, device.name) for device in acc.visible_devices()]
        [(0, 'Simulated GPU'), (1, 'Simulated GPU')]
        >>> [device.physical_index for device in acc.visible_devices({"CUDA_VISIBLE_DEVICES": "1"})]
        [1]
    """
    if env is not None and not isinstance(env, Mapping):
        raise TypeError(f"env is a mapping of variables, as os.environ is, not {type(env).__name__}")
    result = _current() if env is None else discovery_cache.for_environment(env)
    return _described(result)


def _described(result: DiscoveryResult) -> tuple[VisibleDevice, ...]:
    return tuple(description.visible(index, device, result.backend) for index, device in enumerate(result.devices))


def physical_devices() -> tuple[PhysicalDevice, ...]:
    """Return every GPU and MIG instance of the machine, whatever torch and the environment say.

    For schedulers and dashboards: it needs no torch, and a CPU build of it will do.

    Returns:
        The GPUs in NVML's order, each followed by its MIG instances; on AMD's in amdsmi's. Empty where neither library
        lists any.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc, os
        >>> os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        >>> [(device.index, device.visible_index) for device in acc.physical_devices()]
        [(0, None), (1, 0)]
        >>> del os.environ["CUDA_VISIBLE_DEVICES"]
    """
    backend, devices = discovery_cache.physical()
    visible = {(seen.gpu and seen.gpu.physical_index, seen.mig): index for index, seen in enumerate(_current().devices)}
    return tuple(
        description.physical(device, backend, visible.get((device.gpu and device.gpu.physical_index, device.mig)))
        for device in devices
    )


def usable_devices() -> tuple[VisibleDevice, ...]:
    """Return the visible devices that can be used just now: those on which a child process could create a context.

    Returns:
        Entries of ``visible_devices``, without those that are broken, full, or another process's alone; asked anew each
        time. Empty in a child forked from a process that had initialized the accelerator.

    Fork: safe, initializes nothing; a child process initializes the driver for itself.

    Example:
        >>> import accelerator as acc
        >>> [device.index for device in acc.usable_devices()]
        [0, 1]
    """
    result = _current()
    if result.count == 0 or process.is_in_bad_fork():
        return ()
    return tuple(device for device, usable in zip(_described(result), usability.usable(result), strict=True) if usable)


def compute_capability(device: Device = None) -> tuple[int, int] | None:
    """Return the compute capability of a device.

    Args:
        device: which one.

    Returns:
        Major and minor; None where there is no accelerator, for devices other than CUDA's, and where nobody can tell.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.compute_capability()
        (9, 0)
    """
    result, index = resolve_device(device)
    return description.compute_capability(result.devices[index], result.backend) if result.count else None


def get_device_name(device: Device = None) -> str:
    """Return the product name of a device.

    Args:
        device: which one.

    Returns:
        The name, from NVML before the accelerator is initialized; "cpu" when the CPU stands in.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.get_device_name(1)
        'Simulated GPU'
    """
    result, index = resolve_device(device)
    return description.name(result.devices[index], result.backend) if result.count else "cpu"


def is_nvlink_connected(device: Device, peer_device: Device) -> bool | None:
    """Return whether NVLink, or XGMI on ROCm, connects two devices.

    Args:
        device: one of them.
        peer_device: the other; a device is connected with itself.

    Returns:
        None where nobody can tell, and where there is no accelerator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.is_nvlink_connected(0, 1)
        False
    """
    result = _current()
    one, other = _index_in(result, device), _index_in(result, peer_device)
    if result.count == 0:
        return None
    if one == other:
        return True
    gpu, peer = result.devices[one].gpu, result.devices[other].gpu
    if result.backend is None or gpu is None or peer is None:
        return None
    try:
        connected: bool | None = result.backend.is_linked(gpu.handle, peer.handle)
    except (NotSupported, Failed):
        return None
    return connected


def numa_node(device: Device = None) -> int | None:
    """Return the host's NUMA node that is nearest to a device, for binding processes and memory to it.

    Args:
        device: which one.

    Returns:
        The node's number; None where several are equally near, where nobody can tell, and where there is no accelerator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.numa_node(1)
        0
    """
    result, index = resolve_device(device)
    if result.count == 0:
        return None
    seen = result.devices[index]._replace(instance=None)
    try:
        node: int | None = description.read(seen, result.backend, "numa_node")
    except (NotSupported, Failed):
        return description.numa_node_of_bus(description.pci_bus_id(seen, result.backend))
    return node


def get_device_index(device: Device = None, *, optional: bool = True) -> int:
    """Return the index that a device argument names, for functions that take one as those of this package do.

    Args:
        device: a device argument.
        optional: whether None and a device without an index may stand for the current device. True here, and False in
            ``torch.cuda``'s function of this name.

    Returns:
        The index, of a device that is visible; the current device's for None, 0 while nothing is initialized.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.get_device_index("cuda:1")
        1
    """
    return _index_in(_current(), device, optional=optional)


@assume_constant
def device_name(device_index: Device = None) -> str:
    """Return a device's name in torch, such as "cuda:1"; the product's name says ``get_device_name``.

    Args:
        device_index: which one, an index also in digits; None for the accelerator without an index.

    Returns:
        "cuda", "cuda:1", ...; "cpu" when the CPU stands in.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.device_name(), acc.device_name(1)
        ('cuda', 'cuda:1')
    """
    result = _current()
    accelerator = _type_of(result)
    if isinstance(device_index, str) and device_index.isdecimal():
        device_index = int(device_index)
    number = device_argument.index(device_index, accelerator)
    if number is None:
        return accelerator
    checked = device_argument.check(number, result.count, accelerator)
    return accelerator if accelerator == "cpu" else f"{accelerator}:{checked}"


def _type_of(result: DiscoveryResult) -> str:
    return (torch_build.accelerator_type() if result.count else None) or "cpu"


def resolve_device(device: Device) -> tuple[DiscoveryResult, int]:
    """The present answer, and the index in it that a device argument names; 0 for the CPU where it stands in."""
    result = _current()
    return result, _index_in(result, device)


def _index_in(result: DiscoveryResult, device: Device, *, optional: bool = True) -> int:
    if type(device) is int and 0 <= device < result.count:
        return device
    accelerator = _type_of(result)
    number = device_argument.index(device, accelerator, optional=optional)
    if number is None:
        number = current_index()
    return device_argument.check(number, result.count, accelerator)


def current_index() -> int:
    """The index of the current device, 0 while nothing is initialized."""
    return torch_runtime.current_index() if process.is_initialized() else 0


@assume_constant
def is_initialized() -> bool:
    """Return whether torch has initialized the accelerator in this process.

    Returns:
        False before the first use of the accelerator, without torch, and in a child forked from a process that used it.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.init()
        >>> acc.is_initialized()
        True
    """
    return process.is_initialized()


def is_in_bad_fork() -> bool:
    """Return whether this process was forked from one that had initialized the accelerator, whoever had done so.

    Returns:
        True if the accelerator cannot be used here for that reason; also where torch refuses, as it does in the children of
        a process that merely counted devices through it. Where this package was imported only after the fork, what torch
        knows.

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
        False once the driver is initialized in this process, and in a child of such a process.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.init()
        >>> acc.is_fork_safe()
        False
    """
    return process.is_fork_safe()


def refresh() -> None:
    """Forget which devices were enumerated, as after a device was lost or MIG was reconfigured; the next question looks anew.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.refresh()
        >>> acc.device_count()
        2
    """
    discovery_cache.clear()


def driver_version() -> str | None:
    """Return the version of the installed NVIDIA driver.

    Returns:
        The version, or None where NVML cannot tell.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.driver_version()
        '590.44.01'
    """
    try:
        return nvml.driver_version()
    except Failed:
        return None


def driver_cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the installed driver supports.

    Returns:
        Major and minor, or None where NVML cannot tell.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.driver_cuda_version()
        (13, 2)
    """
    try:
        return nvml.cuda_version()
    except Failed:
        return None
