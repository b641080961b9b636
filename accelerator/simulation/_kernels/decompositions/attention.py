"""Attention under the names of its fused kernels: flash, memory-efficient and cuDNN's.

All of them are one computation. What differs is how queries lie in memory, how sequences are packed, where the causal
diagonal begins when there are more keys than queries, and which extra results there are.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .common import laid_out_like, widened


class _Mask(NamedTuple):
    """Which keys a query sees.

    ``left`` and ``right`` are how many keys before and after its own place it sees, None for all of them. Its own place
    counts from the first key, or with ``from_end`` so that the last query meets the last key.
    """

    left: int | None = None
    right: int | None = None
    from_end: bool = False

    def bias(self, queries: int, keys: int, like: Tensor) -> Tensor | None:
        if self.left is None and self.right is None:
            return None
        places = torch.arange(queries, device=like.device) + (keys - queries if self.from_end else 0)
        distance = torch.arange(keys, device=like.device) - places.unsqueeze(1)
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if self.left is not None:
            hidden |= distance < -self.left
        if self.right is not None:
            hidden |= distance > self.right
        return torch.zeros_like(distance, dtype=like.dtype).masked_fill_(hidden, float("-inf"))


class _Dropout(NamedTuple):
    """Which probabilities are dropped: drawn anew from the seed, so that the backward drops the same."""

    probability: float
    seed: int

    def factors(self, like: Tensor) -> Tensor | None:
        if self.probability == 0:
            return None
        kept = uniform(like, self.seed) > self.probability
        return kept.to(like.dtype).mul_(0 if self.probability == 1 else 1 / (1 - self.probability))


def uniform(like: Tensor, seed: int) -> Tensor:
    """The random numbers in [0, 1) that a seed stands for."""
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.empty(like.shape, dtype=torch.float32, device=like.device).uniform_(generator=generator)


def _draw_seed(dropout_p: float) -> int:
    """A seed from the generator that torch's random functions draw from; without dropout none is drawn."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(2**62)) if dropout_p else 0


def _scale(query: Tensor, scale: float | None) -> float:
    return query.size(-1) ** -0.5 if scale is None else scale


def _total(*biases: Tensor | None) -> Tensor | None:
    present = [bias for bias in biases if bias is not None]
    return None if not present else present[0] if len(present) == 1 else present[0] + present[1]


def _for_each_query_head(query: Tensor, shared: Tensor) -> Tensor:
    """Keys or values with a head for each of the query's, where several query heads share one."""
    return widened(shared).repeat_interleave(query.size(-3) // shared.size(-3), -3)


def _for_each_shared_head(grad: Tensor, shared: Tensor) -> Tensor:
    groups = grad.reshape(*grad.shape[:-3], shared.size(-3), -1, *grad.shape[-2:])
    return groups.sum(-3).to(shared.dtype)


def _probabilities(query: Tensor, key: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    scores = widened(query) @ _for_each_query_head(query, key).transpose(-2, -1) * scale
    if bias is not None:
        scores = scores + bias
    logsumexp = scores.logsumexp(-1)
    # A query that sees no key gives zeros, not NaN.
    logsumexp = logsumexp.masked_fill(logsumexp == float("-inf"), float("inf"))
    return (scores - logsumexp.unsqueeze(-1)).exp(), logsumexp


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: _Dropout, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp of (..., heads, length, features)."""
    probabilities, logsumexp = _probabilities(query, key, bias, scale)
    factors = dropout.factors(probabilities)
    if factors is not None:
        probabilities = probabilities * factors
    return (probabilities @ _for_each_query_head(query, value)).to(query.dtype), logsumexp


def _attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: _Dropout, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, and of the bias in the shape of the scores."""
    probabilities, _ = _probabilities(query, key, bias, scale)
    factors = dropout.factors(probabilities)
    dropped = probabilities if factors is None else probabilities * factors
    grad = widened(grad)
    grad_value = dropped.transpose(-2, -1) @ grad
    grad_probabilities = grad @ _for_each_query_head(query, value).transpose(-2, -1)
    if factors is not None:
        grad_probabilities = grad_probabilities * factors
    mean = (grad_probabilities * probabilities).sum(-1, keepdim=True)
    grad_scores = probabilities * (grad_probabilities - mean)
    grad_query = grad_scores @ _for_each_query_head(query, key) * scale
    grad_key = grad_scores.transpose(-2, -1) @ widened(query) * scale
    return (
        grad_query.to(query.dtype),
        _for_each_shared_head(grad_key, key),
        _for_each_shared_head(grad_value, value),
        grad_scores,
    )


_Sequences = list[tuple[int, slice, slice]]


def _packed(cum_seq_q: Tensor, cum_seq_k: Tensor | None, used: Tensor | None) -> _Sequences:
    """Number, queries and keys of each packed sequence; ``used`` says how many of its keys count, None for all."""
    queries = cum_seq_q.tolist()
    keys = queries if cum_seq_k is None else cum_seq_k.tolist()
    counts = [end - begin for begin, end in pairwise(keys)] if used is None else used.tolist()
    return [
        (index, slice(begin, end), slice(keys[index], keys[index] + counts[index]))
        for index, (begin, end) in enumerate(pairwise(queries))
    ]


def _lengths(queries: slice, keys: slice) -> tuple[int, int]:
    return queries.stop - queries.start, keys.stop - keys.start


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, sequences: _Sequences, mask: _Mask, dropout: _Dropout, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp, (heads, all queries), of packed (all queries, heads, features)."""
    output = query.new_zeros((*query.shape[:-1], value.size(-1)))
    logsumexp = query.new_full((query.size(-2), query.size(0)), float("inf"), dtype=torch.float32)
    for index, queries, keys in sequences:
        own = dropout._replace(seed=dropout.seed + index)
        q, k, v = (x.transpose(0, 1) for x in (query[queries], key[keys], value[keys]))
        result, part = _attend(q, k, v, mask.bias(*_lengths(queries, keys), widened(q)), own, scale)
        output[queries] = result.transpose(0, 1)
        logsumexp[:, queries] = part.to(torch.float32)
    return output, logsumexp


def _attend_packed_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: _Sequences,
    mask: _Mask,
    dropout: _Dropout,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for index, queries, keys in sequences:
        own = dropout._replace(seed=dropout.seed + index)
        g, q, k, v = (x.transpose(0, 1) for x in (grad[queries], query[queries], key[keys], value[keys]))
        bias = mask.bias(*_lengths(queries, keys), widened(q))
        grad_query, grad_key, grad_value, _ = _attend_backward(g, q, k, v, bias, own, scale)
        grads[0][queries] = grad_query.transpose(0, 1)
        grads[1][keys] += grad_key.transpose(0, 1)
        grads[2][keys] += grad_value.transpose(0, 1)
    return grads


def _refuse(op: str, **arguments: object) -> None:
    """Raise for an argument that would change the result in a way that is not known here."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"aten::{op} with {name} is not simulated")


# Flash: (batch, length, heads, features) or packed; heads may share keys; the diagonal ends at the last key.


def _flash_seed(seed: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The seed as flash gives it back: two unsigned numbers since the state of the generator is kept in one tensor."""
    schema = torch.ops.aten._flash_attention_forward.default._schema
    if any(result.name == "rng_state" for result in schema.returns):
        state = torch.tensor([seed, 0], dtype=torch.int64, device=like.device).view(torch.uint64)
        return state, torch.zeros((), dtype=torch.uint64, device=like.device)
    return _seed_tensors(seed, like)


def _seed_tensors(seed: int, like: Tensor) -> tuple[Tensor, Tensor]:
    return (
        torch.tensor(seed, dtype=torch.int64, device=like.device),
        torch.zeros((), dtype=torch.int64, device=like.device),
    )


def _seed_of(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.numel() == 0 else int(tensor.view(torch.int64).flatten()[0])


def _flash_mask(is_causal: bool, left: int | None, right: int | None) -> _Mask:
    left = None if left is None or left < 0 else left
    right = 0 if is_causal else None if right is None or right < 0 else right
    return _Mask(left, right, from_end=True)


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _refuse(
        "_flash_attention_forward",
        return_debug_mask=return_debug_mask,
        alibi_slopes=alibi_slopes,
        block_table=block_table,
    )
    dropout = _Dropout(dropout_p, _draw_seed(dropout_p))
    mask = _flash_mask(is_causal, window_size_left, window_size_right)
    if cum_seq_q is None:
        _refuse("_flash_attention_forward of unpacked sequences", seqused_k=seqused_k)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        bias = mask.bias(q.size(2), k.size(2), widened(q))
        output, logsumexp = _attend(q, k, v, bias, dropout, _scale(query, scale))
        output = output.transpose(1, 2)
    else:
        sequences = _packed(cum_seq_q, cum_seq_k, seqused_k)
        output, logsumexp = _attend_packed(query, key, value, sequences, mask, dropout, _scale(query, scale))
    state, unused = _flash_seed(dropout.seed, query)
    return laid_out_like(output, query), logsumexp.to(torch.float32), state, unused, query.new_empty(0)


def flash_forward_inplace(out: Tensor, *arguments: Any, **options: Any) -> Tensor:
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, debug = arguments
    _refuse("_flash_attention_forward_no_dropout_inplace", dropout_p=dropout_p or None)
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
    dropout = _Dropout(dropout_p, _seed_of(rng_state) if dropout_p else 0)
    mask = _flash_mask(is_causal, window_size_left, window_size_right)
    if cum_seq_q is not None and cum_seq_q.numel():
        sequences = _packed(cum_seq_q, cum_seq_k, None)
        return _attend_packed_backward(grad_out, query, key, value, sequences, mask, dropout, _scale(query, scale))
    g, q, k, v = (x.transpose(1, 2) for x in (grad_out, query, key, value))
    bias = mask.bias(q.size(2), k.size(2), widened(q))
    grads = _attend_backward(g, q, k, v, bias, dropout, _scale(query, scale))[:3]
    return tuple(laid_out_like(grad.transpose(1, 2), x) for grad, x in zip(grads, (query, key, value), strict=True))  # type: ignore[return-value]


def sdp_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    output, logsumexp, state, unused, debug = flash_forward(
        q, k, v, None, None, q.size(1), k.size(1), dropout_p, is_causal, return_debug_mask, scale=scale
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


# Memory-efficient: (batch, length, heads, features); the logsumexp is padded to 32 queries; a bias may want a gradient.

_NO_MASK, _FROM_FIRST, _FROM_LAST = 0, 1, 2


def _efficient_mask(custom_mask_type: int, window_size: int | None) -> _Mask:
    if custom_mask_type == _NO_MASK:
        _refuse("_efficient_attention_forward without a causal mask", window_size=window_size or None)
        return _Mask()
    return _Mask(window_size - 1 if window_size else None, 0, from_end=custom_mask_type == _FROM_LAST)


def _padded(logsumexp: Tensor, wanted: bool) -> Tensor:
    if not wanted:
        return logsumexp.new_empty((*logsumexp.shape[:-1], 0), dtype=torch.float32)
    length = -(-logsumexp.size(-1) // 32) * 32
    return torch.nn.functional.pad(logsumexp.to(torch.float32), (0, length - logsumexp.size(-1)), value=float("inf"))


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    dropout = _Dropout(dropout_p, _draw_seed(dropout_p))
    mask = _efficient_mask(custom_mask_type, window_size)
    if cu_seqlens_q is None:
        _refuse("_efficient_attention_forward of unpacked sequences", seqlen_k=seqlen_k)
        longest_q, longest_k = query.size(1), key.size(1)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        total = _total(mask.bias(longest_q, longest_k, widened(q)), None if bias is None else widened(bias))
        output, logsumexp = _attend(q, k, v, total, dropout, _scale(query, scale))
        output, logsumexp = output.transpose(1, 2).contiguous(), _padded(logsumexp, compute_log_sumexp)
    else:
        _refuse("_efficient_attention_forward of packed sequences", bias=bias)
        assert max_seqlen_q is not None
        longest_q, longest_k = max_seqlen_q, key.size(1) if max_seqlen_k is None else max_seqlen_k
        sequences = _packed(cu_seqlens_q, cu_seqlens_k, seqlen_k)
        packed, flat = _attend_packed(query[0], key[0], value[0], sequences, mask, dropout, _scale(query, scale))
        output = packed.unsqueeze(0)
        rows = flat.new_full((cu_seqlens_q.numel() - 1, query.size(2), longest_q), float("inf"))
        for index, queries, _keys in sequences:
            rows[index, :, : queries.stop - queries.start] = flat[:, queries]
        logsumexp = _padded(rows, compute_log_sumexp)
    return output, logsumexp, *_seed_tensors(dropout.seed, query), longest_q, longest_k


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
    dropout = _Dropout(dropout_p, _seed_of(philox_seed) if dropout_p else 0)
    mask = _efficient_mask(custom_mask_type, window_size)
    grad_bias = None
    if cu_seqlens_q is not None:
        sequences = _packed(cu_seqlens_q, cu_seqlens_k, None)
        grads = _attend_packed_backward(
            grad_out_[0], query[0], key[0], value[0], sequences, mask, dropout, _scale(query, scale)
        )
        grad_query, grad_key, grad_value = (grad.unsqueeze(0) for grad in grads)
    else:
        g, q, k, v = (x.transpose(1, 2) for x in (grad_out_, query, key, value))
        total = _total(mask.bias(q.size(2), k.size(2), widened(q)), None if bias is None else widened(bias))
        *dense, grad_scores = _attend_backward(g, q, k, v, total, dropout, _scale(query, scale))
        grad_query, grad_key, grad_value = (grad.transpose(1, 2).contiguous() for grad in dense)
        if bias is not None and bias_requires_grad:
            grad_bias = grad_scores.sum_to_size(bias.shape).to(bias.dtype)
    if shared_storage_dqdkdv:
        # One storage for the three, as a fused projection wants its gradient.
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    kind = _FROM_FIRST if is_causal else _NO_MASK
    output, logsumexp, seed, offset, _, _ = efficient_forward(
        q, k, v, attn_bias, None, None, None, None, dropout_p, kind, compute_log_sumexp, scale=scale
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
    dropout = _Dropout(dropout_p, _seed_of(philox_seed) if dropout_p else 0)
    mask = _efficient_mask(_FROM_FIRST if is_causal else _NO_MASK, None)
    bias = None if attn_bias is None or attn_bias.numel() == 0 else widened(attn_bias)
    total = _total(mask.bias(query.size(2), key.size(2), widened(query)), bias)
    *grads, grad_scores = _attend_backward(grad_out_, query, key, value, total, dropout, _scale(query, scale))
    grad_query, grad_key, grad_value = (laid_out_like(g, x) for g, x in zip(grads, (query, key, value), strict=True))
    grad_bias = None
    if grad_input_mask[3] and bias is not None and attn_bias is not None:
        grad_bias = grad_scores.sum_to_size(bias.shape).to(attn_bias.dtype)
    return grad_query, grad_key, grad_value, grad_bias


def fill_dropout_mask(self: Tensor, dropout_p: float, seed: int, offset: int) -> Tensor:
    """The numbers that the memory-efficient kernel compares with the probability to drop."""
    return self.copy_(uniform(self, seed))


# cuDNN: (batch, heads, length, features) or packed; the diagonal begins at the first key.


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
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, int, int, Tensor, Tensor, None]:
    _refuse("_cudnn_attention_forward", return_debug_mask=return_debug_mask, block_table=block_table)
    dropout = _Dropout(dropout_p, _draw_seed(dropout_p))
    if cum_seq_q is None:
        _refuse("_cudnn_attention_forward of unpacked sequences", seqused_k=seqused_k)
        output, logsumexp = _attend(
            query, key, value, _cudnn_bias(query, key, attn_bias, is_causal), dropout, _scale(query, scale)
        )
        logsumexp = logsumexp.unsqueeze(-1)
    else:
        _refuse("_cudnn_attention_forward of packed sequences", attn_bias=attn_bias)
        sequences = _packed(cum_seq_q, cum_seq_k, seqused_k)
        mask = _cudnn_packed_mask(sequences, is_causal)
        output, flat = _attend_packed(query, key, value, sequences, mask, dropout, _scale(query, scale))
        logsumexp = flat.transpose(0, 1).unsqueeze(-1)
    seeds = _seed_tensors(dropout.seed, query)
    result = laid_out_like(output, query)
    return result, logsumexp.to(torch.float32), cum_seq_q, cum_seq_k, max_q, max_k, *seeds, None


def _cudnn_bias(query: Tensor, key: Tensor, attn_bias: Tensor | None, is_causal: bool) -> Tensor | None:
    causal = _Mask(right=0).bias(query.size(-2), key.size(-2), widened(query)) if is_causal else None
    return _total(causal, None if attn_bias is None or attn_bias.numel() == 0 else widened(attn_bias))


def _cudnn_packed_mask(sequences: _Sequences, is_causal: bool) -> _Mask:
    if not is_causal:
        return _Mask()
    if any(len(set(_lengths(queries, keys))) > 1 for _, queries, keys in sequences):
        raise NotImplementedError("aten::_cudnn_attention_forward, causal with unequal packed lengths, is not simulated")
    return _Mask(right=0)


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
    dropout = _Dropout(dropout_p, _seed_of(philox_seed) if dropout_p else 0)
    if cum_seq_q is not None and cum_seq_q.numel():
        sequences = _packed(cum_seq_q, cum_seq_k, None)
        mask = _cudnn_packed_mask(sequences, is_causal)
        return _attend_packed_backward(grad_out, query, key, value, sequences, mask, dropout, _scale(query, scale))
    bias = _cudnn_bias(query, key, attn_bias, is_causal)
    grads = _attend_backward(grad_out, query, key, value, bias, dropout, _scale(query, scale))[:3]
    return tuple(laid_out_like(grad, x) for grad, x in zip(grads, (query, key, value), strict=True))  # type: ignore[return-value]


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
    )


DECOMPOSITIONS = {
    "aten::_flash_attention_forward": flash_forward,
    "aten::_flash_attention_forward_no_dropout_inplace": flash_forward_inplace,
    "aten::_flash_attention_backward": flash_backward,
    "aten::_scaled_dot_product_flash_attention": sdp_flash,
    "aten::_scaled_dot_product_flash_attention_backward": sdp_flash_backward,
    "aten::_efficient_attention_forward": efficient_forward,
    "aten::_efficient_attention_backward": efficient_backward,
    "aten::_scaled_dot_product_efficient_attention": sdp_efficient,
    "aten::_scaled_dot_product_efficient_attention_backward": sdp_efficient_backward,
    "aten::_fill_mem_eff_dropout_mask_": fill_dropout_mask,
    "aten::_cudnn_attention_forward": cudnn_forward,
    "aten::_cudnn_attention_backward": cudnn_backward,
    "aten::_scaled_dot_product_cudnn_attention": sdp_cudnn,
    "aten::_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
}
