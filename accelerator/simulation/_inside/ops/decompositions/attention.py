"""The computation that the fused attention kernels share: flash, memory-efficient and cuDNN's.

The kernels differ in the layout of queries, in the packing of sequences, in the causal diagonal for unequal numbers of
queries and keys, and in their extra results.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..schemas import binder, schema_of
from .common import widened

_aten = torch.ops.aten


class Arguments(SimpleNamespace):
    """The arguments of a call by name; None for one that the op lacks in this release of torch."""

    def __getattr__(self, name: str) -> Any:
        return None

    def replaced(self, **changes: Any) -> Arguments:
        return Arguments(**{**vars(self), **changes})


def by_name(functions: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return functions that take the arguments of their ops in the order of the schema, and call those given with `Arguments`.

    A function that draws random numbers has a second argument, ``generator``.
    """
    return {name: _taking_arguments_of(name, function) for name, function in functions.items()}


@functools.cache
def _defaults(name: str) -> dict[str, Any]:
    return {argument.name: argument.default_value for argument in schema_of(name).arguments if argument.has_default_value()}


def _taking_arguments_of(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        generator = (kwargs.pop("generator", None),) if draws else ()
        return function(Arguments(**{**_defaults(name), **binder(name)(args, kwargs)}), *generator)

    draws = "generator" in inspect.signature(function).parameters
    return functools.wraps(function)(run)


class Mask(NamedTuple):
    """The keys that a query attends to.

    ``left`` and ``right`` are the number of keys before and after the query's own position, None for all. Positions count from
    the first key, or with ``from_end`` so that the last query has the position of the last key.
    """

    left: int | None = None
    right: int | None = None
    from_end: bool = False

    def bias(self, queries: int, keys: int, like: Tensor) -> Tensor | None:
        if self.left is None and self.right is None:
            return None
        positions = torch.arange(queries, device=like.device) + (keys - queries if self.from_end else 0)
        distance = torch.arange(keys, device=like.device) - positions.unsqueeze(1)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if self.left is not None:
            hidden |= distance < -self.left
        if self.right is not None:
            hidden |= distance > self.right
        return torch.zeros_like(distance, dtype=like.dtype).masked_fill_(hidden, float("-inf"))


class Dropout(NamedTuple):
    """Dropout of probabilities. The mask follows from the seed, so that the backward drops the same."""

    probability: float
    seed: int

    def factors(self, like: Tensor) -> Tensor | None:
        if self.probability == 0:
            return None
        kept = uniform(like, self.seed) > self.probability
        return kept.to(like.dtype).mul_(0 if self.probability == 1 else 1 / (1 - self.probability))


def uniform(like: Tensor, seed: int) -> Tensor:
    """Return random numbers in [0, 1) that follow from a seed."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.empty(like.shape, dtype=torch.float32, device=like.device).uniform_(generator=generator)


def draw_seed(dropout_p: float, generator: torch.Generator | None) -> int:
    """Draw a seed from a generator of the CPU. Without dropout nothing is drawn."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(2**62, generator=generator)) if dropout_p else 0


def resolve_scale(a: Arguments) -> float:
    return float(a.query.size(-1) ** -0.5 if a.scale is None else a.scale)


def swapped(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return (batch, length, heads, features) as (batch, heads, length, features), or the other way round."""
    return tuple(tensor.transpose(1, 2) for tensor in tensors)


def saved_dropout(a: Arguments, seed: Tensor) -> Dropout:
    """Return the dropout of the forward."""
    return Dropout(a.dropout_p, seed_from_tensor(seed) if a.dropout_p else 0)


def add_biases(*biases: Tensor | None) -> Tensor | None:
    present = [bias for bias in biases if bias is not None]
    return None if not present else present[0] if len(present) == 1 else present[0] + present[1]


def _repeat_for_query_heads(query: Tensor, shared: Tensor) -> Tensor:
    """Repeat keys or values that several query heads share."""
    return widened(shared).repeat_interleave(query.size(-3) // shared.size(-3), -3)


def _sum_over_query_heads(grad: Tensor, shared: Tensor) -> Tensor:
    groups = grad.reshape(*grad.shape[:-3], shared.size(-3), -1, *grad.shape[-2:])
    return groups.sum(-3).to(shared.dtype)


def _probabilities(query: Tensor, key: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    scores = widened(query) @ _repeat_for_query_heads(query, key).transpose(-2, -1) * scale
    if bias is not None:
        scores = scores + bias
    logsumexp = scores.logsumexp(-1)
    # A query that attends to no key has output zero, not NaN.
    logsumexp = logsumexp.masked_fill(logsumexp == float("-inf"), float("inf"))
    return (scores - logsumexp.unsqueeze(-1)).exp(), logsumexp


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: Dropout, scale: float
) -> tuple[Tensor, Tensor]:
    """Return output and logsumexp for inputs of shape (..., heads, length, features)."""
    probabilities, logsumexp = _probabilities(query, key, bias, scale)
    factors = dropout.factors(probabilities)
    if factors is not None:
        probabilities = probabilities * factors
    return (probabilities @ _repeat_for_query_heads(query, value)).to(query.dtype), logsumexp


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: Dropout, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, and of the bias in the shape of the scores."""
    probabilities, _ = _probabilities(query, key, bias, scale)
    factors = dropout.factors(probabilities)
    dropped = probabilities if factors is None else probabilities * factors
    grad = widened(grad)
    grad_value = dropped.transpose(-2, -1) @ grad
    grad_probabilities = grad @ _repeat_for_query_heads(query, value).transpose(-2, -1)
    if factors is not None:
        grad_probabilities = grad_probabilities * factors
    mean = (grad_probabilities * probabilities).sum(-1, keepdim=True)
    grad_scores = probabilities * (grad_probabilities - mean)
    grad_query = grad_scores @ _repeat_for_query_heads(query, key) * scale
    grad_key = grad_scores.transpose(-2, -1) @ widened(query) * scale
    return (
        grad_query.to(query.dtype),
        _sum_over_query_heads(grad_key, key),
        _sum_over_query_heads(grad_value, value),
        grad_scores,
    )


_FLASH_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def _flash_causality(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, bias: Tensor | None, dropout: Dropout
) -> bool | None:
    """Return whether the CPU's flash kernel is to mask causally, or None if it does not support the call."""
    queries, keys = query.size(-2), key.size(-2)
    if (
        bias is not None
        or dropout.probability
        or mask.left is not None
        or query.dim() != 4
        or query.dtype not in _FLASH_TYPES
        or not query.size(1) == key.size(1) == value.size(1)
        or not query.size(3) == key.size(3) == value.size(3)
        or not queries * keys * query.size(0)
    ):
        return None
    if mask.right is None:
        return False
    return True if mask.right == 0 and (queries == keys or not mask.from_end) else None


def attend_masked(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask, bias: Tensor | None, dropout: Dropout, scale: float
) -> tuple[Tensor, Tensor]:
    """Return output and logsumexp for (batch, heads, length, features), by the CPU's flash kernel if it supports the call."""
    is_causal = _flash_causality(query, key, value, mask, bias, dropout)
    if is_causal is not None:
        return _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)
    total = add_biases(mask.bias(query.size(-2), key.size(-2), widened(query)), None if bias is None else widened(bias))
    return attend(query, key, value, total, dropout, scale)


def attend_masked_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    mask: Mask,
    bias: Tensor | None,
    dropout: Dropout,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of query, key, value, and of a bias in the shape of the scores."""
    is_causal = _flash_causality(query, key, value, mask, bias, dropout)
    if is_causal is not None and logsumexp.numel():
        # Some kernels pad the logsumexp.
        logsumexp = logsumexp.reshape(*query.shape[:2], -1)[..., : query.size(2)].to(torch.float32)
        arguments = (grad, query, key, value, output, logsumexp, 0.0, is_causal)
        return *_aten._scaled_dot_product_flash_attention_for_cpu_backward(*arguments, scale=scale), None
    total = add_biases(mask.bias(query.size(-2), key.size(-2), widened(query)), None if bias is None else widened(bias))
    return attend_backward(grad, query, key, value, total, dropout, scale)


Sequences = list[tuple[int, slice, slice]]


def packed_sequences(cum_seq_q: Tensor, cum_seq_k: Tensor | None, used: Tensor | None) -> Sequences:
    """Return index, queries and keys of each packed sequence; ``used`` is the number of keys in use, None for all."""
    queries = cum_seq_q.tolist()
    keys = queries if cum_seq_k is None else cum_seq_k.tolist()
    counts = [end - begin for begin, end in pairwise(keys)] if used is None else used.tolist()
    return [
        (index, slice(begin, end), slice(keys[index], keys[index] + counts[index]))
        for index, (begin, end) in enumerate(pairwise(queries))
    ]


def lengths(queries: slice, keys: slice) -> tuple[int, int]:
    return queries.stop - queries.start, keys.stop - keys.start


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, mask: Mask, dropout: Dropout, scale: float
) -> tuple[Tensor, Tensor]:
    """Return output and logsumexp, (heads, all queries), for packed inputs of shape (all queries, heads, features)."""
    output = query.new_zeros((*query.shape[:-1], value.size(-1)))
    logsumexp = query.new_full((query.size(-2), query.size(0)), float("inf"), dtype=torch.float32)
    for index, queries, keys in sequences:
        sequence_dropout = dropout._replace(seed=dropout.seed + index)
        q, k, v = (x.transpose(0, 1) for x in (query[queries], key[keys], value[keys]))
        result, part = attend(q, k, v, mask.bias(*lengths(queries, keys), widened(q)), sequence_dropout, scale)
        output[queries] = result.transpose(0, 1)
        logsumexp[:, queries] = part.to(torch.float32)
    return output, logsumexp


def attend_packed_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, mask: Mask, dropout: Dropout, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for index, queries, keys in sequences:
        sequence_dropout = dropout._replace(seed=dropout.seed + index)
        g, q, k, v = (x.transpose(0, 1) for x in (grad[queries], query[queries], key[keys], value[keys]))
        bias = mask.bias(*lengths(queries, keys), widened(q))
        grad_query, grad_key, grad_value, _ = attend_backward(g, q, k, v, bias, sequence_dropout, scale)
        grads[0][queries] = grad_query.transpose(0, 1)
        grads[1][keys] += grad_key.transpose(0, 1)
        grads[2][keys] += grad_value.transpose(0, 1)
    return grads


def raise_unsupported(op: str, **arguments: object) -> None:
    """Raise for an argument that would change the result in a way that is not simulated."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"aten::{op} with {name} is not simulated")


def seed_tensors(seed: int, like: Tensor) -> tuple[Tensor, Tensor]:
    return (torch.tensor(seed, dtype=torch.int64, device=like.device), torch.zeros((), dtype=torch.int64, device=like.device))


def seed_from_tensor(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.numel() == 0 else int(tensor.view(torch.int64).flatten()[0])
