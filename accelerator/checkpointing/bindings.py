"""The private bindings of torch that checkpointing uses, each with its substitute on releases that lack it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import CodeType
from typing import Any

import torch
import torch.distributed
import torch.overrides
import torch.utils.checkpoint as torch_checkpoint
from torch.utils._device import DeviceContext

_torch: Any = torch
_autograd: Any = _torch._C._autograd
_checkpoint: Any = torch_checkpoint
_overrides: Any = torch.overrides

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

_deterministic: Callable[[], bool] = _torch._C._get_deterministic_algorithms
_only_warns: Callable[[], bool] = _torch._C._get_deterministic_algorithms_warn_only


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


_function_mode_stack: Callable[[], list[Any]] = _overrides._get_current_function_mode_stack
_function_mode_count: Callable[[], int] = _torch._C._len_torch_function_stack


# The default device, the default dtype, whether algorithms must be deterministic, and whether that only warns.
Defaults = tuple[torch.device | None, torch.dtype, bool, bool]


def defaults() -> Defaults:
    """Return torch's defaults in this thread."""
    deterministic = _deterministic()
    device = _default_device() if _function_mode_count() else None
    return device, torch.get_default_dtype(), deterministic, deterministic and _only_warns()


def _default_device() -> torch.device | None:
    """Return the device that ``with torch.device(...)`` or ``torch.set_default_device`` set, as it was given."""
    for mode in reversed(_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return mode.device
    return None
