"""cuDNN's attention.

Inputs are (batch, heads, length, features) or packed. The causal diagonal begins at the first key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import (
    Dropout,
    Mask,
    Sequences,
    attend_masked,
    attend_masked_backward,
    attend_packed,
    attend_packed_backward,
    draw_seed,
    lengths,
    packed_sequences,
    raise_unsupported,
    resolve_scale,
    seed_from_tensor,
    seed_tensors,
)
from .common import with_layout_of


def cudnn_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, int, int, Tensor, Tensor, None]:
    raise_unsupported("_cudnn_attention_forward", return_debug_mask=return_debug_mask, block_table=block_table)
    dropout = Dropout(dropout_p, draw_seed(dropout_p, generator))
    if cum_seq_q is None:
        raise_unsupported("_cudnn_attention_forward of unpacked sequences", seqused_k=seqused_k)
        mask, bias = _mask_and_bias(attn_bias, is_causal)
        output, logsumexp = attend_masked(query, key, value, mask, bias, dropout, resolve_scale(query, scale))
        logsumexp = logsumexp.unsqueeze(-1)
    else:
        raise_unsupported("_cudnn_attention_forward of packed sequences", attn_bias=attn_bias)
        sequences = packed_sequences(cum_seq_q, cum_seq_k, seqused_k)
        mask = _cudnn_packed_mask(sequences, is_causal)
        output, flat = attend_packed(query, key, value, sequences, mask, dropout, resolve_scale(query, scale))
        logsumexp = flat.transpose(0, 1).unsqueeze(-1)
    seeds = seed_tensors(dropout.seed, query)
    result = with_layout_of(query, output)
    return result, logsumexp.to(torch.float32), cum_seq_q, cum_seq_k, max_q, max_k, *seeds, None


def _mask_and_bias(attn_bias: Tensor | None, is_causal: bool) -> tuple[Mask, Tensor | None]:
    mask = Mask(right=0) if is_causal else Mask()
    return mask, None if attn_bias is None or attn_bias.numel() == 0 else attn_bias


def _cudnn_packed_mask(sequences: Sequences, is_causal: bool) -> Mask:
    if not is_causal:
        return Mask()
    if any(len(set(lengths(queries, keys))) > 1 for _, queries, keys in sequences):
        raise NotImplementedError("aten::_cudnn_attention_forward, causal with unequal packed lengths, is not simulated")
    return Mask(right=0)


def cudnn_backward(
    grad_out: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if grad_out is None:
        return None, None, None
    dropout = Dropout(dropout_p, seed_from_tensor(philox_seed) if dropout_p else 0)
    if cum_seq_q is not None and cum_seq_q.numel():
        sequences = packed_sequences(cum_seq_q, cum_seq_k, None)
        mask = _cudnn_packed_mask(sequences, is_causal)
        return attend_packed_backward(grad_out, query, key, value, sequences, mask, dropout, resolve_scale(query, scale))
    mask, bias = _mask_and_bias(attn_bias, is_causal)
    grads = attend_masked_backward(
        grad_out, query, key, value, out, logsumexp, mask, bias, dropout, resolve_scale(query, scale)
    )[:3]
    return tuple(with_layout_of(x, grad) for grad, x in zip(grads, (query, key, value), strict=True))  # type: ignore[return-value]


def sdp_cudnn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, int, int, Tensor, Tensor, None]:
    lengths = query.size(2), key.size(2)
    return cudnn_forward(
        query,
        key,
        value,
        attn_bias,
        None,
        None,
        *lengths,
        compute_log_sumexp,
        dropout_p,
        is_causal,
        return_debug_mask,
        scale=scale,
        generator=generator,
    )


DECOMPOSITIONS = {
    "aten::_cudnn_attention_forward": cudnn_forward,
    "aten::_cudnn_attention_backward": cudnn_backward,
    "aten::_scaled_dot_product_cudnn_attention": sdp_cudnn,
    "aten::_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
}
