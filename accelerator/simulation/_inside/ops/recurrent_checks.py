"""What cuDNN's recurrent nets refuse, and torch's own compute, which run in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import bindings
from .bindings import DispatchKey
from .schemas import binder, split

RECURRENT_NETS = tuple(f"aten::{net}.{kind}" for net in ("lstm", "gru", "rnn_tanh", "rnn_relu") for kind in ("input", "data"))
_CUDNN_TYPES = frozenset((torch.float16, torch.float32, torch.float64))


def recurrent_net(name: str) -> Callable[..., Any]:
    """Return an op that composes a recurrent net as torch does, after cuDNN's checks."""
    bind = binder(name)
    by_key = bindings.get_overload(*split(name))[1]

    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = bind(args, kwargs)
        tensor, states = args[0], arguments["hx"]
        is_checked = torch.backends.cudnn.enabled and tensor.dtype in _CUDNN_TYPES and tensor.numel() > 0
        if is_checked:
            for state, value in zip(("hx", "cx"), states if isinstance(states, list) else [states], strict=False):
                if not value.is_contiguous():
                    raise RuntimeError(f"rnn: {state} is not contiguous")
        results = by_key(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        if is_checked and not arguments["train"]:
            for result in results:
                if result.grad_fn is not None:
                    result.grad_fn.register_prehook(_refuse_backward)
        return results

    return run


def _refuse_backward(_: object) -> None:
    raise RuntimeError("cudnn RNN backward can only be called in training mode")
