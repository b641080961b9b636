"""The flash attention ops.

Inputs have the shape (batch, length, heads, features), or (all lengths, heads, features) if sequences are packed. Several query
heads may share a key head. The causal mask gives the last query the position of the last key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention import (
    Dropout,
    Mask,
    attend_masked,
    attend_masked_backward,
    attend_packed,
    attend_packed_backward,
    draw_seed,
    packed_sequences,
    raise_unsupported,
    resolve_scale,
    seed_from_tensor,
    seed_tensors,
)
from .common import with_layout_of


def _flash_seed(seed: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the op's two results for the seed. A schema with ``rng_state`` has seed and offset in the first result."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    if any(result.name == "rng_state" for result in schema.returns):
        state = torch.tensor([seed, 0], dtype=torch.int64, device=like.device).view(torch.uint64)
        return state, torch.zeros((), dtype=torch.uint64, device=like.device)
    return seed_tensors(seed, like)


def _flash_mask(is_causal: bool, left: int | None, right: int | None) -> Mask:
    # A negative window is unlimited.
    left = None if left is None or left < 0 else left
    right = 0 if is_causal else None if right is None or right < 0 else right
    return Mask(left, right, from_end=True)


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    raise_unsupported(
        "_flash_attention_forward",
        return_debug_mask=return_debug_mask,
        alibi_slopes=alibi_slopes,
        block_table=block_table,
    )
    dropout = Dropout(dropout_p, draw_seed(dropout_p, generator))
    mask = _flash_mask(is_causal, window_size_left, window_size_right)
    if cum_seq_q is None:
        raise_unsupported("_flash_attention_forward of unpacked sequences", seqused_k=seqused_k)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        output, logsumexp = attend_masked(q, k, v, mask, None, dropout, resolve_scale(query, scale))
        output = output.transpose(1, 2)
    else:
        sequences = packed_sequences(cum_seq_q, cum_seq_k, seqused_k)
        output, logsumexp = attend_packed(query, key, value, sequences, mask, dropout, resolve_scale(query, scale))
    state, unused = _flash_seed(dropout.seed, query)
    return with_layout_of(query, output), logsumexp.to(torch.float32), state, unused, query.new_empty(0)


def flash_forward_inplace(out: Tensor, *arguments: Any, **options: Any) -> Tensor:
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, debug = arguments
    raise_unsupported("_flash_attention_forward_no_dropout_inplace", dropout_p=dropout_p or None)
    output, logsumexp, *_ = flash_forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, 0.0, is_causal, debug, **options
    )
    out.copy_(output)
    return logsumexp


def flash_backward(
    grad_out: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if grad_out is None:
        return None, None, None
    dropout = Dropout(dropout_p, seed_from_tensor(rng_state) if dropout_p else 0)
    mask = _flash_mask(is_causal, window_size_left, window_size_right)
    if cum_seq_q is not None and cum_seq_q.numel():
        sequences = packed_sequences(cum_seq_q, cum_seq_k, None)
        return attend_packed_backward(grad_out, query, key, value, sequences, mask, dropout, resolve_scale(query, scale))
    g, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    grads = attend_masked_backward(g, q, k, v, o, logsumexp, mask, None, dropout, resolve_scale(query, scale))[:3]
    return tuple(with_layout_of(x, grad.transpose(1, 2)) for grad, x in zip(grads, (query, key, value), strict=True))  # type: ignore[return-value]


def sdp_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    output, logsumexp, state, unused, debug = flash_forward(
        q, k, v, None, None, q.size(1), k.size(1), dropout_p, is_causal, return_debug_mask, scale=scale, generator=generator
    )
    return output.transpose(1, 2), logsumexp, None, None, q.size(1), k.size(1), state, unused, debug


def sdp_flash_backward(
    grad_out: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if grad_out is None:
        return None, None, None
    g, q, k, v, o = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    grads = flash_backward(
        g,
        q,
        k,
        v,
        o,
        logsumexp,
        cum_seq_q,
        cum_seq_k,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        philox_seed,
        philox_offset,
        scale=scale,
    )
    return tuple(None if grad is None else grad.transpose(1, 2) for grad in grads)  # type: ignore[return-value]


DECOMPOSITIONS = {
    "aten::_flash_attention_forward": flash_forward,
    "aten::_flash_attention_forward_no_dropout_inplace": flash_forward_inplace,
    "aten::_flash_attention_backward": flash_backward,
    "aten::_scaled_dot_product_flash_attention": sdp_flash,
    "aten::_scaled_dot_product_flash_attention_backward": sdp_flash_backward,
}
