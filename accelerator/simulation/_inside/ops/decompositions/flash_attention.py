"""The flash attention ops.

Inputs have the shape (batch, length, heads, features), or (all lengths, heads, features) if sequences are packed. Several query
heads may share a key head. The causal mask gives the last query the position of the last key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention import (
    Arguments,
    Dropout,
    Mask,
    attend_masked,
    attend_masked_backward,
    attend_packed,
    attend_packed_backward,
    by_name,
    draw_seed,
    packed_sequences,
    raise_unsupported,
    resolve_scale,
    saved_dropout,
    seed_tensors,
    swapped,
)
from .common import with_layout_of

_Grads = tuple[Tensor | None, Tensor | None, Tensor | None]


def _flash_seed(seed: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the op's two results for the seed. A schema with ``rng_state`` has seed and offset in the first result."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    if any(result.name == "rng_state" for result in schema.returns):
        state = torch.tensor([seed, 0], dtype=torch.int64, device=like.device).view(torch.uint64)
        return state, torch.zeros((), dtype=torch.uint64, device=like.device)
    return seed_tensors(seed, like)


def _flash_mask(a: Arguments) -> Mask:
    # A negative window is unlimited.
    left, right = (None if size is None or size < 0 else size for size in (a.window_size_left, a.window_size_right))
    return Mask(left, 0 if a.is_causal else right, from_end=True)


def flash_forward(a: Arguments, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    raise_unsupported(
        "_flash_attention_forward",
        return_debug_mask=a.return_debug_mask,
        alibi_slopes=a.alibi_slopes,
        block_table=a.block_table,
    )
    dropout = Dropout(a.dropout_p, draw_seed(a.dropout_p, generator))
    if a.cum_seq_q is None:
        raise_unsupported("_flash_attention_forward of unpacked sequences", seqused_k=a.seqused_k)
        q, k, v = swapped(a.query, a.key, a.value)
        output, logsumexp = attend_masked(q, k, v, _flash_mask(a), None, dropout, resolve_scale(a))
        output = output.transpose(1, 2)
    else:
        sequences = packed_sequences(a.cum_seq_q, a.cum_seq_k, a.seqused_k)
        output, logsumexp = attend_packed(a.query, a.key, a.value, sequences, _flash_mask(a), dropout, resolve_scale(a))
    state, unused = _flash_seed(dropout.seed, a.query)
    return with_layout_of(a.query, output), logsumexp.to(torch.float32), state, unused, a.query.new_empty(0)


def flash_forward_inplace(a: Arguments) -> Tensor:
    raise_unsupported("_flash_attention_forward_no_dropout_inplace", dropout_p=a.dropout_p or None)
    output, logsumexp, *_ = flash_forward(a.replaced(dropout_p=0.0), None)
    a.out.copy_(output)
    return logsumexp


def flash_backward(a: Arguments) -> _Grads:
    if a.grad_out is None:
        return None, None, None
    # The state is philox_seed before torch 2.7, and in the op of scaled_dot_product_attention.
    dropout, mask = saved_dropout(a, a.philox_seed if a.rng_state is None else a.rng_state), _flash_mask(a)
    if a.cum_seq_q is not None and a.cum_seq_q.numel():
        sequences = packed_sequences(a.cum_seq_q, a.cum_seq_k, None)
        return attend_packed_backward(a.grad_out, a.query, a.key, a.value, sequences, mask, dropout, resolve_scale(a))
    g, q, k, v, o = swapped(a.grad_out, a.query, a.key, a.value, a.out)
    grads = attend_masked_backward(g, q, k, v, o, a.logsumexp, mask, None, dropout, resolve_scale(a))[:3]
    return tuple(with_layout_of(x, y) for x, y in zip((a.query, a.key, a.value), swapped(*grads), strict=True))  # type: ignore[return-value]


def sdp_flash(a: Arguments, generator: torch.Generator | None) -> tuple[Any, ...]:
    q, k, v = swapped(a.query, a.key, a.value)
    output, logsumexp, state, unused, debug = flash_forward(a.replaced(query=q, key=k, value=v), generator)
    return output.transpose(1, 2), logsumexp, None, None, q.size(1), k.size(1), state, unused, debug


def sdp_flash_backward(a: Arguments) -> _Grads:
    if a.grad_out is None:
        return None, None, None
    g, q, k, v, o = swapped(a.grad_out, a.query, a.key, a.value, a.out)
    outside = a.replaced(grad_out=g, query=q, key=k, value=v, out=o)
    return tuple(None if grad is None else grad.transpose(1, 2) for grad in flash_backward(outside))  # type: ignore[return-value]


DECOMPOSITIONS = by_name(
    {
        "aten::_flash_attention_forward": flash_forward,
        "aten::_flash_attention_forward_no_dropout_inplace": flash_forward_inplace,
        "aten::_flash_attention_backward": flash_backward,
        "aten::_scaled_dot_product_flash_attention": sdp_flash,
        "aten::_scaled_dot_product_flash_attention_backward": sdp_flash_backward,
    }
)
