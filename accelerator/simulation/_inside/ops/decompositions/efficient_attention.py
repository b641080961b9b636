"""Memory-efficient attention.

Inputs are (batch, length, heads, features) or packed. The logsumexp is padded to a multiple of 32 queries. A bias may require a
gradient.
"""

from __future__ import annotations

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
    uniform,
)

_Grads = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
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


def efficient_forward(a: Arguments, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    dropout = Dropout(a.dropout_p, draw_seed(a.dropout_p, generator))
    mask = _efficient_mask(a.custom_mask_type, a.window_size)
    if a.cu_seqlens_q is None:
        raise_unsupported("_efficient_attention_forward of unpacked sequences", seqlen_k=a.seqlen_k)
        longest_q, longest_k = a.query.size(1), a.key.size(1)
        q, k, v = swapped(a.query, a.key, a.value)
        output, logsumexp = attend_masked(q, k, v, mask, a.bias, dropout, resolve_scale(a))
        output, logsumexp = _heads_inside(output), _padded(logsumexp, a.compute_log_sumexp)
    else:
        raise_unsupported("_efficient_attention_forward of packed sequences", bias=a.bias)
        assert a.max_seqlen_q is not None
        longest_q, longest_k = a.max_seqlen_q, a.key.size(1) if a.max_seqlen_k is None else a.max_seqlen_k
        sequences = packed_sequences(a.cu_seqlens_q, a.cu_seqlens_k, a.seqlen_k)
        packed, flat = attend_packed(a.query[0], a.key[0], a.value[0], sequences, mask, dropout, resolve_scale(a))
        output = packed.unsqueeze(0)
        rows = flat.new_full((a.cu_seqlens_q.numel() - 1, a.query.size(2), longest_q), float("inf"))
        for index, queries, _keys in sequences:
            rows[index, :, : queries.stop - queries.start] = flat[:, queries]
        logsumexp = _padded(rows, a.compute_log_sumexp)
    return output, logsumexp, *seed_tensors(dropout.seed, a.query), longest_q, longest_k


def _bias_gradient(bias: Tensor | None, is_wanted: bool, grad_scores: Tensor | None) -> Tensor | None:
    if bias is None or not is_wanted or grad_scores is None:
        return None
    return grad_scores.sum_to_size(bias.shape).to(bias.dtype)


def efficient_backward(a: Arguments) -> _Grads:
    if a.grad_out_ is None:
        return None, None, None, None
    dropout, mask, grad_bias = saved_dropout(a, a.philox_seed), _efficient_mask(a.custom_mask_type, a.window_size), None
    if a.cu_seqlens_q is not None:
        sequences = packed_sequences(a.cu_seqlens_q, a.cu_seqlens_k, None)
        tensors = (a.grad_out_[0], a.query[0], a.key[0], a.value[0])
        grads = [x.unsqueeze(0) for x in attend_packed_backward(*tensors, sequences, mask, dropout, resolve_scale(a))]
    else:
        g, q, k, v, o = swapped(a.grad_out_, a.query, a.key, a.value, a.out)
        scale = resolve_scale(a)
        dense = attend_masked_backward(g, q, k, v, o, a.logsumexp, mask, a.bias, dropout, scale)
        grads = [_heads_inside(grad) for grad in dense[:3]]
        grad_bias = _bias_gradient(a.bias, a.bias_requires_grad, dense[3])
    if a.shared_storage_dqdkdv:
        grads = list(torch.stack(grads, 2).unbind(2))  # one storage for all three: the gradient of a fused projection
    return *grads, grad_bias  # type: ignore[return-value]


def sdp_efficient(a: Arguments, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = swapped(a.query, a.key, a.value)
    mask_type = _FROM_FIRST if a.is_causal else _NO_MASK
    outside = a.replaced(query=q, key=k, value=v, bias=a.attn_bias, custom_mask_type=mask_type)
    output, logsumexp, seed, offset, _, _ = efficient_forward(outside, generator)
    return output.transpose(1, 2), logsumexp, seed, offset


def sdp_efficient_backward(a: Arguments) -> _Grads:
    if a.grad_out_ is None:
        return None, None, None, None
    mask = _efficient_mask(_FROM_FIRST if a.is_causal else _NO_MASK, None)
    bias = None if a.attn_bias is None or a.attn_bias.numel() == 0 else a.attn_bias
    tensors = (a.grad_out_, a.query, a.key, a.value, a.out, a.logsumexp)
    dense = attend_masked_backward(*tensors, mask, bias, saved_dropout(a, a.philox_seed), resolve_scale(a))
    grads = (_heads_inside(grad).transpose(1, 2) for grad in dense[:3])
    return *grads, _bias_gradient(bias, a.grad_input_mask[3], dense[3])  # type: ignore[return-value]


def fill_dropout_mask(self: Tensor, dropout_p: float, seed: int, offset: int) -> Tensor:
    """Write the random numbers that the kernel compares with the probability of dropping."""
    return self.copy_(uniform(self, seed))


DECOMPOSITIONS = {
    **by_name(
        {
            "aten::_efficient_attention_forward": efficient_forward,
            "aten::_efficient_attention_backward": efficient_backward,
            "aten::_scaled_dot_product_efficient_attention": sdp_efficient,
            "aten::_scaled_dot_product_efficient_attention_backward": sdp_efficient_backward,
        }
    ),
    "aten::_fill_mem_eff_dropout_mask_": fill_dropout_mask,
}
