"""Memory-efficient attention.

Inputs are (batch, length, heads, features) or packed. The logsumexp is padded to a multiple of 32 queries. A bias may require a
gradient.
"""

from __future__ import annotations

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
    uniform,
)

_NO_MASK, _FROM_FIRST, _FROM_LAST = 0, 1, 2


def _efficient_mask(custom_mask_type: int, window_size: int | None) -> Mask:
    if custom_mask_type == _NO_MASK:
        raise_unsupported("_efficient_attention_forward without a causal mask", window_size=window_size or None)
        return Mask()
    return Mask(window_size - 1 if window_size else None, 0, from_end=custom_mask_type == _FROM_LAST)


def _padded(logsumexp: Tensor, is_wanted: bool) -> Tensor:
    if not is_wanted:
        return logsumexp.new_empty((*logsumexp.shape[:-1], 0), dtype=torch.float32)
    length = -(-logsumexp.size(-1) // 32) * 32
    rows = logsumexp.to(torch.float32).contiguous()  # pad by 0 keeps strides
    return torch.nn.functional.pad(rows, (0, length - logsumexp.size(-1)), value=float("inf"))


def _heads_inside(tensor: Tensor) -> Tensor:
    """Return (batch, heads, length, features) as (batch, length, heads, features) without gaps, as CUDA's kernels do."""
    rows = tensor.transpose(1, 2).contiguous()
    return rows.view(-1).view(rows.shape)  # a single row or head may have any stride and counts as contiguous


def efficient_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float,
    custom_mask_type: int,
    compute_log_sumexp: bool = False,
    *,
    scale: float | None = None,
    seqlen_k: Tensor | None = None,
    window_size: int | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    dropout = Dropout(dropout_p, draw_seed(dropout_p, generator))
    mask = _efficient_mask(custom_mask_type, window_size)
    if cu_seqlens_q is None:
        raise_unsupported("_efficient_attention_forward of unpacked sequences", seqlen_k=seqlen_k)
        longest_q, longest_k = query.size(1), key.size(1)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        output, logsumexp = attend_masked(q, k, v, mask, bias, dropout, resolve_scale(query, scale))
        output, logsumexp = _heads_inside(output), _padded(logsumexp, compute_log_sumexp)
    else:
        raise_unsupported("_efficient_attention_forward of packed sequences", bias=bias)
        assert max_seqlen_q is not None
        longest_q, longest_k = max_seqlen_q, key.size(1) if max_seqlen_k is None else max_seqlen_k
        sequences = packed_sequences(cu_seqlens_q, cu_seqlens_k, seqlen_k)
        packed, flat = attend_packed(query[0], key[0], value[0], sequences, mask, dropout, resolve_scale(query, scale))
        output = packed.unsqueeze(0)
        rows = flat.new_full((cu_seqlens_q.numel() - 1, query.size(2), longest_q), float("inf"))
        for index, queries, _keys in sequences:
            rows[index, :, : queries.stop - queries.start] = flat[:, queries]
        logsumexp = _padded(rows, compute_log_sumexp)
    return output, logsumexp, *seed_tensors(dropout.seed, query), longest_q, longest_k


def efficient_backward(
    grad_out_: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    logsumexp: Tensor,
    dropout_p: float,
    philox_seed: Tensor,
    philox_offset: Tensor,
    custom_mask_type: int,
    bias_requires_grad: bool,
    *,
    scale: float | None = None,
    num_splits_key: int | None = None,
    window_size: int | None = None,
    shared_storage_dqdkdv: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    if grad_out_ is None:
        return None, None, None, None
    dropout = Dropout(dropout_p, seed_from_tensor(philox_seed) if dropout_p else 0)
    mask = _efficient_mask(custom_mask_type, window_size)
    grad_bias = None
    if cu_seqlens_q is not None:
        sequences = packed_sequences(cu_seqlens_q, cu_seqlens_k, None)
        grads = attend_packed_backward(
            grad_out_[0], query[0], key[0], value[0], sequences, mask, dropout, resolve_scale(query, scale)
        )
        grad_query, grad_key, grad_value = (grad.unsqueeze(0) for grad in grads)
    else:
        g, q, k, v, o = (x.transpose(1, 2) for x in (grad_out_, query, key, value, out))
        resolved_scale = resolve_scale(query, scale)
        *dense, grad_scores = attend_masked_backward(g, q, k, v, o, logsumexp, mask, bias, dropout, resolved_scale)
        grad_query, grad_key, grad_value = map(_heads_inside, dense)
        if bias is not None and bias_requires_grad and grad_scores is not None:
            grad_bias = grad_scores.sum_to_size(bias.shape).to(bias.dtype)
    if shared_storage_dqdkdv:
        # One storage for all three: the gradient of a fused projection.
        shared = torch.stack([grad_query, grad_key, grad_value], 2)
        grad_query, grad_key, grad_value = shared.unbind(2)
    return grad_query, grad_key, grad_value, grad_bias


def sdp_efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    mask_type = _FROM_FIRST if is_causal else _NO_MASK
    output, logsumexp, seed, offset, _, _ = efficient_forward(
        q, k, v, attn_bias, None, None, None, None, dropout_p, mask_type, compute_log_sumexp, scale=scale, generator=generator
    )
    return output.transpose(1, 2), logsumexp, seed, offset


def sdp_efficient_backward(
    grad_out_: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    if grad_out_ is None:
        return None, None, None, None
    dropout = Dropout(dropout_p, seed_from_tensor(philox_seed) if dropout_p else 0)
    mask = _efficient_mask(_FROM_FIRST if is_causal else _NO_MASK, None)
    bias = None if attn_bias is None or attn_bias.numel() == 0 else attn_bias
    *grads, grad_scores = attend_masked_backward(
        grad_out_, query, key, value, out, logsumexp, mask, bias, dropout, resolve_scale(query, scale)
    )
    grad_query, grad_key, grad_value = (_heads_inside(grad).transpose(1, 2) for grad in grads)
    grad_bias = None
    if grad_input_mask[3] and bias is not None and grad_scores is not None:
        grad_bias = grad_scores.sum_to_size(bias.shape).to(bias.dtype)
    return grad_query, grad_key, grad_value, grad_bias


def fill_dropout_mask(self: Tensor, dropout_p: float, seed: int, offset: int) -> Tensor:
    """Write the random numbers that the kernel compares with the probability of dropping."""
    return self.copy_(uniform(self, seed))


DECOMPOSITIONS = {
    "aten::_efficient_attention_forward": efficient_forward,
    "aten::_efficient_attention_backward": efficient_backward,
    "aten::_scaled_dot_product_efficient_attention": sdp_efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": sdp_efficient_backward,
    "aten::_fill_mem_eff_dropout_mask_": fill_dropout_mask,
}
