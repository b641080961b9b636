"""The private bindings of torch that checkpointing uses, each with its substitute on releases that lack it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from threading import get_ident
from types import CodeType
from typing import Any

import torch
import torch.distributed
import torch.overrides
import torch.utils.checkpoint as torch_checkpoint
from torch.backends import mha, opt_einsum
from torch.utils import _python_dispatch

_torch: Any = torch
_autograd: Any = _torch._C._autograd
_checkpoint: Any = torch_checkpoint
_overrides: Any = torch.overrides
_dispatch: Any = _python_dispatch

# Returns the innermost saved-tensor hooks of this thread, (pack, unpack) or None. torch 2.6 has no such function.
innermost_hooks: Callable[[bool], tuple[Any, Any] | None] | None = getattr(_autograd, "_top_saved_tensors_default_hooks", None)

# torch.autograd.graph.saved_tensors_hooks and torch.set_grad_enabled, without an object for each use.
push_hooks: Callable[[Any, Any], None] = _autograd._push_saved_tensors_default_hooks
pop_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
set_grad_enabled: Callable[[bool], None] = _torch._C._set_grad_enabled

NO_BACKWARD = -1
_backward_id: Callable[[], int] = _torch._C._current_graph_task_id
_backward_group: Callable[[], Any] = getattr(_torch._C, "_get_graph_exec_group", lambda: None)


def current_backward() -> Any:
    """Return a value that identifies the current run of backward, ``NO_BACKWARD`` outside of any.

    Under a ``torch.utils.checkpoint.GraphExecGroup`` several runs count as one.
    """
    return _backward_group() or _backward_id()


# The code of autograd's function that runs backward. A thread in it may wait for nodes that other threads run.
engine_code: CodeType = _torch.autograd.graph._engine_run_backward.__code__

# Whether there may be other ranks.
distributed: Callable[[], bool] = torch.distributed.is_initialized if torch.distributed.is_available() else lambda: False

# Whether autocast is enabled for any device type.
any_autocast: Callable[[], bool] = _torch._C._is_any_autocast_enabled

# Keeps torch.compile from tracing a function. Unlike torch.compiler.disable, it imports Dynamo only when called.
outside_compile: Callable[[Callable[..., Any]], Callable[..., Any]] = _torch._disable_dynamo

# None, or True on older torches, 2.6 among them.
_early_stop_default: bool | None = _checkpoint._enable_checkpoint_early_stop


def checkpoint_switches() -> tuple[bool | None, bool]:
    """Return the values that ``set_checkpoint_early_stop`` and ``set_checkpoint_debug_enabled`` of torch set.

    The first is None if it is not set. If the default of this torch is True, a program that sets True changes nothing, and the
    value counts as not set.
    """
    early_stop: bool | None = _checkpoint._enable_checkpoint_early_stop
    if early_stop is True and _early_stop_default is True:
        early_stop = None
    return early_stop, _checkpoint._checkpoint_debug_enabled is True


def debug_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any], Callable[[Exception], None]]:
    """Return torch's contexts that log the operations of a forward and of its recomputation.

    The third element raises an error that shows both logs.
    """
    contexts, explain = _checkpoint._get_debug_context_and_cb()
    return *contexts(), explain


# Torch's modes: those that see functions, the outermost first, and those that see operations.
Modes = tuple[tuple[Any, ...], tuple[Any, ...]]
NO_MODES: Modes = ((), ())

_function_mode_count: Callable[[], int] = _torch._C._len_torch_function_stack
_dispatch_mode_count: Callable[[], int] = _torch._C._len_torch_dispatch_stack


def modes() -> Modes:
    """Return the modes of this thread."""
    return tuple(_overrides._get_current_function_mode_stack()), tuple(_dispatch._get_current_dispatch_mode_stack())


def set_modes(wanted: Modes) -> None:
    """Replace the modes of this thread. A default device is one of them."""
    for module, count, stack in zip((_overrides, _dispatch), (_function_mode_count, _dispatch_mode_count), wanted, strict=True):
        while count():
            module._pop_mode()
        for mode in stack:
            module._push_mode(mode)


# A switch of torch: how to read and how to set it.
Switch = tuple[Callable[[], Any], Callable[[Any], None]]


def _find_switches(names: dict[str, str], precisions: tuple[tuple[str, str], ...]) -> tuple[Switch, ...]:
    """Return the switches with these getters and setters that this torch has, and those of the precision of float32."""
    found = [
        (getattr(_torch._C, get), _setter(getattr(_torch._C, set_))) for get, set_ in names.items() if hasattr(_torch._C, get)
    ]
    if hasattr(_torch._C, "_get_fp32_precision_getter"):
        get, set_ = _torch._C._get_fp32_precision_getter, _torch._C._set_fp32_precision_setter
        found += [(partial(get, *of), partial(set_, *of)) for of in precisions]
    return tuple(found)


def _setter(function: Callable[..., None]) -> Callable[[Any], None]:
    # Some switches are a pair.
    return lambda value: function(*value) if type(value) is tuple else function(value)


_deterministic: Callable[[], bool] = _torch._C._get_deterministic_algorithms
_only_warns: Callable[[], bool] = _torch._C._get_deterministic_algorithms_warn_only

# Its module ``m`` holds the values.
_opt_einsum: Any = opt_einsum

# What operations on the CPU depend on.
_CPU_SWITCHES: tuple[Switch, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_deterministic, lambda value: torch.use_deterministic_algorithms(value, warn_only=_only_warns())),
    (_only_warns, lambda value: torch.use_deterministic_algorithms(_deterministic(), warn_only=value)),
    *(
        (partial(getattr, module, name), partial(setattr, module, name))
        for module, name in (
            (mha, "_is_fastpath_enabled"),
            *([(_opt_einsum.m, "enabled"), (_opt_einsum.m, "strategy")] if _opt_einsum.is_available() else []),
        )
    ),
    *_find_switches(
        {
            # Before the others, because it also sets some of them.
            "_get_float32_matmul_precision": "_set_float32_matmul_precision",
            "_get_deterministic_fill_uninitialized_memory": "_set_deterministic_fill_uninitialized_memory",
            "_get_mkldnn_enabled": "_set_mkldnn_enabled",
            "_get_mkldnn_deterministic": "_set_mkldnn_deterministic",
            "_get_nnpack_enabled": "_set_nnpack_enabled",
            "_get_qengine": "_set_qengine",
            "_get_cpu_allow_fp16_reduced_precision_reduction": "_set_cpu_allow_fp16_reduced_precision_reduction",
            "_get_flash_sdp_enabled": "_set_sdp_use_flash",
            "_get_math_sdp_enabled": "_set_sdp_use_math",
            "_get_math_sdp_allow_fp16_bf16_reduction": "_set_math_sdp_allow_fp16_bf16_reduction",
        },
        # A setting for all operations counts where an operation has none of its own, so it comes first.
        (("generic", "all"), ("mkldnn", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")),
    ),
)

# What operations on an accelerator depend on, but for the libraries that torch prefers: they take long to read, no context
# changes them, and a program chooses them once.
_ACCELERATOR_SWITCHES: tuple[Switch, ...] = (
    *_find_switches(
        {
            "_get_cudnn_enabled": "_set_cudnn_enabled",
            "_get_cudnn_benchmark": "_set_cudnn_benchmark",
            "_get_cudnn_deterministic": "_set_cudnn_deterministic",
            "_get_cudnn_depthwise_kernel": "_set_cudnn_depthwise_kernel",
            "_get_miopen_immediate": "_set_miopen_immediate",
            "_get_cublas_allow_fp16_reduced_precision_reduction": "_set_cublas_allow_fp16_reduced_precision_reduction",
            "_get_cublas_allow_bf16_reduced_precision_reduction": "_set_cublas_allow_bf16_reduced_precision_reduction",
            "_get_cublas_allow_fp16_accumulation": "_set_cublas_allow_fp16_accumulation",
            "_get_cublaslt_prefer_grouped_gemm": "_set_cublaslt_prefer_grouped_gemm",
            "_get_mem_efficient_sdp_enabled": "_set_sdp_use_mem_efficient",
            "_get_cudnn_sdp_enabled": "_set_sdp_use_cudnn",
            "_get_overrideable_sdp_enabled": "_set_sdp_use_overrideable",
            "_get_fa3_sdp_enabled": "_set_sdp_use_fa3",
            "_get_fa4_sdp_enabled": "_set_sdp_use_fa4",
            "_get_sm_carveout_experimental": "_set_sm_carveout_experimental",
            "_get_native_aot_enabled": "_set_native_aot_enabled",
            "_get_native_aot_unconditional_masked": "_set_native_aot_unconditional_masked",
            # Newer torches have the precisions of float32 in their place.
            **(
                {}
                if hasattr(_torch._C, "_get_fp32_precision_getter")
                else {"_get_cudnn_allow_tf32": "_set_cudnn_allow_tf32", "_get_cublas_allow_tf32": "_set_cublas_allow_tf32"}
            ),
        },
        (("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")),
    ),
    (_torch._C._get_sdp_priority_order, _torch._C._set_sdp_priority_order),
)

SWITCHES = {False: _CPU_SWITCHES, True: _CPU_SWITCHES + _ACCELERATOR_SWITCHES}

# Getters that take long and tell no more than others: of settings for several operations, and of one that sets others.
_REDUNDANT = {"_get_float32_matmul_precision", "all"}
_has_precisions = hasattr(_torch._C, "_get_fp32_precision_getter")


def _is_in_key(get: Any) -> bool:
    name = get.args[-1] if isinstance(get, partial) else get.__name__
    return not (_has_precisions and name in _REDUNDANT)


def _make_key(accelerated: bool) -> Callable[[], tuple[Any, ...]]:
    """Return a function that calls the getters of the key, as one expression: a loop costs more."""
    getters = [get for get, _ in SWITCHES[accelerated] if _is_in_key(get)]
    getters += [_function_mode_count, _dispatch_mode_count]
    names: dict[str, Any] = {}
    calls: list[str] = []
    for number, get in enumerate(getters):
        function, arguments = (get.func, get.args) if isinstance(get, partial) else (get, ())
        names[f"get{number}"] = function
        for place, argument in enumerate(arguments):
            names[f"of{number}_{place}"] = argument
        calls.append(f"get{number}({', '.join(f'of{number}_{place}' for place in range(len(arguments)))})")
    key: Callable[[], tuple[Any, ...]] = eval(
        f"lambda {', '.join(f'{name}={name}' for name in names)}: ({', '.join(calls)})", names
    )
    return key


_keys = {accelerated: _make_key(accelerated) for accelerated in SWITCHES}

# A torch that cannot tell the value of an old switch, because newer ones contradict each other.
_UNREADABLE = object()


class Switches:
    """A state of torch's switches. There is one object for each state, so that states are compared by identity."""

    __slots__ = ("accelerated", "has_modes", "key", "values")

    def __init__(self, accelerated: bool, key: tuple[Any, ...]) -> None:
        # Whether the switches that concern accelerators belong to the state.
        self.accelerated = accelerated
        # What tells the state, and last how many function modes and dispatch modes there are.
        self.key = key
        self.has_modes = bool(key[-1] or key[-2])
        self.values = read_switches(accelerated)


_states: dict[tuple[bool, tuple[Any, ...]], Switches] = {}


def read_switches(accelerated: bool) -> list[Any]:
    """Return the values of torch's switches."""
    return [_read(get) for get, _ in SWITCHES[accelerated]]


def _read(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except RuntimeError:
        return _UNREADABLE


# The latest state: to compare with it takes less time than to look for it.
_latest = Switches(False, _keys[False]())


def switches(accelerated: bool) -> Switches:
    """Return the present state of torch's switches.

    Args:
        accelerated: whether the switches that concern accelerators count too.
    """
    global _latest
    key = _keys[accelerated]()
    if key != _latest.key or accelerated is not _latest.accelerated:
        hashable = tuple([tuple(each) if type(each) is list else each for each in key])
        _latest = _states.get((accelerated, hashable)) or _states.setdefault(
            (accelerated, hashable), Switches(accelerated, key)
        )
    return _latest


# A thread, its run of backward, and the state when the first recomputation of that run started.
_first: tuple[int, Any, Switches] | None = None


def switches_in(backward: Any, accelerated: bool) -> Switches:
    """Return the state of torch's switches in a run of backward, read once: between its recomputations nothing changes it."""
    global _first
    thread = get_ident()
    first = _first
    if first is not None and first[0] == thread and first[1] == backward and first[2].accelerated is accelerated:
        return first[2]
    present = switches(accelerated)
    _first = (thread, backward, present) if type(backward) is int and backward != NO_BACKWARD else None
    return present


def set_switches(accelerated: bool, wanted: list[Any]) -> None:
    """Set the switches that differ."""
    global _first
    _first = None
    for (get, set_), value in zip(SWITCHES[accelerated], wanted, strict=True):
        if value is not _UNREADABLE and _read(get) != value:
            set_(value)


# Older torches, 2.6 among them, take one tensor and its version.
_takes_sequences = "Sequence" in (_autograd._unsafe_set_version_counter.__doc__ or "")


def preserve_versions(tensors: list[torch.Tensor]) -> Callable[[], None]:
    """Return a function that sets the present versions of tensors again."""
    versions = [tensor._version for tensor in tensors]
    set_versions: Callable[[Any, Any], None] = _autograd._unsafe_set_version_counter

    def restore() -> None:
        if _takes_sequences:
            set_versions(tensors, versions)
        else:
            for tensor, version in zip(tensors, versions, strict=True):
                set_versions(tensor, version)

    return restore


def may_have_context(device_type: str, index: int) -> bool:
    """Return whether this process may have a context on a device. Only CUDA's can be asked."""
    has_context = getattr(_torch._C, "_cuda_hasPrimaryContext", None)
    return device_type != "cuda" or has_context is None or bool(has_context(index))
