"""What a device is doing: read from NVML, for any visible device, before and after it is initialized."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from . import discovery
from ._machine import amdsmi, cuda, host_memory, nvml
from ._machine.device_argument import Device

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

T = TypeVar("T")


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
    """What ``telemetry`` reads; a field that the device does not report is None.

    Attributes:
        utilization: percent of the last sample period in which a kernel ran.
        memory_usage: percent of it in which device memory was read or written.
        device_memory_used: bytes used on the device by all processes.
        temperature: degrees Celsius.
        power_draw: milliwatts.
        clock_rate: megahertz, of the streaming multiprocessors.
        processes: who uses the device.
    """

    utilization: int | None
    memory_usage: int | None
    device_memory_used: int | None
    temperature: int | None
    power_draw: int | None
    clock_rate: int | None
    processes: tuple[Process, ...] | None


class _NotReported(RuntimeError):
    """The device does not report this."""


# The handles of the devices of one answer of discovery, in its order, and that answer.
_handles: tuple[cuda.Found | None, tuple[Any, ...]] = (None, ())


def _require_device(device: Device) -> int:
    """The index of a visible device that there really is."""
    if type(device) is int and 0 <= device < discovery.device_count():
        return device
    number = discovery.visible_index(device)
    if not discovery.device_count():
        raise RuntimeError(f"There is no device to read from: {discovery.unavailable_reason()}")
    return number


def _handle(device: Device) -> Any:
    """NVML's handle of a visible device."""
    global _handles
    number = _require_device(device)
    if discovery.last_found() is not _handles[0]:
        devices = discovery.devices_found()
        _handles = discovery.last_found(), tuple(device.handle for device in devices)
    handle = _handles[1][number]
    if handle is None:
        raise _NotReported(
            f"Device {number}, {discovery.visible_devices()[number].name}, is known to the driver only, and to no library "
            "that tells what it is doing (NVML, amdsmi)"
        )
    return handle


def _read(device: Device, what: str, read: Callable[[Any, Any], T]) -> T:
    handle = _handle(device)
    if type(handle) is amdsmi.Processor:
        return _read_amd(handle, what)
    binding = nvml.session()
    try:
        try:
            return read(binding, handle)
        except binding.NVMLError_Uninitialized:
            nvml.restart()
            discovery.refresh()
            return read(nvml.session(), _handle(device))
    except binding.NVMLError as error:
        raise _NotReported(f"The device does not report its {what}: {nvml.error_name(error)} ({error.value})") from None


def _read_amd(processor: amdsmi.Processor, what: str) -> Any:
    try:
        return amdsmi.read(processor, what)
    except amdsmi.NotReported as error:
        raise _NotReported(f"The device does not report its {what}: {error}") from None


def utilization(device: Device = None) -> int:
    """Return how busy a device is.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device (0 while nothing is initialized).

    Returns:
        Percent of the last sample period, a sixth of a second to a second, in which a kernel ran. Mirrors
        ``torch.cuda.utilization``; NVML does not report it for MIG instances.

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: if the device does not report it, or no accelerator is available; the message says why.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> if acc.is_available():
        ...     assert 0 <= acc.utilization() <= 100
    """
    return _read(device, "utilization", lambda nvml, handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)


def memory_usage(device: Device = None) -> int:
    """Return how busy a device's memory is.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device (0 while nothing is initialized).

    Returns:
        Percent of the last sample period in which device memory was read or written. Mirrors
        ``torch.cuda.memory_usage``; NVML does not report it for MIG instances.

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: if the device does not report it, or no accelerator is available; the message says why.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> if acc.is_available():
        ...     assert 0 <= acc.memory_usage() <= 100
    """
    return _read(device, "memory utilization", lambda nvml, handle: nvml.nvmlDeviceGetUtilizationRates(handle).memory)


def temperature(device: Device = None) -> int:
    """Return how hot a device is.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device (0 while nothing is initialized).

    Returns:
        Degrees Celsius. Mirrors ``torch.cuda.temperature``; NVML does not report it for MIG instances.

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: if the device does not report it, or no accelerator is available; the message says why.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> if acc.is_available():
        ...     assert acc.temperature() < 150
    """
    return _read(device, "temperature", nvml.temperature)


def power_draw(device: Device = None) -> int:
    """Return how much power a device draws.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device (0 while nothing is initialized).

    Returns:
        Milliwatts, the board's memory included. Mirrors ``torch.cuda.power_draw``; NVML does not report it for MIG
        instances.

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: if the device does not report it, or no accelerator is available; the message says why.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> if acc.is_available():
        ...     assert acc.power_draw() > 0
    """
    return _read(device, "power draw", lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle))


def clock_rate(device: Device = None) -> int:
    """Return how fast a device is clocked.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device (0 while nothing is initialized).

    Returns:
        Megahertz, of the streaming multiprocessors. Mirrors ``torch.cuda.clock_rate``, whose documentation says Hz; NVML
        does not report it for MIG instances.

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: if the device does not report it, or no accelerator is available; the message says why.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> if acc.is_available():
        ...     assert acc.clock_rate() > 0
    """
    return _read(device, "clock rate", lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))


def device_memory_used(device: Device = None) -> int:
    """Return how much memory of a device is in use, by all processes.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device (0 while nothing is initialized).

    Returns:
        Bytes, without what the driver keeps for itself where it can tell (version 2 of NVML's accounting); of the host's
        memory on devices that share it. Mirrors ``torch.cuda.device_memory_used``.

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: if the device does not report it, or no accelerator is available; the message says why.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> if acc.is_available():
        ...     assert acc.device_memory_used() >= 0
    """
    return _read(device, "memory", _memory_used)


def _memory_used(binding: Any, handle: Any) -> int:
    info = nvml.memory_info(binding, handle)
    if info is None or not info.total:
        # Devices that share the host's memory answer "not supported" or zeros, depending on the driver.
        return host_memory.total() - host_memory.available()
    used: int = info.used
    return used


def processes(device: Device = None) -> tuple[Process, ...]:
    """Return the processes that use a device.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device (0 while nothing is initialized).

    Returns:
        One entry a process with a context on the device, in the driver's order.

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: if the device does not report it, or no accelerator is available; the message says why.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> if acc.is_available():
        ...     assert all(process.pid > 0 for process in acc.processes())
    """
    return tuple(Process(*process) for process in _read(device, "processes", nvml.processes))


def list_gpu_processes(device: Device = None) -> str:
    """Return a text that lists the processes on a device and their memory.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device (0 while nothing is initialized).

    Returns:
        The device's index, then a line for each process. Mirrors ``torch.cuda.list_gpu_processes``.

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: if the device does not report it, or no accelerator is available; the message says why.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> if acc.is_available():
        ...     assert acc.list_gpu_processes().startswith('GPU:')
    """
    lines = [f"GPU:{discovery.visible_index(device)}"]
    found = processes(device)
    if not found:
        lines.append("no processes are running")
    for process in found:
        used = "an unknown number of" if process.memory_used is None else f"{process.memory_used / 2**20:>12.3f}"
        lines.append(f"process {process.pid:>10d} uses {used} MB GPU memory")
    return "\n".join(lines)


def telemetry(device: Device = None) -> Telemetry:
    """Return all that a device reports, in one call.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device (0 while nothing is initialized).

    Returns:
        Each value as its own function gives it; None for what the device does not report.

    Raises:
        ValueError: if the index is out of range or the device is of another type.
        TypeError: if it is no device at all.
        RuntimeError: if no accelerator is available; the message says why.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> if acc.is_available():
        ...     assert acc.telemetry()._fields[0] == 'utilization'
    """
    _require_device(device)
    rates = _or_none(_utilization_rates, device)
    return Telemetry(
        utilization=rates and rates.gpu,
        memory_usage=rates and rates.memory,
        device_memory_used=_or_none(device_memory_used, device),
        temperature=_or_none(temperature, device),
        power_draw=_or_none(power_draw, device),
        clock_rate=_or_none(clock_rate, device),
        processes=_or_none(processes, device),
    )


def _utilization_rates(device: Device) -> Any:
    return _read(device, "utilization rates", lambda nvml, handle: nvml.nvmlDeviceGetUtilizationRates(handle))


def _or_none(read: Callable[[Any], T], device: Device) -> T | None:
    try:
        return read(device)
    except _NotReported:
        return None
