"""Every accelerator call a PyTorch library needs, as a plain function.

``import accelerator as acc``: importing this package imports neither torch nor NVML's binding, reads no device and never
fails. A module of the package is imported when one of its names is first used.

The examples in docstrings assume ``import torch``, ``import accelerator as acc`` and ``from accelerator import checkpointing``.
"""

# ruff: noqa: F403
from __future__ import annotations

import os
import sys

# ``process`` registers the at-fork hooks before the process can fork.
from ._machine import imports as _imports
from ._machine import process as _process  # noqa: F401  # pyright: ignore[reportUnusedImport]
from ._machine import triton as _triton

# typing.TYPE_CHECKING without importing typing. Type checkers read the names here, and freezing tools find the modules.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

    # A star import exports the names of the module's ``__all__``.
    from . import checkpointing as checkpointing
    from . import simulation as simulation
    from .compiling import *
    from .deepspeed_bridge import *
    from .deprecated import *
    from .devices import *
    from .discovery import *
    from .dtypes import *
    from .extensions import *
    from .graphs import *
    from .identity import *
    from .launching import *
    from .low_level import *
    from .memory import *
    from .memory_info import *
    from .monitoring import *
    from .out_of_memory import *
    from .pinning import *
    from .profiling import *
    from .properties import *
    from .random import *
    from .random import CallableModule as _CallableModule
    from .snapshots import *
    from .streams import *
    from .tensors import *

    random: _CallableModule

__version__ = "0.5.0"

# Public names by module: the ``__all__`` of each.
_NAMES = {
    "discovery": """
        Device PhysicalDevice VisibleDevice device_count device_name get_device_index is_available is_fork_safe is_in_bad_fork
        is_initialized physical_devices refresh unavailable_reason usable_devices visible_devices
    """,
    "identity": "compute_capability driver_cuda_version driver_version get_device_name is_nvlink_connected numa_node",
    "launching": """
        communication_backend_name communication_backend_version export_envs set_visible_devices_envs visible_devices_envs
    """,
    "monitoring": """
        Process Telemetry clock_rate device_memory_used list_gpu_processes memory_usage power_draw processes telemetry
        temperature utilization
    """,
    "devices": """
        current_accelerator current_device current_device_index current_device_name device device_index device_of set_device
        set_device_index
    """,
    "properties": "can_device_access_peer get_arch_list get_device_capability get_device_properties get_gencode_flags",
    "streams": """
        Event Stream current_stream default_stream external_stream handles_memory_backpressure is_synchronized_device
        record_stream resolves_data_dependency set_stream stream synchronize use_host_timers
    """,
    "low_level": "cudart current_blas_handle get_sync_debug_mode init ipc_collect lazy_call set_sync_debug_mode",
    "memory": """
        OutOfMemoryError create_mem_pool empty_cache empty_host_cache get_allocator_backend get_per_process_memory_fraction
        host_memory_stats host_memory_stats_as_nested_dict max_memory_allocated max_memory_reserved memory_allocated
        memory_reserved memory_stats memory_stats_as_nested_dict reset_accumulated_host_memory_stats
        reset_accumulated_memory_stats reset_peak_host_memory_stats reset_peak_memory_stats set_per_process_memory_fraction
        use_mem_pool
    """,
    "memory_info": "available_memory get_memory_info mem_get_info total_memory",
    "out_of_memory": "is_out_of_memory_error",
    "snapshots": "dump_memory_snapshot memory_snapshot memory_summary record_memory_history",
    "random": """
        default_generator fork_rng get_rng_state get_rng_state_all initial_seed manual_seed manual_seed_all seed seed_all
        set_rng_state set_rng_state_all
    """,
    "dtypes": "amp is_bf16_supported is_fp16_supported is_fp64_supported is_fp8_supported is_tf32_supported supported_dtypes",
    "graphs": """
        Graph capture_to_graph create_graph graph_pool_handle is_current_stream_capturing make_graphed_callables replay_graph
    """,
    "tensors": "BFloat16Tensor ByteTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor on_accelerator",
    "pinning": """
        is_pinned pin_empty pin_empty_like pin_memory pin_memory_alignment register_host_memory unpin_memory
        unregister_host_memory
    """,
    "deepspeed_bridge": "supports_nvtx_domain use_in_deepspeed",
    "profiling": "annotate range_pop range_push",
    "compiling": "get_compile_backend is_triton_supported prefer_triton_grouped_mm set_compile_backend",
    "extensions": "build_extension create_op_builder get_op_builder op_builder_dir register_op_builder",
    "deprecated": """
        current_device_idx max_memory_cached memory_cached reset_max_memory_allocated reset_max_memory_cached set_device_idx
    """,
}
_EXPORTS = {module: tuple(names.split()) for module, names in _NAMES.items()}
_MODULE_OF_NAME = {name: module for module, names in _EXPORTS.items() for name in names}
_SUBMODULES = ("checkpointing", "random", "simulation")

# These import no torch, so they are imported under the lock that a fork waits for.
_TORCH_FREE = ("discovery", "identity", "launching", "memory_info", "monitoring", "out_of_memory", "simulation")

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    "__version__",
    *sorted((*_MODULE_OF_NAME, *_SUBMODULES)),
]


def _import(name: str) -> ModuleType:
    """Import a module of this package. Modules that need torch are imported after ``discovery``, because all of them use it."""
    module: ModuleType = _imports.import_public(name if name in _TORCH_FREE else "discovery", __name__)
    if name in _TORCH_FREE:
        return module
    from importlib import import_module

    from ._machine import torch_build

    torch_build.check_importable()
    return import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return __all__


@_triton.register_check
def _simulation_runs_triton() -> bool:
    runs: bool = _import("simulation._outside.environment").triton_runs()
    return runs


def _current_class(name: str) -> Any:
    """``acc.Stream``, ``acc.Event`` or ``acc.Graph``, as a descriptor: the CPU fallback has other classes, so none is stored.

    The first use replaces it by one that calls only the module's function. The module's ``__getattr__`` would run only after a
    failed lookup, which takes longer than all of this. Without ``__set__``, tests can replace the attribute.
    """

    def read(*arguments: object) -> Any:
        reader = _import(_MODULE_OF_NAME[name]).class_reader(name)
        setattr(_Package, name, _descriptor(reader))
        return reader()

    return _descriptor(read)


def _descriptor(get: Callable[..., Any]) -> Any:
    return type("_CurrentClass", (), {"__get__": get})()


class _Package(type(os)):  # type: ignore[misc]
    """The type of this module."""

    if not TYPE_CHECKING:
        Stream = _current_class("Stream")
        Event = _current_class("Event")
        Graph = _current_class("Graph")


sys.modules[__name__].__class__ = _Package

if not TYPE_CHECKING:  # so that type checkers report unknown names

    def __getattr__(name: str) -> Any:
        if name == "_name":  # an attribute of DeepSpeed's accelerator object
            from . import launching

            return launching.device_type()
        if name in _SUBMODULES:
            return _import(name)
        if name not in _MODULE_OF_NAME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(_import(_MODULE_OF_NAME[name]), name)
        return value
