"""Finding the checkpoint that made an argument: backward reaches it next, and `recomputation.py` fetches its arguments early.

A checkpoint tags the autograd nodes of its outputs. The next checkpoint finds the tag at its arguments. The result depends
only on the graph, which is the same on every rank: ranks must agree on what they gather early.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .containers import tensors_in

# The key in the metadata of an autograd node.
_PRODUCER = "accelerator.checkpointing"


def tag_outputs(result: Any, frame: Any) -> None:
    """Tag each output with the checkpoint that produced it."""
    for tensor in tensors_in(result):
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata[_PRODUCER] = weakref.ref(frame)


def find_producer(tensors: tuple[torch.Tensor, ...]) -> Any:
    """Return the checkpoint that produced the first of these tensors that has one, else None."""
    for tensor in tensors:
        node: Any = tensor.grad_fn
        if node is not None:
            reference = node.metadata.get(_PRODUCER)
            frame = None if reference is None else reference()
            if frame is not None:
                return frame
    return None
