"""AMD's GPUs, through the ``amdsmi`` package where it is installed: begun once per process, anew after a fork."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from . import nvml, probe

_NONE = "N/A"


class Processor(NamedTuple):
    """amdsmi's handle of a GPU, told apart from NVML's by its type."""

    handle: Any


class Gpu(NamedTuple):
    """A GPU: its place in amdsmi's list, its handle, and what it is."""

    physical_index: int
    handle: Processor
    about: probe.Device


class Rates(NamedTuple):
    """How busy a GPU and its memory are, in percent."""

    gpu: int
    memory: int


_lock = threading.RLock()
_binding: Any = None
_gpus: tuple[Gpu, ...] | None = None


def session() -> Any:
    """The ``amdsmi`` module with its library initialized.

    Raises:
        Unavailable: if it is missing or does not start.
    """
    global _binding
    with _lock:
        if _binding is None:
            try:
                smi: Any = import_module("amdsmi")
                smi.amdsmi_init()
            except Exception as error:  # without its library the import fails with almost any exception
                raise nvml.Unavailable(f"amdsmi does not work ({type(error).__name__}: {error})", 0) from error
            _binding = smi
    return _binding


def gpus() -> tuple[Gpu, ...]:
    """All GPUs in HIP's order.

    Raises:
        Unavailable: if amdsmi is missing, does not start, or cannot list them.
    """
    global _gpus
    with _lock:
        if _gpus is None:
            smi = session()
            try:
                handles = smi.amdsmi_get_processor_handles()
                order = {index: _hip_index(smi, index, handle) for index, handle in enumerate(handles)}
                _gpus = tuple(_describe(smi, index, handles[index]) for index in sorted(order, key=lambda i: order[i]))
            except smi.AmdSmiException as error:
                raise nvml.Unavailable(f"amdsmi cannot list the GPUs ({error})", 0) from error
    return _gpus


def forget() -> None:
    """Drop the list of GPUs, so that the next question reads it again."""
    global _gpus
    _gpus = None


def _hip_index(smi: Any, index: int, handle: Any) -> int:
    """HIP's index of a GPU; amdsmi's own where it does not tell, as before ROCm 6.4."""
    try:
        found = smi.amdsmi_get_gpu_enumeration_info(handle)["hip_id"]
    except (AttributeError, KeyError, smi.AmdSmiException):
        return index
    return found if isinstance(found, int) else index


def _describe(smi: Any, index: int, handle: Any) -> Gpu:
    about = _or_none(smi, lambda: smi.amdsmi_get_gpu_asic_info(handle)) or {}
    serial = str(about.get("asic_serial") or _NONE)
    total = _or_none(smi, lambda: smi.amdsmi_get_gpu_vram_usage(handle)["vram_total"])
    device = probe.Device(
        uuid=None if serial == _NONE else serial.removeprefix("0x").lower(),
        name=str(about.get("market_name") or "cuda"),
        pci_bus_id=_or_none(smi, lambda: smi.amdsmi_get_gpu_device_bdf(handle)),
        compute_capability=None,
        total_memory=total << 20 if isinstance(total, int) else None,
    )
    return Gpu(index, Processor(handle), device)


def _or_none(smi: Any, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (KeyError, smi.AmdSmiException):
        return None


class NotReported(Exception):
    """The GPU does not report a value; the message is amdsmi's reason."""


def read(processor: Processor, what: str) -> Any:
    """A value that a GPU reports.

    Args:
        processor: the GPU.
        what: a key of the table below.

    Raises:
        NotReported: if the GPU does not report it.
    """
    smi = session()
    try:
        return _READERS[what](smi, processor.handle)
    except (AttributeError, KeyError) as error:
        raise NotReported(f"this amdsmi does not know {error}") from error
    except smi.AmdSmiException as error:
        raise NotReported(str(error)) from error


def _number(value: Any) -> int:
    if not isinstance(value, int):
        raise NotReported(f"amdsmi answers {value!r}")
    return value


def _utilization(smi: Any, handle: Any) -> int:
    return _number(smi.amdsmi_get_gpu_activity(handle)["gfx_activity"])


def _memory_usage(smi: Any, handle: Any) -> int:
    return _number(smi.amdsmi_get_gpu_activity(handle)["umc_activity"])


def _rates(smi: Any, handle: Any) -> Rates:
    return Rates(_utilization(smi, handle), _memory_usage(smi, handle))


def _memory_used(smi: Any, handle: Any) -> int:
    return _number(smi.amdsmi_get_gpu_vram_usage(handle)["vram_used"]) << 20


def _temperature(smi: Any, handle: Any) -> int:
    sensor, metric = smi.AmdSmiTemperatureType.JUNCTION, smi.AmdSmiTemperatureMetric.CURRENT
    return _number(smi.amdsmi_get_temp_metric(handle, sensor, metric))


def _power(smi: Any, handle: Any) -> int:
    power = smi.amdsmi_get_power_info(handle)
    watts = power["average_socket_power"]
    return 1000 * _number(power["current_socket_power"] if watts == _NONE else watts)


def _clock(smi: Any, handle: Any) -> int:
    clock = smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.GFX)
    return _number(clock["clk"] if "clk" in clock else clock["cur_clk"])  # "cur_clk" before ROCm 6.2


def _processes(smi: Any, handle: Any) -> list[tuple[int, str | None, int | None]]:
    found: list[tuple[int, str | None, int | None]] = []
    for process in smi.amdsmi_get_gpu_process_list(handle):
        name, used = process["name"], process["memory_usage"]["vram_mem"]
        found.append((process["pid"], None if name == _NONE else name, used if isinstance(used, int) else None))
    return found


_READERS: dict[str, Callable[[Any, Any], Any]] = {
    "utilization": _utilization,
    "memory utilization": _memory_usage,
    "utilization rates": _rates,
    "memory": _memory_used,
    "temperature": _temperature,
    "power draw": _power,
    "clock rate": _clock,
    "processes": _processes,
}


def _begin_anew() -> None:
    global _lock, _binding, _gpus
    _lock, _binding, _gpus = threading.RLock(), None, None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
