"""Every accelerator call a PyTorch library needs, as a plain function.

``import accelerator as acc``: importing this package imports neither torch nor NVML's binding, reads no device and never
fails; a name's room is opened when the name is first asked for.
"""

from __future__ import annotations

# Registers the look at fork, before anything can have forked.
from ._machine import imports as _imports
from ._machine import process as _process  # noqa: F401

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from . import checkpointing as checkpointing
    from . import compiling as compiling
    from . import deepspeed_bridge as deepspeed_bridge
    from . import deprecated as deprecated
    from . import devices as devices
    from . import discovery as discovery
    from . import dtypes as dtypes
    from . import extensions as extensions
    from . import graphs as graphs
    from . import launching as launching
    from . import low_level as low_level
    from . import memory as memory

    # Never executed: so that what freezes programs finds the rooms that are opened by name below.
    from . import memory_info as memory_info
    from . import monitoring as monitoring
    from . import pinning as pinning
    from . import profiling as profiling
    from . import properties as properties
    from . import random as random
    from . import simulation as simulation
    from . import snapshots as snapshots
    from . import streams as streams
    from . import tensors as tensors

__version__ = "0.2.0"

_NAMES_OF_ROOM = {
    "discovery": (
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
        "current_device",
        "current_device_index",
        "current_device_name",
        "device",
        "device_index",
        "device_of",
        "set_device",
        "set_device_index",
    ),
    "properties": (
        "can_device_access_peer",
        "get_arch_list",
        "get_device_capability",
        "get_device_properties",
        "get_gencode_flags",
    ),
    "streams": (
        "Event",
        "Stream",
        "current_stream",
        "default_stream",
        "external_stream",
        "handles_memory_backpressure",
        "is_synchronized_device",
        "resolves_data_dependency",
        "set_stream",
        "stream",
        "synchronize",
        "use_host_timers",
    ),
    "low_level": (
        "cudart",
        "current_blas_handle",
        "get_sync_debug_mode",
        "init",
        "ipc_collect",
        "lazy_call",
        "set_sync_debug_mode",
    ),
    "memory": (
        "empty_cache",
        "empty_host_cache",
        "get_per_process_memory_fraction",
        "host_memory_stats",
        "host_memory_stats_as_nested_dict",
        "max_memory_allocated",
        "max_memory_reserved",
        "memory_allocated",
        "memory_reserved",
        "memory_stats",
        "memory_stats_as_nested_dict",
        "reset_accumulated_host_memory_stats",
        "reset_accumulated_memory_stats",
        "reset_peak_host_memory_stats",
        "reset_peak_memory_stats",
        "set_per_process_memory_fraction",
    ),
    "memory_info": (
        "available_memory",
        "get_memory_info",
        "is_out_of_memory_error",
        "mem_get_info",
        "total_memory",
    ),
    "snapshots": (
        "dump_memory_snapshot",
        "memory_snapshot",
        "memory_summary",
        "record_memory_history",
    ),
    "random": (
        "default_generator",
        "fork_rng",
        "get_rng_state",
        "get_rng_state_all",
        "initial_seed",
        "manual_seed",
        "manual_seed_all",
        "seed",
        "seed_all",
        "set_rng_state",
        "set_rng_state_all",
    ),
    "dtypes": (
        "amp",
        "is_bf16_supported",
        "is_fp16_supported",
        "is_fp64_supported",
        "is_fp8_supported",
        "is_tf32_supported",
        "supported_dtypes",
    ),
    "graphs": (
        "Graph",
        "capture_to_graph",
        "create_graph",
        "graph_pool_handle",
        "is_current_stream_capturing",
        "make_graphed_callables",
        "replay_graph",
    ),
    "tensors": (
        "BFloat16Tensor",
        "ByteTensor",
        "DoubleTensor",
        "FloatTensor",
        "HalfTensor",
        "IntTensor",
        "LongTensor",
        "on_accelerator",
    ),
    "pinning": (
        "is_pinned",
        "pin_empty",
        "pin_empty_like",
        "pin_memory",
        "pin_memory_alignment",
        "register_host_memory",
        "unpin_memory",
        "unregister_host_memory",
    ),
    "deepspeed_bridge": ("use_in_deepspeed",),
    "profiling": ("annotate", "range_pop", "range_push", "supports_nvtx_domain"),
    "compiling": ("get_compile_backend", "is_triton_supported", "prefer_triton_grouped_mm", "set_compile_backend"),
    "extensions": (
        "build_extension",
        "create_op_builder",
        "get_op_builder",
        "op_builder_dir",
        "register_op_builder",
    ),
    "deprecated": (
        "current_device_idx",
        "max_memory_cached",
        "memory_cached",
        "reset_max_memory_allocated",
        "reset_max_memory_cached",
        "set_device_idx",
    ),
}
_ROOM_OF_NAME = {name: room for room, names in _NAMES_OF_ROOM.items() for name in names}
_SUBMODULES = ("checkpointing", "random", "simulation")

# What can be imported without torch, and so under the lock that a fork waits for.
_WITHOUT_TORCH = ("memory_info", "discovery", "launching", "monitoring", "simulation")

# Which class these are depends on whether the CPU stands in, which may change.
_NOT_KEPT = ("Event", "Stream")

# Type checkers read the names from the stub beside this file.
__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    "__version__",
    *sorted((*_ROOM_OF_NAME, *_SUBMODULES)),
]


def __getattr__(name: str) -> Any:
    if name == "_name":  # what DeepSpeed reads of its accelerator object beside the methods
        from . import launching

        return launching.device_type()
    room = name if name in _SUBMODULES else _ROOM_OF_NAME.get(name)
    if room is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # The rooms that need torch all begin with this one.
    opened = _imports.import_public(room if room in _WITHOUT_TORCH else "discovery", __name__)
    if room not in _WITHOUT_TORCH:
        from importlib import import_module

        opened = import_module(f".{room}", __name__)
    if room == name:
        return opened
    value = getattr(opened, name)
    if name not in _NOT_KEPT:
        globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
