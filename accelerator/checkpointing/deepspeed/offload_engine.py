"""Offloading of activations with the caller's offload engine, for code that calls DeepSpeed's helper functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .helpers import is_activation_to_checkpoint


def get_offloaded_activations_for_backward(args: Sequence[Any], engine: Any) -> list[Any]:
    """Offload the activations among arguments with an offload engine.

    Args:
        args: the arguments, which do not change.
        engine: an object with ``offload_input(tensor)``, which returns a token, or None if it does not offload the tensor,
            and ``restore_input(token)``.

    Returns:
        For every offloaded activation an empty tensor whose attribute ``ds_offload_id`` is the token. A tensor that occurs
        twice is offloaded once. Other arguments as they are.

    Raises:
        TypeError: if the engine lacks the methods.

    Example:
        >>> class Engine(list):
        ...     def offload_input(self, tensor):
        ...         self.append(tensor.clone())
        ...         return len(self) - 1
        ...     def restore_input(self, token):
        ...         return self[token]
        >>> engine = Engine()
        >>> kept = checkpointing.get_offloaded_activations_for_backward([torch.ones(2), "mask"], engine)
        >>> kept
        [tensor([]), 'mask']
        >>> checkpointing.restore_offloaded_activations(kept, engine)
        [tensor([1., 1.]), 'mask']
    """
    _check_engine(engine)
    result: list[Any] = []
    replacements: dict[int, Any] = {}
    for item in args:
        if is_activation_to_checkpoint(item) and id(item) not in replacements:
            token = engine.offload_input(item.detach())
            replacements[id(item)] = item
            if token is not None:
                empty: Any = item.new_empty(0).requires_grad_(item.requires_grad)
                empty.ds_offload_id = token
                replacements[id(item)] = empty
        result.append(replacements.get(id(item), item))
    return result


def restore_offloaded_activations(tensors: Sequence[Any], engine: Any) -> Sequence[Any]:
    """Restore the activations that ``get_offloaded_activations_for_backward`` offloaded.

    Args:
        tensors: the result of that function. Its empty tensors get the data of the activations.
        engine: the same engine.

    Returns:
        The same sequence.

    Raises:
        TypeError: if the engine lacks the methods.

    Example:
        >>> class Engine:
        ...     def offload_input(self, tensor):
        ...         return tensor.tolist()
        ...     def restore_input(self, token):
        ...         return torch.tensor(token)
        >>> engine = Engine()
        >>> kept = checkpointing.get_offloaded_activations_for_backward((torch.ones(2), 3), engine)
        >>> checkpointing.restore_offloaded_activations(kept, engine)
        [tensor([1., 1.]), 3]
    """
    _check_engine(engine)
    for item in tensors:
        token = getattr(item, "ds_offload_id", None) if isinstance(item, torch.Tensor) else None
        if token is not None:
            placeholder: Any = item
            placeholder.data = engine.restore_input(token)
            placeholder.ds_offload_id = None
    return tensors


def _check_engine(engine: Any) -> None:
    if not all(callable(getattr(engine, name, None)) for name in ("offload_input", "restore_input")):
        raise TypeError(f"an offload engine needs offload_input() and restore_input(), which {type(engine).__name__} lacks")
