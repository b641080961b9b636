"""AMD's GPUs, through the ``amdsmi`` package if it is installed: initialized once per process, and again in a forked child."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from . import imports, process
from .discovery_result import DiscoveredDevice, Failed, NotSupported, PhysicalGpu
from .driver_child import DriverDevice

_NONE = "N/A"
_XGMI = 2  # in the enumeration of link types, whose name depends on the version


class _Session:
    """The ``amdsmi`` module with its library initialized, and the GPUs that it listed."""

    def __init__(self, smi: Any) -> None:
        self.smi = smi
        self.gpus: tuple[DiscoveredDevice, ...] | None = None


_lock = threading.RLock()
_session: _Session | None = None


def _get_session() -> _Session:
    global _session
    with _lock:
        if _session is None:
            try:
                smi = imports.import_modules("amdsmi")
                smi.amdsmi_init()
            except Exception as error:  # without its library the import raises almost any exception
                raise Failed(f"amdsmi does not work ({type(error).__name__}: {error})") from None
            _session = _Session(smi)
        return _session


def gpus() -> tuple[DiscoveredDevice, ...]:
    """All GPUs in HIP's order.

    Raises:
        Failed: if amdsmi is missing, does not start, or cannot list them.
    """
    with _lock:
        session = _get_session()
        if session.gpus is None:
            smi = session.smi
            try:
                handles = smi.amdsmi_get_processor_handles()
                order = {index: _hip_index(smi, index, handle) for index, handle in enumerate(handles)}
            except Exception as error:
                raise Failed(f"amdsmi cannot list the GPUs ({error})") from None
            session.gpus = tuple(_describe(smi, index, handles[index]) for index in sorted(order, key=lambda i: order[i]))
        return session.gpus


def clear() -> None:
    """Drop the list of GPUs."""
    with _lock:
        if _session is not None:
            _session.gpus = None


def _hip_index(smi: Any, index: int, handle: Any) -> int:
    """HIP's index of a GPU; amdsmi's own before ROCm 6.4, which does not report HIP's."""
    try:
        hip_index = smi.amdsmi_get_gpu_enumeration_info(handle)["hip_id"]
    except (AttributeError, KeyError, smi.AmdSmiException):
        return index
    return hip_index if isinstance(hip_index, int) else index


def _describe(smi: Any, index: int, handle: Any) -> DiscoveredDevice:
    asic = _or_none(smi, lambda: smi.amdsmi_get_gpu_asic_info(handle)) or {}
    serial = str(asic.get("asic_serial") or _NONE)
    total = _or_none(smi, lambda: smi.amdsmi_get_gpu_vram_usage(handle)["vram_total"])
    device = DriverDevice(
        uuid=None if serial == _NONE else serial.removeprefix("0x").lower(),
        name=str(asic.get("market_name") or "cuda"),
        pci_bus_id=_or_none(smi, lambda: smi.amdsmi_get_gpu_device_bdf(handle)),
        compute_capability=None,
        total_memory=total << 20 if isinstance(total, int) else None,
    )
    return DiscoveredDevice(PhysicalGpu(index, handle, device.uuid and f"GPU-{device.uuid}", device.name), None, device)


def _or_none(smi: Any, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (AttributeError, KeyError, smi.AmdSmiException):
        return None


def read(handle: Any, field: str) -> Any:
    """Read a field of a GPU; the fields are those of ``nvml_telemetry``.

    Raises:
        NotSupported: if the GPU or this amdsmi does not report it.
        Failed: if amdsmi fails.
    """
    if field not in _READERS:
        raise NotSupported("amdsmi has no such field")
    return _call(lambda smi: _READERS[field](smi, handle))


def is_linked(handle: Any, peer: Any) -> bool:
    """Whether XGMI connects two GPUs.

    Raises:
        NotSupported, Failed: as ``read``.
    """

    def read_link(smi: Any) -> bool:
        link_types = getattr(smi, "AmdSmiLinkType", None) or getattr(smi, "AmdSmiIoLinkType", None)
        names = [name for name in dir(link_types) if name.endswith("XGMI")]
        xgmi = int(getattr(link_types, names[0])) if names else _XGMI
        return int(smi.amdsmi_topo_get_link_type(handle, peer)["type"]) == xgmi

    return _call(read_link)


def _call(function: Callable[[Any], Any]) -> Any:
    smi = _get_session().smi
    try:
        return function(smi)
    except (NotSupported, Failed):
        raise
    except (AttributeError, KeyError) as error:
        raise NotSupported(f"this amdsmi does not know {error}") from None
    except Exception as error:
        error_type = NotSupported if "NOT_SUPPORTED" in str(error) or "NOT_YET_IMPLEMENTED" in str(error) else Failed
        raise error_type(f"amdsmi raised {error}") from None


def _integer(value: Any) -> int:
    if not isinstance(value, int):
        raise NotSupported(f"amdsmi returned {value!r}")
    return value


def _celsius(smi: Any, handle: Any, sensor: str) -> int:
    sensor_type, metric = getattr(smi.AmdSmiTemperatureType, sensor), smi.AmdSmiTemperatureMetric.CURRENT
    return _integer(smi.amdsmi_get_temp_metric(handle, sensor_type, metric))


def _memory(smi: Any, handle: Any) -> tuple[int, int, int]:
    usage = smi.amdsmi_get_gpu_vram_usage(handle)
    total, used = _integer(usage["vram_total"]) << 20, _integer(usage["vram_used"]) << 20
    return total - used, total, used


def _milliwatts(smi: Any, handle: Any) -> int:
    power = smi.amdsmi_get_power_info(handle)
    watts = power["average_socket_power"]
    return 1000 * _integer(power["current_socket_power"] if watts == _NONE else watts)


def _power_limit(smi: Any, handle: Any) -> int:
    return _integer(smi.amdsmi_get_power_cap_info(handle)["power_cap"]) // 1000  # microwatts to milliwatts


def _fan_speed(smi: Any, handle: Any) -> int:
    fastest = _integer(smi.amdsmi_get_gpu_fan_speed_max(handle, 0))
    if not fastest:
        raise NotSupported("the GPU has no fan")
    return round(100 * _integer(smi.amdsmi_get_gpu_fan_speed(handle, 0)) / fastest)


def _clock_rate(smi: Any, handle: Any) -> int:
    clock = smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.GFX)
    return _integer(clock["clk"] if "clk" in clock else clock["cur_clk"])  # "cur_clk" before ROCm 6.2


def _processes(smi: Any, handle: Any) -> list[tuple[int, str | None, int | None]]:
    processes: list[tuple[int, str | None, int | None]] = []
    for entry in smi.amdsmi_get_gpu_process_list(handle):
        name, used = entry["name"], entry["memory_usage"]["vram_mem"]
        processes.append((entry["pid"], None if name == _NONE else name, used if isinstance(used, int) else None))
    return processes


def _numa_node(smi: Any, handle: Any) -> int | None:
    node = _integer(smi.amdsmi_topo_get_numa_node_number(handle))
    return None if node < 0 else node


_READERS: dict[str, Callable[[Any, Any], Any]] = {
    "utilization": lambda smi, handle: _integer(smi.amdsmi_get_gpu_activity(handle)["gfx_activity"]),
    "memory_usage": lambda smi, handle: _integer(smi.amdsmi_get_gpu_activity(handle)["umc_activity"]),
    "memory": _memory,
    "temperature": lambda smi, handle: _celsius(smi, handle, "JUNCTION"),
    "memory_temperature": lambda smi, handle: _celsius(smi, handle, "VRAM"),
    "power_draw": _milliwatts,
    "power_limit": _power_limit,
    "fan_speed": _fan_speed,
    "clock_rate": _clock_rate,
    "processes": _processes,
    "numa_node": _numa_node,
}


@process.reset_after_fork
def _reset_after_fork() -> None:
    global _lock, _session
    _lock, _session = threading.RLock(), None
