"""What a device is doing: read from NVML, for any device of the machine, before and after it is initialized.

Wherever a device is taken here, it may also be an entry of ``visible_devices()`` or ``physical_devices()``, so that hidden GPUs
and MIG instances can be watched. Where there is no such device, or it does not report what was asked, or NVML fails, that is a
RuntimeError that says which; of a MIG instance NVML reports the memory and the processes only.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

from . import discovery
from ._machine import description, discovery_cache
from ._machine.description import PhysicalDevice, VisibleDevice
from ._machine.device_argument import Device
from ._machine.discovery_result import DiscoveredDevice, Failed, NotSupported

__all__ = [
    "Process",
    "Telemetry",
    "clock_rate",
    "device_memory_used",
    "list_gpu_processes",
    "memory_usage",
    "power_draw",
    "processes",
    "telemetry",
    "temperature",
    "utilization",
]

AnyDevice: TypeAlias = Device | VisibleDevice | PhysicalDevice


class Process(NamedTuple):
    """A process that uses a device.

    Attributes:
        pid: its id, as the driver sees it: inside a container the host's.
        name: its name, None where it cannot be read.
        memory_used: bytes on the device, None where the driver does not tell.
    """

    pid: int
    name: str | None
    memory_used: int | None


class Telemetry(NamedTuple):
    """What ``telemetry`` reads; a field that cannot be had is None.

    Attributes:
        utilization: percent of the last sample period in which a kernel ran.
        memory_usage: percent of it in which device memory was read or written.
        device_memory_used: bytes used on the device by all processes.
        temperature: degrees Celsius.
        power_draw: milliwatts.
        clock_rate: megahertz, of the streaming multiprocessors.
        processes: who uses the device.
        power_limit: milliwatts that it may draw.
        memory_temperature: degrees Celsius of the memory.
        fan_speed: percent of the fastest.
        throttled: whether the power cap, heat or a power brake holds the clocks back.
    """

    utilization: int | None
    memory_usage: int | None
    device_memory_used: int | None
    temperature: int | None
    power_draw: int | None
    clock_rate: int | None
    processes: tuple[Process, ...] | None
    power_limit: int | None = None
    memory_temperature: int | None = None
    fan_speed: int | None = None
    throttled: bool | None = None


_current = discovery_cache.current


def _locate(device: AnyDevice) -> tuple[DiscoveredDevice, ModuleType | None, str]:
    """A device, what reads it, and how to call it."""
    if isinstance(device, (VisibleDevice, PhysicalDevice)):
        return _listed(device)
    result, index = discovery.resolve_device(device)
    if not result.count:
        raise RuntimeError(f"There is no device to read from: {discovery.unavailable_reason()}")
    return result.devices[index], result.backend, f"Device {index}"


def _listed(device: VisibleDevice | PhysicalDevice) -> tuple[DiscoveredDevice, ModuleType | None, str]:
    backend, devices = discovery_cache.physical()
    index = device.index if isinstance(device, PhysicalDevice) else device.physical_index
    for seen in devices:
        assert seen.gpu is not None  # from the list of the backend
        if device.uuid == seen.uuid if device.uuid else (index, device.mig) == (seen.gpu.physical_index, seen.mig):
            return seen, backend, f"GPU {index}" + (f", instance {seen.mig}" if seen.mig else "")
    raise RuntimeError(f"No library that tells what a GPU is doing (NVML, amdsmi) lists {device.name} ({device.uuid})")


def _read(device: AnyDevice, field: str) -> Any:
    result = _current()
    if type(device) is int and 0 <= device < result.count and result.backend is not None:
        handle = result.handle(device)
        if handle is not None:
            try:
                return result.backend.read(handle, field)
            except (NotSupported, Failed) as error:
                raise _unread(field, f"Device {device}", result.devices[device], error) from None
    seen, backend, called = _locate(device)
    try:
        return description.read(seen, backend, field)
    except (NotSupported, Failed) as error:
        raise _unread(field, called, seen, error) from None


def _unread(field: str, called: str, seen: DiscoveredDevice, error: Exception) -> RuntimeError:
    field = field.replace("_", " ")
    if isinstance(error, NotSupported):
        return RuntimeError(f"{called}, {seen.name}, does not report its {field}: {error}")
    return RuntimeError(f"The {field} of {called[0].lower()}{called[1:]}, {seen.name}, cannot be read: {error}")


def utilization(device: AnyDevice = None) -> int:
    """Return how busy a device is.

    Args:
        device: which one.

    Returns:
        Percent of the last sample period, a sixth of a second to a second, in which a kernel ran. Mirrors
        ``torch.cuda.utilization``.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.utilization(1)
        20
    """
    percent: int = _read(device, "utilization")
    return percent


def memory_usage(device: AnyDevice = None) -> int:
    """Return how busy a device's memory is.

    Args:
        device: which one.

    Returns:
        Percent of the last sample period in which device memory was read or written. Mirrors
        ``torch.cuda.memory_usage``.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.memory_usage(1)
        12
    """
    percent: int = _read(device, "memory_usage")
    return percent


def temperature(device: AnyDevice = None) -> int:
    """Return how hot a device is.

    Args:
        device: which one.

    Returns:
        Degrees Celsius. Mirrors ``torch.cuda.temperature``.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.temperature(1)
        31
    """
    celsius: int = _read(device, "temperature")
    return celsius


def power_draw(device: AnyDevice = None) -> int:
    """Return how much power a device draws.

    Args:
        device: which one.

    Returns:
        Milliwatts, the board's memory included. Mirrors ``torch.cuda.power_draw``.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.power_draw(1)
        61000
    """
    milliwatts: int = _read(device, "power_draw")
    return milliwatts


def clock_rate(device: AnyDevice = None) -> int:
    """Return how fast a device is clocked.

    Args:
        device: which one.

    Returns:
        Megahertz, of the streaming multiprocessors. Mirrors ``torch.cuda.clock_rate``, whose documentation says Hz.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.clock_rate(1)
        1015
    """
    megahertz: int = _read(device, "clock_rate")
    return megahertz


def device_memory_used(device: AnyDevice = None) -> int:
    """Return how much memory of a device is in use, by all processes.

    Args:
        device: which one.

    Returns:
        Bytes, without what the driver keeps for itself where it can tell (version 2 of NVML's accounting); of the host's
        memory on devices that share it. Mirrors ``torch.cuda.device_memory_used``.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> 0 <= acc.device_memory_used(1) < acc.total_memory(1)
        True
    """
    seen, backend, called = _locate(device)
    try:
        return description.memory(seen, backend)[2]
    except Failed as error:
        raise _unread("memory", called, seen, error) from None


def processes(device: AnyDevice = None) -> tuple[Process, ...]:
    """Return the processes that use a device.

    Args:
        device: which one.

    Returns:
        One entry a process with a context on the device, in the driver's order.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc, os
        >>> acc.FloatTensor([1.0]).device.index
        0
        >>> os.getpid() in [process.pid for process in acc.processes(0)]
        True
    """
    return tuple(Process(*process) for process in _read(device, "processes"))


def list_gpu_processes(device: AnyDevice = None) -> str:
    """Return a text that lists the processes on a device and their memory.

    Args:
        device: which one.

    Returns:
        The device's index, then a line for each process. Mirrors ``torch.cuda.list_gpu_processes``.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> print(acc.list_gpu_processes(1).partition(chr(10))[0])
        GPU:1
    """
    result = processes(device)
    if isinstance(device, (VisibleDevice, PhysicalDevice)):
        lines = [f"GPU:{device.index}"]
    else:
        lines = [f"GPU:{discovery.get_device_index(device)}"]
    if not result:
        lines.append("no processes are running")
    for process in result:
        used = "an unknown number of" if process.memory_used is None else f"{process.memory_used / 2**20:>12.3f}"
        lines.append(f"process {process.pid:>10d} uses {used} MB GPU memory")
    return "\n".join(lines)


def telemetry(device: AnyDevice = None) -> Telemetry:
    """Return all that a device reports, in one call.

    Args:
        device: which one.

    Returns:
        Each value as its own function gives it; None for what cannot be had, be it that the device does not report it or
        that NVML fails.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> now = acc.telemetry(1)
        >>> now.utilization, now.temperature, now.throttled
        (20, 31, False)
    """
    seen, backend, _ = _locate(device)

    def read(field: str) -> Any:
        return description.read_or_none(seen, backend, field)

    try:
        used = description.memory(seen, backend)[2]
    except Failed:
        used = None
    result = read("processes")
    return Telemetry(
        utilization=read("utilization"),
        memory_usage=read("memory_usage"),
        device_memory_used=used,
        temperature=read("temperature"),
        power_draw=read("power_draw"),
        clock_rate=read("clock_rate"),
        processes=None if result is None else tuple(Process(*process) for process in result),
        power_limit=read("power_limit"),
        memory_temperature=read("memory_temperature"),
        fan_speed=read("fan_speed"),
        throttled=read("throttled"),
    )
