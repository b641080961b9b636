"""Every accelerator call a PyTorch library needs, as a plain function.

``import accelerator as acc``: importing this package imports neither torch nor NVML's binding, reads no device and never
fails; a name's room is opened when the name is first asked for.
"""

from __future__ import annotations

import importlib

from accelerator import _process as _process  # registers the look at fork, before anything can have forked

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.1.0"

_NAMES_OF_ROOM = {
    "discovery": (
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
    ),
    "launching": (
        "communication_backend_name",
        "communication_backend_version",
        "export_envs",
        "set_visible_devices_envs",
        "visible_devices_envs",
    ),
    "monitoring": (
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
    ),
    "devices": (
        "current_accelerator",
        "current_device_index",
        "device_index",
        "get_device_capability",
        "set_device_index",
    ),
    "streams": ("Event", "Stream", "current_stream", "set_stream", "synchronize"),
    "memory": (
        "empty_cache",
        "empty_host_cache",
        "get_memory_info",
        "max_memory_allocated",
        "max_memory_reserved",
        "memory_allocated",
        "memory_reserved",
        "memory_stats",
        "reset_accumulated_memory_stats",
        "reset_peak_memory_stats",
    ),
    "graphs": ("Graph",),
    "deprecated": ("current_device_idx", "set_device_idx"),
}
_ROOM_OF_NAME = {name: room for room, names in _NAMES_OF_ROOM.items() for name in names}
_SUBMODULES = ("checkpointing", "simulation")

# Which class these are depends on whether the CPU stands in, which may change.
_NOT_KEPT = ("Event", "Stream")

# Type checkers read the names from the stub beside this file.
__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    "__version__",
    *sorted((*_ROOM_OF_NAME, *_SUBMODULES)),
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"accelerator.{name}")
    try:
        room = _ROOM_OF_NAME[name]
    except KeyError:
        raise AttributeError(f"module 'accelerator' has no attribute {name!r}") from None
    value = getattr(importlib.import_module(f"accelerator.{room}"), name)
    if name not in _NOT_KEPT:
        globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
