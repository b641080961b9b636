"""Monitoring: utilization, temperature, power and memory of any device of the machine, from NVML or amdsmi.

The functions are fork-safe: they initialize nothing in this process, and work before and after initialization. A device
argument may also be an entry of ``visible_devices()`` or ``physical_devices()``, to monitor hidden GPUs and MIG instances. A
function raises RuntimeError if there is no such device, if the device does not report the field, and if NVML fails. If NVML
cannot list the GPUs, the first call starts a child process to find the device. NVML reports only memory and processes for a MIG
instance. Accelerators other than CUDA and ROCm are read by their torch module, once they are initialized.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from . import discovery
from ._machine import description, discovery_cache, torch_runtime
from ._machine.description import PhysicalDevice, VisibleDevice
from ._machine.device_argument import Device
from ._machine.discovery_result import DiscoveredDevice, DiscoveryResult, Failed, NotSupported, Reader

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
        pid: its id in the driver's namespace, which is the host's for a container.
        name: its name; None if it cannot be read.
        memory_used: bytes on the device; None if the driver does not report it.
    """

    pid: int
    name: str | None
    memory_used: int | None


class Telemetry(NamedTuple):
    """The fields of ``telemetry``; a field that cannot be read is None.

    Attributes:
        utilization: percent of the last sample period in which a kernel ran.
        memory_usage: percent of that period in which device memory was read or written.
        device_memory_used: bytes used on the device by all processes.
        temperature: degrees Celsius.
        power_draw: milliwatts.
        clock_rate: megahertz, of the streaming multiprocessors.
        processes: the processes that use the device.
        power_limit: the limit in milliwatts.
        memory_temperature: degrees Celsius of the memory.
        fan_speed: percent of the maximum.
        throttled: whether the power cap, heat or a power brake reduces the clocks.
        ecc_errors: uncorrectable memory errors since the driver was loaded.
        recovery_action: what the driver recommends: "none", "reset", "reboot", "drain peers" or "drain and reset".
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
    ecc_errors: int | None = None
    recovery_action: str | None = None


_current = discovery_cache.current


def _resolve(device: AnyDevice) -> tuple[DiscoveredDevice, Reader | None, str]:
    """A device, the backend that reads it, and its name for messages."""
    if isinstance(device, (VisibleDevice, PhysicalDevice)):
        return _listed(device)
    return _indexed(*discovery.resolve_device(device))


def _indexed(result: DiscoveryResult, index: int) -> tuple[DiscoveredDevice, Reader | None, str]:
    if not result.count:
        raise RuntimeError(f"There is no device to read from: {result.problem}")
    return result.devices[index], result.backend or torch_runtime, f"device {index}"


def _listed(device: VisibleDevice | PhysicalDevice) -> tuple[DiscoveredDevice, Reader | None, str]:
    backend, devices = discovery_cache.physical()
    index = device.index if isinstance(device, PhysicalDevice) else device.physical_index
    for listed in devices:
        assert listed.gpu is not None  # from the list of the backend
        is_same = device.uuid == listed.uuid if device.uuid else (index, device.mig) == (listed.gpu.physical_index, listed.mig)
        if is_same:
            return listed, backend, f"GPU {index}" + (f", instance {listed.mig}" if listed.mig else "")
    raise RuntimeError(f"{device.name} ({device.uuid}) cannot be read: {backend.library_problem()}")


def _read(device: AnyDevice, field: str) -> Any:
    result = _current()
    if type(device) is int and 0 <= device < result.count and result.backend is not None:
        handle = result.handle(device)
        if handle is not None:
            try:
                return result.backend.read(handle, field)
            except (NotSupported, Failed) as error:
                raise _field_error(field, f"device {device}", result.devices[device], error) from None
    return _read_from(*_resolve(device), field)


def _read_from(device: DiscoveredDevice, backend: Reader | None, label: str, field: str) -> Any:
    try:
        return description.read(device, backend, field)
    except (NotSupported, Failed) as error:
        raise _field_error(field, label, device, error) from None


def _field_error(field: str, label: str, device: DiscoveredDevice, error: Exception) -> RuntimeError:
    noun = field.replace("_", " ")
    if isinstance(error, NotSupported):
        return RuntimeError(f"{label[0].upper()}{label[1:]}, {device.name}, does not report its {noun}: {error}")
    return RuntimeError(f"The {noun} of {label}, {device.name}, cannot be read: {error}")


def utilization(device: AnyDevice = None) -> int:
    """Return the utilization of a device.

    Args:
        device: an index, "cuda:1", a ``torch.device``, an entry of ``visible_devices()``, or None for the current device.

    Returns:
        Percent of the last sample period (a sixth of a second to a second) in which a kernel ran. Mirrors
        ``torch.cuda.utilization``.

    Example:
        >>> acc.utilization(1)
        20
    """
    percent: int = _read(device, "utilization")
    return percent


def memory_usage(device: AnyDevice = None) -> int:
    """Return the utilization of a device's memory.

    Args:
        device: an index, "cuda:1", a ``torch.device``, an entry of ``visible_devices()``, or None for the current device.

    Returns:
        Percent of the last sample period in which device memory was read or written. Mirrors
        ``torch.cuda.memory_usage``.

    Example:
        >>> acc.memory_usage(1)
        12
    """
    percent: int = _read(device, "memory_usage")
    return percent


def temperature(device: AnyDevice = None) -> int:
    """Return the temperature of a device.

    Args:
        device: an index, "cuda:1", a ``torch.device``, an entry of ``visible_devices()``, or None for the current device.

    Returns:
        Degrees Celsius. Mirrors ``torch.cuda.temperature``.

    Example:
        >>> acc.temperature(1)
        31
    """
    celsius: int = _read(device, "temperature")
    return celsius


def power_draw(device: AnyDevice = None) -> int:
    """Return the power draw of a device.

    Args:
        device: an index, "cuda:1", a ``torch.device``, an entry of ``visible_devices()``, or None for the current device.

    Returns:
        Milliwatts, including the board's memory. Mirrors ``torch.cuda.power_draw``.

    Example:
        >>> acc.power_draw(1)
        61000
    """
    milliwatts: int = _read(device, "power_draw")
    return milliwatts


def clock_rate(device: AnyDevice = None) -> int:
    """Return the clock rate of a device.

    Args:
        device: an index, "cuda:1", a ``torch.device``, an entry of ``visible_devices()``, or None for the current device.

    Returns:
        Megahertz, of the streaming multiprocessors. Mirrors ``torch.cuda.clock_rate``, whose documentation says Hz.

    Example:
        >>> acc.clock_rate(1)
        1015
    """
    megahertz: int = _read(device, "clock_rate")
    return megahertz


def device_memory_used(device: AnyDevice = None) -> int:
    """Return how much memory of a device all processes use.

    Args:
        device: an index, "cuda:1", a ``torch.device``, an entry of ``visible_devices()``, or None for the current device.

    Returns:
        Bytes, without the driver's reserve if NVML reports it separately; the host's used memory on devices that share it.
        Mirrors ``torch.cuda.device_memory_used``.

    Example:
        >>> 0 <= acc.device_memory_used(1) < acc.total_memory(1)
        True
    """
    resolved, backend, label = _resolve(device)
    try:
        return description.memory(resolved, backend)[2]
    except Failed as error:
        raise _field_error("memory", label, resolved, error) from None


def processes(device: AnyDevice = None) -> tuple[Process, ...]:
    """Return the processes that use a device.

    Args:
        device: an index, "cuda:1", a ``torch.device``, an entry of ``visible_devices()``, or None for the current device.

    Returns:
        One entry per process with a context on the device, in the driver's order.

    Example:
        >>> import os
        >>> acc.FloatTensor([1.0]).device.index
        0
        >>> os.getpid() in [process.pid for process in acc.processes(0)]
        True
    """
    return tuple(Process(*process) for process in _read(device, "processes"))


def list_gpu_processes(device: AnyDevice = None) -> str:
    """Return a table of the processes on a device and their memory.

    Args:
        device: an index, "cuda:1", a ``torch.device``, an entry of ``visible_devices()``, or None for the current device.

    Returns:
        The device's index, then a line for each process. Mirrors ``torch.cuda.list_gpu_processes``.

    Example:
        >>> print(acc.list_gpu_processes(1).partition(chr(10))[0])
        GPU:1
    """
    if isinstance(device, (VisibleDevice, PhysicalDevice)):
        index, source = device.index, _listed(device)
    else:
        # Resolved once, so that index and processes belong to one environment, even if another thread changes it.
        result, index = discovery.resolve_device(device)
        source = _indexed(result, index)
    listed = [Process(*process) for process in _read_from(*source, "processes")]
    lines = [f"GPU:{index}"]
    if not listed:
        lines.append("no processes are running")
    for process in listed:
        used = "an unknown number of" if process.memory_used is None else f"{process.memory_used / 2**20:>12.3f}"
        lines.append(f"process {process.pid:>10d} uses {used} MB GPU memory")
    return "\n".join(lines)


def telemetry(device: AnyDevice = None) -> Telemetry:
    """Return everything that a device reports, in one call.

    Args:
        device: an index, "cuda:1", a ``torch.device``, an entry of ``visible_devices()``, or None for the current device.

    Returns:
        The fields and their units are those of ``Telemetry``; None if the device does not report a field or NVML fails.

    Example:
        >>> now = acc.telemetry(1)
        >>> now.utilization, now.temperature, now.throttled
        (20, 31, False)
    """
    resolved, backend, _ = _resolve(device)

    def read(field: str) -> Any:
        if field == "device_memory_used":
            try:
                return description.memory(resolved, backend)[2]
            except Failed:
                return None
        value = description.read_or_none(resolved, backend, field)
        return tuple(Process(*process) for process in value) if field == "processes" and value is not None else value

    return Telemetry(*map(read, Telemetry._fields))
