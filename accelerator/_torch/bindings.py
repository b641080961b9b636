"""torch's private bindings. No other runtime module uses them.

Newer releases of torch have one binding for all accelerators, older ones CUDA's only. CUDA's is called for CUDA and never for
another accelerator, whose module's own public function takes its place.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import _C

from .._machine import process
from . import versions


def _binding(*names: str) -> Any:
    """Return the first of these bindings that this torch has, or None."""
    return next((getattr(_C, name) for name in names if hasattr(_C, name)), None)


get_index = _C._accelerator_getDeviceIndex
set_index = _C._accelerator_setDeviceIndex
get_stream = _C._accelerator_getStream
set_stream = _C._accelerator_setStream


def _exchange_index(of_cuda: str, index: int) -> int:
    if process.torch_accelerator_type() == "cuda" and hasattr(_C, of_cuda):
        return int(getattr(_C, of_cuda)(index))
    previous: int = get_index()
    set_index(index)
    return previous


_Function = Callable[..., Any]
exchange_index: _Function = _binding("_accelerator_exchangeDevice") or partial(_exchange_index, "_cuda_exchangeDevice")
restore_index: _Function = _binding("_accelerator_maybeExchangeDevice") or partial(_exchange_index, "_cuda_maybeExchangeDevice")


def _synchronize_and_restore(index: int) -> None:
    previous = exchange_index(index)
    try:
        _C._accelerator_synchronizeDevice(index)
    finally:
        restore_index(previous)


synchronize = _C._accelerator_synchronizeDevice if versions.TORCH_2_14 else _synchronize_and_restore


def _call_allocator(binding: _Function | None, of_cuda: str, of_module: str, *arguments: Any) -> Any:
    """Call the allocator's binding; the function of the accelerator's module if torch has none, or knows no allocator."""
    if binding is None and process.torch_accelerator_type() == "cuda":
        binding = _binding(of_cuda)
    if binding is not None:
        try:
            return binding(*arguments)
        except RuntimeError as error:
            # If torch does not know the allocator, an assertion fails.
            if "device_allocator INTERNAL ASSERT" not in str(error):
                raise
    function = getattr(process.torch_device_module(), of_module, None)
    return function(*arguments) if function else None


# The allocator's nested statistics of a device, or None; and three functions that change something.
memory_statistics, reset_peak_memory_stats, reset_accumulated_memory_stats, empty_cache = (
    partial(_call_allocator, _binding(generic), of_cuda, of_module)
    for generic, of_cuda, of_module in (
        ("_accelerator_getDeviceStats", "_cuda_memoryStats", "memory_stats_as_nested_dict"),
        ("_accelerator_resetPeakStats", "_cuda_resetPeakMemoryStats", "reset_peak_memory_stats"),
        ("_accelerator_resetAccumulatedStats", "_cuda_resetAccumulatedMemoryStats", "reset_accumulated_memory_stats"),
        ("_accelerator_emptyCache", "_cuda_emptyCache", "empty_cache"),
    )
)

empty_host_cache = _binding("_accelerator_emptyHostCache", "_host_emptyCache")

set_sync_debug_mode = _binding("_cuda_set_sync_debug_mode")
get_sync_debug_mode = _binding("_cuda_get_sync_debug_mode")
default_generator = _binding("_accelerator_getDefaultGenerator")

# The name of the accelerator that a plug-in brings.
plugin_name = _C._get_privateuse1_backend_name

# NVTX, which only CUDA builds have.
nvtx = _binding("_nvtx")


def arch_flags(device_type: str) -> Any:
    """Return the binding that reads the architectures that this torch was compiled for, or None without one."""
    return _binding(f"_{device_type}_getArchFlags")


def is_accelerator_traced() -> bool:
    """Return whether torch.compile, which is tracing now, traces the functions of torch.accelerator."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    names = getattr(rules, "torch_non_c_binding_in_graph_functions", None)
    return names is None or "torch.accelerator.synchronize" in names


class _DynamoFinder:
    """Finds Dynamo's module that represents objects when a program imports it, and calls a function after the import."""

    name = "torch._dynamo.variables.builder"

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec: Any = next(filter(None, (finder.find_spec(name, path, target) for finder in sys.meta_path)), None)
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: Any) -> None:
                execute(module)
                self._function(module)

            spec.loader.exec_module = execute_and_call
        return spec


def trace_methods(*classes: type) -> None:
    """Have torch.compile trace the methods of subclasses of torch.Stream and torch.Event, as those of any class.

    Without the two functions of Dynamo, in a newer torch, it traces them as torch's own classes.
    """

    def register(module: Any) -> None:
        dispatch, wrap = (getattr(module.VariableBuilder, name, None) for name in ("_type_dispatch", "wrap_user_defined"))
        if dispatch and wrap:
            dispatch().update(dict.fromkeys(classes, wrap))

    if _DynamoFinder.name in sys.modules:
        register(sys.modules[_DynamoFinder.name])
    else:
        sys.meta_path.insert(0, _DynamoFinder(register))


def name_of(binding: Any) -> str:
    """Return the name by which a child process finds a binding in torch."""
    return f"_C.{binding.__name__}"


def mps_generator() -> torch.Generator | None:
    """Return the generator of MPS, or None if this torch has no such function."""
    function = getattr(torch.mps, "_get_default_mps_generator", None)
    return function() if function else None


def cpu_has_format(name: str) -> bool:
    """Return whether the CPU has instructions for a number format, "bf16" or "fp16"."""
    is_supported: Any = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return bool(is_supported and is_supported())


def untyped_storage(storage: torch.TypedStorage) -> torch.UntypedStorage:
    """Return the storage below a typed one, whose public properties warn that the class is deprecated."""
    return storage._untyped_storage  # pyright: ignore[reportPrivateUsage]


# torch's module for an accelerator (torch.cuda, torch.xpu, ...) stores calls until the initialization. Modules without lazy
# initialization have none of these attributes.


def queued_calls(module: Any) -> list[tuple[Any, Any]] | None:
    """Return a module's queue of calls, or None."""
    calls: list[tuple[Any, Any]] | None = getattr(module, "_queued_calls", None)
    return calls


def seed_tracker(module: Any) -> Any:
    """Return the object that keeps a module's queued seeds, or None."""
    return getattr(module, "_lazy_seed_tracker", None)


def clear_seed_tracker(module: Any) -> None:
    """Forget a module's queued seeds."""
    module._lazy_seed_tracker = type(module._lazy_seed_tracker)()


def queue_allows_device(module: Any) -> bool:
    """Whether queued calls can use the device. In a module without this guard they would initialize it again, without end."""
    return hasattr(module, "_queued_calls") and hasattr(module, "_tls")


def is_initializing(module: Any) -> bool:
    """Return whether this thread is running a module's queue now."""
    return hasattr(getattr(module, "_tls", None), "is_initializing")


def initialization_lock(module: Any) -> AbstractContextManager[Any]:
    """Return the lock that a module's initialization holds."""
    lock: AbstractContextManager[Any] = getattr(module, "_initialization_lock", None) or nullcontext()
    return lock


# torch's names of functions of a module that this package offers under public names.
RECORD_MEMORY_HISTORY = "_record_memory_history"
MEMORY_SNAPSHOT = "_snapshot"


def memory_history_signature(module: Any, record: Any) -> inspect.Signature:
    """Return the parameters of a module's function that records the history of its memory."""
    # torch.cuda's function forwards any argument to another one.
    return inspect.signature(getattr(getattr(module, "memory", None), "_record_memory_history_impl", record))
