"""The few private bindings of torch that checkpointing stands on, each with what to do where a release lacks it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_torch: Any = torch

# The innermost saved-tensor hooks of this thread, (pack, unpack) or None; None as a whole on torch 2.6, which cannot tell.
innermost_hooks: Callable[[bool], tuple[Any, Any] | None] | None = getattr(
    _torch._C._autograd, "_top_saved_tensors_default_hooks", None
)

# A number that tells one run of backward from another, -1 outside of any.
backward_id: Callable[[], int] = _torch._C._current_graph_task_id

# How many modes of torch functions are in force; `with torch.device(...)` is one.
function_modes: Callable[[], int] = _torch._C._len_torch_function_stack

# Takes a function out of torch.compile's hands; unlike torch.compiler.disable it imports Dynamo only when called.
outside_compile: Callable[[Callable[..., Any]], Callable[..., Any]] = _torch._disable_dynamo

# What torch.autograd.graph.saved_tensors_hooks and torch.enable_grad come down to, without an object for each use.
push_hooks: Callable[[Any, Any], None] = _torch._C._autograd._push_saved_tensors_default_hooks
pop_hooks: Callable[[], None] = _torch._C._autograd._pop_saved_tensors_default_hooks
set_grad_enabled: Callable[[bool], None] = _torch._C._set_grad_enabled
