"""The fields of a device, as NVML reports them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import nvml
from .discovery_result import Failed, NotSupported
from .nvml import Handle, call, newest

_GPU_SENSOR = 0
_SM_CLOCK = 1
_MEMORY_TEMPERATURE = 82  # NVML_FI_DEV_MEMORY_TEMP
_RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
_ACTIONS = ("none", "reset", "reboot", "drain peers", "drain and reset")
_UNCORRECTED, _VOLATILE = 1, 0
_NODES_SCOPE = 0
_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
_P2P_OK, _P2P_UNKNOWN = 0, 6

# Reasons for slow clocks: power cap, hardware slowdown, software and hardware thermal slowdown, power brake.
_THROTTLING = 0x4 | 0x8 | 0x20 | 0x40 | 0x80

# 64-bit words of a node set: enough for any machine.
_NODE_WORDS = 16


_Reader = Callable[[Handle], Any]

_temperature: _Reader = newest(
    lambda handle: call("nvmlDeviceGetTemperature", handle, _GPU_SENSOR),
    # The successor, which is slow in the binding.
    lambda handle: call("nvmlDeviceGetTemperatureV", handle, _GPU_SENSOR),
)
_power_limit: _Reader = newest(
    lambda handle: call("nvmlDeviceGetEnforcedPowerLimit", handle),
    lambda handle: call("nvmlDeviceGetPowerManagementLimit", handle),
)
_clock_event_reasons: _Reader = newest(
    lambda handle: call("nvmlDeviceGetCurrentClocksEventReasons", handle),
    lambda handle: call("nvmlDeviceGetCurrentClocksThrottleReasons", handle),
)
_memory_info: _Reader = newest(
    # The size of the structure, and its version in the fourth byte.
    lambda handle: call("nvmlDeviceGetMemoryInfo", handle, version=40 | 2 << 24),
    lambda handle: call("nvmlDeviceGetMemoryInfo", handle),
)
_compute_processes: _Reader = newest(
    # The plain name in the binding raises another error for older drivers.
    lambda handle: call("nvmlDeviceGetComputeRunningProcesses_v3", handle),
    lambda handle: call("nvmlDeviceGetComputeRunningProcesses_v2", handle),
)


def _field(handle: Handle, field: int) -> int:
    value = call("nvmlDeviceGetFieldValues", handle, [field])[0]
    if value.nvmlReturn:
        raise NotSupported(f"NVML's field returned {value.nvmlReturn}")
    number: int = value.value.uiVal
    return number


def _recovery_action(handle: Handle) -> str:
    number = _field(handle, _RECOVERY_ACTION)
    if number >= len(_ACTIONS):
        raise NotSupported(f"NVML recommends {number}, which is not known")
    return _ACTIONS[number]


def _is_throttled(handle: Handle) -> bool:
    return bool(_clock_event_reasons(handle) & _THROTTLING)


def _memory(handle: Handle) -> tuple[int, int, int]:
    """Free, total and used bytes, without the driver's reserve if NVML reports it: CUDA's total excludes it."""
    info = _memory_info(handle)
    if not info.total:
        raise NotSupported("NVML reports no memory for it")
    return info.free, info.total - getattr(info, "reserved", 0), info.used


def _processes(handle: Handle) -> list[tuple[int, str | None, int | None]]:
    """Pid, name and bytes of each process with a context on a device."""
    return [(entry.pid, _process_name(entry.pid), entry.usedGpuMemory) for entry in _compute_processes(handle)]


def _process_name(pid: int) -> str | None:
    try:
        return nvml.text(call("nvmlSystemGetProcessName", pid))
    except (NotSupported, Failed):  # it has ended, or is in another namespace
        return None


def _numa_node(handle: Handle) -> int | None:
    words = call("nvmlDeviceGetMemoryAffinity", handle, _NODE_WORDS, _NODES_SCOPE)
    nodes = [64 * position + bit for position, word in enumerate(words) for bit in range(64) if word >> bit & 1]
    return nodes[0] if len(nodes) == 1 else None


def _name(handle: Handle) -> str:
    return nvml.text(call("nvmlDeviceGetName", handle))


def _compute_capability(handle: Handle) -> tuple[int, int]:
    major, minor = call("nvmlDeviceGetCudaComputeCapability", handle)
    return major, minor


_READERS: dict[str, _Reader] = {
    "name": _name,
    "pci_bus_id": nvml.pci_bus_id,
    "compute_capability": _compute_capability,
    "memory": _memory,
    "utilization": lambda handle: call("nvmlDeviceGetUtilizationRates", handle).gpu,
    "memory_usage": lambda handle: call("nvmlDeviceGetUtilizationRates", handle).memory,
    "temperature": _temperature,
    "memory_temperature": lambda handle: _field(handle, _MEMORY_TEMPERATURE),
    "power_draw": lambda handle: call("nvmlDeviceGetPowerUsage", handle),
    "power_limit": _power_limit,
    "fan_speed": lambda handle: call("nvmlDeviceGetFanSpeed", handle),
    "clock_rate": lambda handle: call("nvmlDeviceGetClockInfo", handle, _SM_CLOCK),
    "throttled": _is_throttled,
    "ecc_errors": lambda handle: call("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE),
    "recovery_action": _recovery_action,
    "processes": _processes,
    "numa_node": _numa_node,
}


def is_nvlink_connected(handle: Handle, peer: Handle) -> bool | None:
    """Whether NVLink connects two GPUs."""
    status: int = call("nvmlDeviceGetP2PStatus", handle, peer, _NVLINK)
    return None if status == _P2P_UNKNOWN else status == _P2P_OK


def read(handle: Handle, field: str) -> Any:
    """Read a field of a device.

    Raises:
        NotSupported, Failed: as ``nvml.call``.
    """
    return _READERS[field](handle)
