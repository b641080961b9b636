"""The few private bindings of torch that checkpointing stands on, each with what to do where a release lacks it."""

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

# The innermost saved-tensor hooks of this thread, (pack, unpack) or None; None as a whole on torch 2.6, which cannot tell.
innermost_hooks: Callable[[bool], tuple[Any, Any] | None] | None = getattr(_autograd, "_top_saved_tensors_default_hooks", None)

# What torch.autograd.graph.saved_tensors_hooks and torch.enable_grad come down to, without an object for each use.
push_hooks: Callable[[Any, Any], None] = _autograd._push_saved_tensors_default_hooks
pop_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
set_grad_enabled: Callable[[bool], None] = _torch._C._set_grad_enabled

# A number that tells one run of backward from another, -1 outside of any.
backward_id: Callable[[], int] = _torch._C._current_graph_task_id


def _no_group() -> None:
    return None


# The torch.utils.checkpoint.GraphExecGroup that is in force, under which several runs of backward count as one.
backward_group: Callable[[], Any] = getattr(_torch._C, "_get_graph_exec_group", _no_group)

# The code of a thread that waits in autograd for nodes which other threads may have to run.
engine_code: CodeType = _torch.autograd.graph._engine_run_backward.__code__


def _never() -> bool:
    return False


# Whether there may be other ranks.
distributed: Callable[[], bool] = torch.distributed.is_initialized if torch.distributed.is_available() else _never

_function_mode_stack: Callable[[], list[Any]] = _overrides._get_current_function_mode_stack

# How many modes of torch functions are in force; `with torch.device(...)` is one.
function_modes: Callable[[], int] = _torch._C._len_torch_function_stack

# Whether autocast is on for any type of device.
any_autocast: Callable[[], bool] = _torch._C._is_any_autocast_enabled

_deterministic: Callable[[], bool] = _torch._C._get_deterministic_algorithms
_only_warns: Callable[[], bool] = _torch._C._get_deterministic_algorithms_warn_only
_dtype: Callable[[], torch.dtype] = torch.get_default_dtype


def switches() -> tuple[bool, bool, torch.dtype]:
    """Whether algorithms must be deterministic, whether that only warns, and the default dtype."""
    deterministic = _deterministic()
    return deterministic, deterministic and _only_warns(), _dtype()


# The default generator of a device by its number, where torch has one function for all accelerators.
default_generator: Callable[[int], torch.Generator] | None = getattr(_torch._C, "_accelerator_getDefaultGenerator", None)

# Takes a function out of torch.compile's hands; unlike torch.compiler.disable it imports Dynamo only when called.
outside_compile: Callable[[Callable[..., Any]], Callable[..., Any]] = _torch._disable_dynamo

# On older torches, 2.6 among them, the switch is on at first, which cannot be told from one that somebody set.
_unset: bool | None = _checkpoint._enable_checkpoint_early_stop


def early_stop() -> bool | None:
    """What ``torch.utils.checkpoint.set_checkpoint_early_stop`` was told; None where nobody said anything.

    On a torch that has the switch on at first True is taken for nothing said.
    """
    told: bool | None = _checkpoint._enable_checkpoint_early_stop
    return None if told is True and _unset is True else told


def debug_enabled() -> bool:
    """Whether ``torch.utils.checkpoint.set_checkpoint_debug_enabled(True)`` is in force."""
    return _checkpoint._checkpoint_debug_enabled is True


def debug_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any], Callable[[Exception], None]]:
    """torch's logs of the operations in a forward and in its recomputation, and what raises an error that shows both."""
    contexts, explain = _checkpoint._get_debug_context_and_cb()
    return *contexts(), explain


def default_device() -> torch.device | None:
    """The device that ``torch.device`` as a context or ``torch.set_default_device`` put in force, as it was given."""
    for mode in reversed(_function_mode_stack()):
        if isinstance(mode, DeviceContext):
            return mode.device
    return None
