"""cuDNN's attention.

Inputs are (batch, heads, length, features) or packed. The causal diagonal begins at the first key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .attention import (
    Arguments,
    Dropout,
    Mask,
    Sequences,
    attend_masked,
    attend_masked_backward,
    attend_packed,
    attend_packed_backward,
    by_name,
    draw_seed,
    lengths,
    packed_sequences,
    raise_unsupported,
    resolve_scale,
    saved_dropout,
    seed_tensors,
)
from .common import with_layout_of


def cudnn_forward(a: Arguments, generator: torch.Generator | None) -> tuple[Any, ...]:
    raise_unsupported("_cudnn_attention_forward", return_debug_mask=a.return_debug_mask, block_table=a.block_table)
    dropout = Dropout(a.dropout_p, draw_seed(a.dropout_p, generator))
    if a.cum_seq_q is None:
        raise_unsupported("_cudnn_attention_forward of unpacked sequences", seqused_k=a.seqused_k)
        output, logsumexp = attend_masked(a.query, a.key, a.value, *_mask_and_bias(a), dropout, resolve_scale(a))
        logsumexp = logsumexp.unsqueeze(-1)
    else:
        raise_unsupported("_cudnn_attention_forward of packed sequences", attn_bias=a.attn_bias)
        sequences = packed_sequences(a.cum_seq_q, a.cum_seq_k, a.seqused_k)
        mask = _cudnn_packed_mask(sequences, a.is_causal)
        output, flat = attend_packed(a.query, a.key, a.value, sequences, mask, dropout, resolve_scale(a))
        logsumexp = flat.transpose(0, 1).unsqueeze(-1)
    seeds = seed_tensors(dropout.seed, a.query)
    result = with_layout_of(a.query, output)
    return result, logsumexp.to(torch.float32), a.cum_seq_q, a.cum_seq_k, a.max_q, a.max_k, *seeds, None


def _mask_and_bias(a: Arguments) -> tuple[Mask, Tensor | None]:
    mask = Mask(right=0) if a.is_causal else Mask()
    return mask, None if a.attn_bias is None or a.attn_bias.numel() == 0 else a.attn_bias


def _cudnn_packed_mask(sequences: Sequences, is_causal: bool) -> Mask:
    if not is_causal:
        return Mask()
    if any(len(set(lengths(queries, keys))) > 1 for _, queries, keys in sequences):
        raise NotImplementedError("aten::_cudnn_attention_forward, causal with unequal packed lengths, is not simulated")
    return Mask(right=0)


def cudnn_backward(a: Arguments) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if a.grad_out is None:
        return None, None, None
    dropout = saved_dropout(a, a.philox_seed)
    if a.cum_seq_q is not None and a.cum_seq_q.numel():
        sequences = packed_sequences(a.cum_seq_q, a.cum_seq_k, None)
        mask = _cudnn_packed_mask(sequences, a.is_causal)
        return attend_packed_backward(a.grad_out, a.query, a.key, a.value, sequences, mask, dropout, resolve_scale(a))
    tensors = (a.grad_out, a.query, a.key, a.value, a.out, a.logsumexp)
    grads = attend_masked_backward(*tensors, *_mask_and_bias(a), dropout, resolve_scale(a))[:3]
    return tuple(with_layout_of(x, grad) for grad, x in zip(grads, (a.query, a.key, a.value), strict=True))  # type: ignore[return-value]


def sdp_cudnn(a: Arguments, generator: torch.Generator | None) -> tuple[Any, ...]:
    return cudnn_forward(a.replaced(max_q=a.query.size(2), max_k=a.key.size(2)), generator)


DECOMPOSITIONS = by_name(
    {
        "aten::_cudnn_attention_forward": cudnn_forward,
        "aten::_cudnn_attention_backward": cudnn_backward,
        "aten::_scaled_dot_product_cudnn_attention": sdp_cudnn,
        "aten::_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    }
)
