"""The vendor table, one row per accelerator: its variables, those that launchers forward, backends, and names in torch.

Sources: DeepSpeed's accelerator classes (0.19.8) for communication backends, forwarded prefixes, compile backends, timers, data
dependency and backpressure, op builders, and the names of graph classes; torch's modules (2.15) for XPU, MPS and MTIA; the
vendors' documentation for variables. A row notes where it differs from DeepSpeed's class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# The grammars of visible-devices variables: CUDA's list (ordinals, UUIDs), plain indices, Level Zero's cards and tiles.
CUDA_LIST, INDICES, TILES = "cuda list", "indices", "tiles"


class Vendor(NamedTuple):
    """One row of the table.

    Attributes:
        device_type: torch's device type.
        visible_devices: the variables that decide what a process sees; a launcher sets the first.
        grammar: how these variables are written.
        communication_backend: the ``torch.distributed`` backend.
        export_prefixes: prefixes of the variables that a launcher forwards.
        has_triton: whether Triton compiles for it.
        min_triton_capability: the least compute capability for which DeepSpeed uses Triton; None for any.
        compile_backend: the default backend of ``torch.compile``.
        is_synchronized: whether its ops run synchronously, without streams.
        use_host_timers: whether DeepSpeed times it on the host.
        resolves_data_dependency: whether ops on several streams need no events.
        handles_memory_backpressure: whether its allocator waits for memory that is still in use.
        op_builders: the sub-package of DeepSpeed's op builders; "" for the package itself.
        graph_class: the name of the graph class in torch's module for it, or None.
        range_module: the submodule with ``range_push`` and ``range_pop`` for profilers, or None.
        min_capabilities: the least compute capability that computes in a number format ("bfloat16", "float16", "tf32", "fp8").
        architectures: prefixes of the names of the architectures that compute in a format; () for all architectures.
        has_compute_capability: whether its devices have a compute capability.
        device_order: further variables that decide which devices a process sees, or their order.
        module_names: functions that its module has under another name, each with that name.
        takes_device: whether the functions of its module take a device; not if there is only one.
        shares_host_memory: whether its devices have no memory of their own.
        memory_limits: keys of total and used bytes in its module's memory statistics, if the module reports them nowhere else.
        has_host_allocator: whether torch has an allocator of pinned host memory for it.
        pin_memory_alignment: the alignment in bytes of host memory that its driver registers.
        counting_may_initialize: whether its module may initialize the accelerator to count the devices.
        telemetry: functions of its module that read the initialized device, each with the factor that converts its unit to the
            unit of this package.
    """

    device_type: str
    visible_devices: tuple[str, ...] = ()
    grammar: str = INDICES
    communication_backend: str = "gloo"
    export_prefixes: tuple[str, ...] = ()
    has_triton: bool = False
    min_triton_capability: tuple[int, int] | None = None
    compile_backend: str = "inductor"
    is_synchronized: bool = False
    use_host_timers: bool = False
    resolves_data_dependency: bool = False
    handles_memory_backpressure: bool = False
    op_builders: str = ""
    graph_class: str | None = None
    range_module: str | None = None
    min_capabilities: Mapping[str, tuple[int, int]] = {}
    architectures: Mapping[str, tuple[str, ...]] = {}
    has_compute_capability: bool = False
    device_order: tuple[str, ...] = ()
    module_names: Mapping[str, str] = {}
    takes_device: bool = True
    shares_host_memory: bool = False
    memory_limits: tuple[str, str] | None = None
    has_host_allocator: bool = False
    pin_memory_alignment: int = 1
    counting_may_initialize: bool = False
    telemetry: Mapping[str, int] = {}


_CUDA = Vendor(
    "cuda",
    visible_devices=("CUDA_VISIBLE_DEVICES",),
    grammar=CUDA_LIST,
    communication_backend="nccl",
    export_prefixes=("NCCL",),
    has_triton=True,
    min_triton_capability=(8, 0),
    graph_class="CUDAGraph",
    range_module="nvtx",
    # As torch.cuda's functions; float16 as DeepSpeed's class, and as it allows with DS_ALLOW_DEPRECATED_FP16.
    min_capabilities={"bfloat16": (8, 0), "float16": (7, 0), "deprecated float16": (6, 0), "tf32": (8, 0), "fp8": (8, 9)},
    architectures={"float64": ()},
    has_compute_capability=True,
    device_order=("CUDA_DEVICE_ORDER",),
    has_host_allocator=True,
)
# DeepSpeed has no class for ROCm. HIP reads CUDA's variable if its own is not set, and RCCL is nccl to torch.
_ROCM = _CUDA._replace(
    visible_devices=("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    min_triton_capability=None,
    min_capabilities={},
    architectures={
        "bfloat16": (),
        "float16": (),
        "float64": (),
        "tf32": ("gfx94", "gfx95"),
        "fp8": ("gfx942", "gfx950", "gfx12"),
    },
    device_order=("CUDA_VISIBLE_DEVICES",),
)
_CPU = Vendor(
    "cpu",
    is_synchronized=True,
    use_host_timers=True,
    resolves_data_dependency=True,
    handles_memory_backpressure=True,
    op_builders="cpu",
)
_OTHERS = (
    # DeepSpeed's class forwards nothing and says that Triton is not supported; Intel's Triton is part of torch's XPU wheels.
    # Only newer torch has XPUGraph.
    Vendor(
        "xpu",
        visible_devices=("ZE_AFFINITY_MASK",),
        grammar=TILES,
        communication_backend="xccl",
        export_prefixes=("CCL", "ZE"),
        has_triton=True,
        op_builders="xpu",
        graph_class="XPUGraph",
        has_host_allocator=True,
        counting_may_initialize=True,
        # torch.xpu's power is in watts.
        telemetry={"utilization": 1, "memory_usage": 1, "temperature": 1, "power_draw": 1000, "clock_rate": 1},
    ),
    # DeepSpeed's class names CUDA's variable, as a placeholder. MPS has one device and one command queue.
    Vendor(
        "mps",
        is_synchronized=True,
        use_host_timers=True,
        resolves_data_dependency=True,
        handles_memory_backpressure=True,
        op_builders="mps",
        module_names={"memory_allocated": "current_allocated_memory", "memory_reserved": "driver_allocated_memory"},
        takes_device=False,
        shares_host_memory=True,
    ),
    # DeepSpeed has no class for MTIA.
    Vendor("mtia", op_builders="mtia", graph_class="MTIAGraph"),
    # DeepSpeed's class names CUDA's variable because Habana's needs more set-up, and forwards nothing.
    Vendor(
        "hpu",
        visible_devices=("HABANA_VISIBLE_MODULES",),
        communication_backend="hccl",
        export_prefixes=("HCCL", "HABANA"),
        compile_backend="hpu_backend",
        resolves_data_dependency=True,
        handles_memory_backpressure=True,
        op_builders="hpu",
        graph_class="HPUGraph",
        memory_limits=("Limit", "InUse"),
    ),
    Vendor(
        "npu",
        visible_devices=("ASCEND_RT_VISIBLE_DEVICES",),
        communication_backend="hccl",
        export_prefixes=("ASCEND", "HCCL", "LD_LIBRARY", "PATH"),
        op_builders="npu",
        graph_class="NPUGraph",
        pin_memory_alignment=4096,
        telemetry={"utilization": 1},
    ),
    # "MLU" is not in DeepSpeed's list.
    Vendor(
        "mlu",
        visible_devices=("MLU_VISIBLE_DEVICES",),
        communication_backend="cncl",
        export_prefixes=("NEUWARE_HOME", "CNCL", "MLU", "LD_LIBRARY", "PATH"),
        has_triton=True,
        op_builders="mlu",
        graph_class="MLUGraph",
        range_module="cnpx",
    ),
    Vendor(
        "sdaa",
        visible_devices=("SDAA_VISIBLE_DEVICES",),
        communication_backend="tccl",
        export_prefixes=("NCCL", "LD_LIBRARY", "PATH"),
        op_builders="sdaa",
    ),
    Vendor(
        "supa",
        visible_devices=("SUPA_VISIBLE_DEVICES",),
        communication_backend="bccl",
        export_prefixes=("BCCL", "BIREN", "SUPA", "LD_LIBRARY", "PATH"),
        has_triton=True,
        op_builders="supa",
        graph_class="SUPAGraph",
    ),
)
_TABLE = {row.device_type: row for row in (_CUDA, _CPU, *_OTHERS)}


def get_row(device_type: str, *, is_hip: bool = False) -> Vendor:
    """The row of a device type; for an unknown one a row without variables, backend or features of its own.

    Args:
        device_type: torch's device type.
        is_hip: whether "cuda" means ROCm.
    """
    if is_hip and device_type == "cuda":
        return _ROCM
    return _TABLE.get(device_type) or Vendor(device_type, op_builders=device_type)
