"""Compare DeepSpeed's accelerator classes with this package, on stand-ins for the vendors' torch modules.

``python -m tests.runtime.vendor_modules DEVICE_TYPE...`` prints, as JSON, a line for each device type with the two results
of each method that needs no hardware. The stand-ins replace torch's bindings for the accelerator and the vendor's module.
"cuda" needs simulated GPUs, "cpu" a process without an accelerator.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

DEVICES = 2

# The arguments of each call of a method.
CALLS: dict[str, tuple[tuple[Any, ...], ...]] = {
    **dict.fromkeys(("is_synchronized_device", "use_host_timers", "resolves_data_dependency"), ((),)),
    **dict.fromkeys(("handles_memory_backpressure", "current_device", "current_device_name", "device_count"), ((),)),
    **dict.fromkeys(("is_available", "is_triton_supported", "prefer_triton_grouped_mm", "random"), ((),)),
    **dict.fromkeys(("communication_backend_name", "export_envs", "visible_devices_envs", "get_compile_backend"), ((),)),
    **dict.fromkeys(("op_builder_dir", "build_extension", "pin_memory_alignment", "initial_seed"), ((),)),
    **dict.fromkeys(("is_bf16_supported", "is_fp16_supported", "is_fp64_supported", "supported_dtypes"), ((),)),
    **dict.fromkeys(("is_current_stream_capturing", "empty_cache", "create_graph"), ((),)),
    **dict.fromkeys(("device_name", "device"), ((), (1,))),
    **dict.fromkeys(("set_device", "default_generator"), ((1,),)),
    **dict.fromkeys(("synchronize", "current_stream", "default_stream"), ((), (1,))),
    **dict.fromkeys(("manual_seed", "manual_seed_all"), ((7,),)),
    **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), ((), (1,))),
    **dict.fromkeys(("memory_stats", "reset_peak_memory_stats", "total_memory", "available_memory"), ((), (1,))),
    **dict.fromkeys(("memory_cached", "max_memory_cached", "reset_max_memory_cached", "reset_max_memory_allocated"), ((),)),
    **dict.fromkeys(("get_rng_state",), ((), (1,))),
    "set_rng_state": ((torch.Generator().get_state(),),),
    "stream": ((None,),),
    "range_push": (("range",),),
    "range_pop": ((),),
    "lazy_call": ((lambda: None,),),
    "on_accelerator": ((torch.ones(1),),),
    "set_visible_devices_envs": (({}, [0, 1]), ({}, ["1"])),
    "set_compile_backend": (("eager",), ("no such backend",)),
    "create_op_builder": (("NoSuchBuilder",),),
    "get_op_builder": (("NoSuchBuilder",),),
}
PROPERTIES = ("Stream", "Event")
# These methods copy tensors to the device, register memory with its driver, or capture its work.
NEED_HARDWARE = {
    *("BFloat16Tensor", "ByteTensor", "DoubleTensor", "FloatTensor", "HalfTensor", "IntTensor", "LongTensor"),
    *("pin_memory", "pin_empty", "pin_empty_like", "unpin_memory", "is_pinned"),
    *("register_host_memory", "unregister_host_memory", "capture_to_graph", "replay_graph"),
}

CLASSES = {
    "xpu": "XPU_Accelerator",
    "npu": "NPU_Accelerator",
    "hpu": "HPU_Accelerator",
    "mlu": "MLU_Accelerator",
    "sdaa": "SDAA_Accelerator",
    "supa": "SUPA_Accelerator",
    "mps": "MPS_Accelerator",
    "cuda": "CUDA_Accelerator",
    "cpu": "CPU_Accelerator",
}


class Graph:
    """A stand-in for a vendor's class of graphs."""


class Generator:
    """A stand-in for a generator of a device, which uses one of the CPU's."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._generator = device, torch.Generator()
        for name in ("get_state", "set_state", "manual_seed", "initial_seed", "seed"):
            setattr(self, name, getattr(self._generator, name))


def vendor_module(device_type: str) -> ModuleType:
    """Return a module with the functions of the vendors' modules. Different figures of memory have different values."""
    generators = tuple(Generator(torch.device(device_type, index)) for index in range(DEVICES))

    def index_of(device: int | None) -> int:
        return 0 if device is None else device

    def stream(device: int | None = None) -> Any:
        of = torch.device(device_type, index_of(device))
        return SimpleNamespace(
            device=of, stream_id=0, device_index=of.index, device_type=int(torch._C._autograd.DeviceType.CPU)
        )

    module: Any = ModuleType(f"torch.{device_type}" if device_type in ("xpu", "mps") else f"torch_{device_type}")
    figures = {"memory_allocated": 11, "max_memory_allocated": 12, "memory_reserved": 13, "max_memory_reserved": 14}
    figures |= {"memory_cached": 13, "max_memory_cached": 14, "current_allocated_memory": 11, "driver_allocated_memory": 13}
    for name, value in figures.items():
        setattr(module, name, lambda device=None, value=value: value + 100 * index_of(device))
    statistics = {"Limit": 50, "InUse": 20}
    vars(module).update(
        device_count=lambda: 1 if device_type == "mps" else DEVICES,
        current_device=lambda: 0,
        is_available=lambda: True,
        is_initialized=lambda: True,
        init=lambda: None,
        set_device=lambda device: None,
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
        mem_get_info=lambda device=None: (30, 50),
        get_device_properties=lambda device=None: SimpleNamespace(total_memory=50, name="a device"),
        recommended_max_memory=lambda: 50,
        memory_stats=lambda device=None: dict(statistics),
        memory_stats_as_nested_dict=lambda device=None: dict(statistics),
        reset_peak_memory_stats=lambda device=None: None,
        reset_max_memory_allocated=lambda device=None: None,
        reset_max_memory_cached=lambda device=None: None,
        is_bf16_supported=lambda *_: True,
        is_current_stream_capturing=lambda: False,
        Stream=torch.Stream,
        Event=torch.Event,
        stream=lambda stream: nullcontext(),
        current_stream=stream,
        default_stream=stream,
        default_generators=generators,
        manual_seed=lambda seed: generators[0]._generator.manual_seed(seed) and None,
        manual_seed_all=lambda seed: [each._generator.manual_seed(seed) for each in generators] and None,
        initial_seed=lambda: generators[0]._generator.initial_seed(),
        get_rng_state=lambda device=None: generators[index_of(device)]._generator.get_state(),
        set_rng_state=lambda state, device=None: generators[index_of(device)]._generator.set_state(state) and None,
        _lazy_call=lambda callback: callback(),
        NPUGraph=Graph,
        MLUGraph=Graph,
        HPUGraph=Graph,
        SUPAGraph=Graph,
        XPUGraph=Graph,
        cnpx=SimpleNamespace(range_push=lambda message: None, range_pop=lambda: None),
        _cuda_isCurrentStreamCapturing=lambda: False,
    )
    module.random, module.memory = module, module
    if device_type in ("mlu", "sdaa"):
        module.device = lambda device=None: nullcontext()
    return module


def install(device_type: str) -> None:
    """Make a stand-in module torch's accelerator. Call this before importing DeepSpeed's class or this package."""
    if device_type not in ("hpu", "xpu", "mps"):  # torch knows these device types
        torch.utils.rename_privateuse1_backend(device_type)
    module = vendor_module(device_type)
    setattr(torch, device_type, module)
    sys.modules[f"torch.{device_type}"] = sys.modules[f"torch_{device_type}"] = module
    if device_type == "hpu":
        core: Any = ModuleType("habana_frameworks.torch.core")
        core.hpu = module
        packages = {name: ModuleType(name) for name in ("habana_frameworks", "habana_frameworks.torch")}
        vars(packages["habana_frameworks"]).update(torch=packages["habana_frameworks.torch"])
        vars(packages["habana_frameworks.torch"]).update(hpu=module, core=core)
        sys.modules.update({**packages, "habana_frameworks.torch.hpu": module, "habana_frameworks.torch.core": core})

    def no_allocator(*arguments: Any) -> Any:
        raise RuntimeError("device_allocator INTERNAL ASSERT FAILED")

    # Tensors of the device are created on the CPU.
    create: Any = torch.empty
    torch.empty = lambda *size, device=None, **options: create(*size, **options)  # type: ignore[assignment]
    bindings: Any = torch._C
    bindings._accelerator_getAccelerator = lambda: torch.device(device_type)
    bindings._accelerator_getDeviceIndex = lambda: 0
    bindings._accelerator_setDeviceIndex = lambda index: None
    bindings._accelerator_exchangeDevice = bindings._accelerator_maybeExchangeDevice = lambda index: 0
    bindings._accelerator_synchronizeDevice = lambda index: None
    bindings._accelerator_getStream = lambda index: module.current_stream(index)
    for name in ("getDeviceStats", "resetPeakStats", "emptyCache"):
        setattr(bindings, f"_accelerator_{name}", no_allocator)
    vars(torch.accelerator).pop("get_memory_info", None)


def outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Return the result of a call in a form that can be compared, or the type of its error."""
    try:
        value = comparable(function(*arguments))
        # DeepSpeed's method changes a mapping. Ours returns it too.
        return comparable(arguments[0]) if arguments and isinstance(arguments[0], dict) else value
    except Exception as error:
        return f"raises {type(error).__name__}"


def copied(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with copies of the mappings, because a call may change them."""
    return tuple(dict(each) if isinstance(each, dict) else each for each in arguments)


def comparable(value: Any) -> Any:
    if isinstance(value, (bool, int, str, type(None))):
        return value
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, torch.Tensor):
        return f"tensor {value.dtype} {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return [comparable(each) for each in value]
    if isinstance(value, dict):
        return {name: comparable(each) for name, each in value.items()}
    if isinstance(value, (Graph, torch.cuda.CUDAGraph)):
        return "a graph"
    if hasattr(value, "initial_seed"):
        return f"the generator of {value.device}"
    if isinstance(value, torch.Stream) or type(value) is SimpleNamespace:
        return f"stream {value.stream_id} of index {value.device_index}"
    if hasattr(value, "__enter__"):
        return "a context manager"
    return str(value).partition(" at 0x")[0]


def compare(device_type: str) -> dict[str, tuple[Any, Any]]:
    """Return the results of each call: that of DeepSpeed's class and that of this package."""
    # DeepSpeed searches for its own package called ``accelerator`` and so has imported this one.
    for name in [name for name in sys.modules if name.partition(".")[0] == "accelerator"]:
        del sys.modules[name]
    if device_type not in ("cuda", "cpu"):
        install(device_type)
    theirs: Any = getattr(import_module(f"deepspeed.accelerator.{device_type}_accelerator"), CLASSES[device_type])()
    import accelerator as acc

    if device_type == "cuda":
        torch.cuda.init()
    uncovered = {name for name in dir(type(theirs).__mro__[-2]) if not name.startswith("_")}
    uncovered -= {*CALLS, *PROPERTIES, *NEED_HARDWARE, "supports_nvtx_domain"}
    assert uncovered == set(), f"no call of {sorted(uncovered)}"
    results: dict[str, tuple[Any, Any]] = {}
    for name, calls in CALLS.items():
        for arguments in calls:
            shown = f"{name}({', '.join(map(repr, arguments)) if name not in ('lazy_call', 'set_rng_state') else '...'})"
            results[shown] = tuple(outcome(getattr(side, name, missing), copied(arguments)) for side in (theirs, acc))  # type: ignore[assignment]
    for name in PROPERTIES:
        results[name] = comparable(getattr(theirs, name)), comparable(getattr(acc, name))
    return results


def missing(*arguments: Any) -> Any:
    raise NotImplementedError


def main(*device_types: str) -> None:
    """Compare each device type in a forked child, or a single one in this process."""
    # Importing these takes long, so all children share the import.
    import deepspeed  # noqa: F401
    import torch._dynamo  # noqa: F401

    for chosen in device_types:
        sys.stdout.flush()
        # A single type needs no fork. torch may refuse CUDA in a forked child, because DeepSpeed has counted devices.
        child = os.fork() if len(device_types) > 1 else 0
        if child == 0:
            print("\n" + json.dumps([chosen, compare(chosen)]), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"the comparison of {chosen} failed")


if __name__ == "__main__":
    main(*sys.argv[1:])
