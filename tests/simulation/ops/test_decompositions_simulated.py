"""Decompositions of CUDA ops return the results and gradients of equivalent ops on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

aten = torch.ops.aten
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors in a result."""
    actual = list(value) if isinstance(value, (tuple, list)) else [value]
    flat = [t for item in actual for t in (tensors(item) if isinstance(item, (tuple, list)) else [item])]
    return [t for t in flat if isinstance(t, torch.Tensor) and t.is_floating_point()]


def results(function: Callable[..., Any], arguments: list[torch.Tensor], device: str) -> list[torch.Tensor]:
    """Return the outputs of a function, and the gradients of their weighted sum. Each element has its own weight."""
    here = [t.detach().to(device) for t in arguments]
    wanting = [t.requires_grad_() for t in here if t.is_floating_point()]
    outputs = tensors(function(*here))
    weighed = [(output.double() * drawn(*output.shape, dtype=torch.float64, seed=9).to(device)).sum() for output in outputs]
    gradients = torch.autograd.grad(sum(weighed[1:], weighed[0]), wanting)
    return [t.detach().cpu() for t in (*outputs, *gradients)]


def compare(
    function: Callable[..., Any],
    *arguments: torch.Tensor,
    reference: Callable[..., Any] | None = None,
    tolerance: float | None = None,
) -> None:
    """Compare a function on a simulated GPU, forward and backward, with itself or its reference on the CPU."""
    expected = results(reference or function, list(arguments), "cpu")
    actual = results(function, list(arguments), "cuda")
    assert len(actual) == len(expected)
    tolerance = TOLERANCES[arguments[0].dtype] if tolerance is None else tolerance
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


class TestRecurrentCells:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    @pytest.mark.parametrize("cell_class", [nn.LSTMCell, nn.GRUCell])
    @pytest.mark.parametrize("bias", [True, False])
    def test_cell(self, cell_class: type[nn.RNNCellBase], dtype: torch.dtype, bias: bool) -> None:
        cell = cell_class(4, 5, bias)  # type: ignore[arg-type]
        names = [name for name, _ in cell.named_parameters()]

        def step(x: torch.Tensor, h: torch.Tensor, c: torch.Tensor, *weights: torch.Tensor) -> Any:
            state = (h, c) if cell_class is nn.LSTMCell else h
            result = torch.func.functional_call(cell, dict(zip(names, weights, strict=True)), (x, state))
            return (*result,) if cell_class is nn.LSTMCell else (result, c * 1)

        weights = [drawn(*parameter.shape, dtype=dtype, seed=n) for n, parameter in enumerate(cell.parameters())]
        inputs = [drawn(3, width, dtype=dtype, seed=width) for width in (4, 5)]
        compare(step, *inputs, drawn(3, 5, dtype=dtype, seed=7), *weights)

    @pytest.mark.parametrize("only", ["hidden", "cell"])
    def test_gradient_of_one_lstm_state(self, only: str) -> None:
        cell = nn.LSTMCell(4, 5)

        def step(x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            hidden, state = cell.to(x.device)(x, (h, c))
            return hidden if only == "hidden" else state

        compare(step, drawn(3, 4), drawn(3, 5), drawn(3, 5, seed=1))


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    causal: str | None = None,
    scale: float | None = None,
    kept: torch.Tensor | None = None,
    window: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Compute attention by its formula. ``kept`` holds the dropout's factor of each probability."""
    groups = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-2, -1) * (query.size(-1) ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    queries, keys = scores.shape[-2:]
    distance = torch.arange(keys) - torch.arange(queries).unsqueeze(1) - (0 if causal == "first" else keys - queries)
    hidden = distance > 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if window:
        hidden |= (distance < -window[0]) | (distance > window[1])
    # A query that attends to no key has output zero.
    probabilities = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(hidden, 0)
    return (probabilities if kept is None else probabilities * kept) @ value


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    return aten._scaled_dot_product_flash_attention(q, k, v, **options)[0]


def efficient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any = None, **options: Any) -> torch.Tensor:
    return aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, **options)[0]


def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: Any = None, **options: Any) -> torch.Tensor:
    return aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, **options)[0]


KERNELS = {"flash": flash, "efficient": efficient, "cudnn": cudnn}
# The logsumexp of a kernel is float32.
ATTENTION_TOLERANCES = {torch.float64: 1e-6, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def inputs(queries: int = 7, keys: int = 7, shared: int = 4, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [
        drawn(2, 4, queries, 8, dtype=dtype),
        drawn(2, shared, keys, 8, dtype=dtype, seed=1),
        drawn(2, shared, keys, 8, dtype=dtype, seed=2),
    ]


@pytest.mark.parametrize("name", KERNELS)
class TestAttentionKernels:
    def test_plain(self, name: str) -> None:
        compare(KERNELS[name], *inputs(5, 9), reference=reference_attention, tolerance=1e-6)

    def test_scaled(self, name: str) -> None:
        kernel = KERNELS[name]
        compare(
            lambda *x: kernel(*x, scale=0.3), *inputs(), reference=lambda *x: reference_attention(*x, scale=0.3), tolerance=1e-6
        )

    def test_grouped_query_heads(self, name: str) -> None:
        compare(KERNELS[name], *inputs(shared=2), reference=reference_attention, tolerance=1e-6)

    @pytest.mark.parametrize("dtype", ATTENTION_TOLERANCES, ids=str)
    @pytest.mark.parametrize("keys", [5, 7, 11])
    def test_causal(self, name: str, keys: int, dtype: torch.dtype) -> None:
        kernel = KERNELS[name]
        # Flash aligns the causal mask with the last query and the last key, the others with the first query and key.
        causal = "last" if name == "flash" else "first"
        compare(
            lambda *x: kernel(*x, is_causal=True),
            *inputs(7, keys, dtype=dtype),
            reference=lambda *x: reference_attention(*x, causal=causal),
            tolerance=ATTENTION_TOLERANCES[dtype],
        )

    def test_half_types(self, name: str) -> None:
        compare(KERNELS[name], *inputs(dtype=torch.bfloat16), reference=reference_attention, tolerance=0.05)

    def test_dropout_backward_uses_the_forward_mask(self, name: str) -> None:
        kernel = KERNELS[name]

        def again(*x: torch.Tensor) -> torch.Tensor:
            torch.cuda.manual_seed(3)
            return kernel(*x, dropout_p=0.4)

        here = [t.cuda().requires_grad_() for t in inputs(2, 3)]
        assert torch.autograd.gradcheck(again, here)
        assert torch.equal(again(*here), again(*here))
        assert not torch.equal(kernel(*here, dropout_p=0.4), kernel(*here, dropout_p=0.4))

    def test_dropout_keeps_the_mean(self, name: str) -> None:
        q, k = torch.zeros(2, 1, 1, 64, 8, device="cuda")
        output = KERNELS[name](q, k, torch.ones(1, 1, 64, 8, device="cuda"), dropout_p=0.25)
        # All 64 x 64 probabilities are equal. Dropout keeps three quarters of them and scales those by 4/3.
        assert output.mean().item() == pytest.approx(1, abs=0.05)
        assert output.std().item() > 0.01

    def test_result_has_the_strides_of_the_query(self, name: str) -> None:
        q, k, v = (t.cuda().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in inputs())
        output = KERNELS[name](q, k, v)
        assert output.stride() == q.stride()
        gradient = torch.autograd.grad(output.sum(), q)[0]
        assert gradient.shape == q.shape


@pytest.mark.parametrize("name", ["efficient", "cudnn"])
class TestAttentionKernelsWithBias:
    def test_bias(self, name: str) -> None:
        bias = drawn(2, 4, 5, 9, dtype=torch.float64, seed=3)
        if name == "cudnn":
            # cuDNN's backward returns no gradient of the bias.
            kernel, kept = KERNELS[name], bias
            compare(
                lambda *x: kernel(*x, kept.to(x[0].device)),
                *inputs(5, 9),
                reference=lambda *x: reference_attention(*x, kept),
                tolerance=1e-6,
            )
            return
        compare(KERNELS[name], *inputs(5, 9), bias, reference=reference_attention, tolerance=1e-6)

    def test_query_without_keys_has_zero_output(self, name: str) -> None:
        bias = torch.zeros(2, 4, 7, 7, dtype=torch.float64)
        bias[:, :, 3] = float("-inf")
        q, k, v = (t.cuda().requires_grad_() for t in inputs())
        output = KERNELS[name](q, k, v, bias.cuda())
        output.sum().backward()
        assert not output[:, :, 3].any()
        assert output[:, :, 2].any()
        assert q.grad is not None
        assert q.grad.isfinite().all()
        assert not q.grad[:, :, 3].any()


class TestAttention:
    """Tests of ``scaled_dot_product_attention``, which selects one of the kernels."""

    @pytest.mark.parametrize(
        "backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
    )
    @pytest.mark.parametrize("causal", [True, False])
    def test_each_sdpa_backend(self, backend: SDPBackend, causal: bool) -> None:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        def chosen(*x: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                return attend(*x)

        # torch pads a width of 12 for flash.
        width = 12 if backend is SDPBackend.FLASH_ATTENTION else 16
        inputs = [drawn(2, 4, 6, width, dtype=torch.bfloat16, seed=n) for n in range(3)]
        compare(chosen, *inputs, reference=attend, tolerance=0.05)

    @pytest.mark.parametrize("mask", [torch.bool, torch.float32])
    def test_masks(self, mask: torch.dtype) -> None:
        hidden = torch.ones(6, 10, dtype=torch.bool).tril(2)
        attn_mask = hidden if mask is torch.bool else drawn(6, 10)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask.to(q.device))

        compare(attend, drawn(2, 4, 6, 8), drawn(2, 4, 10, 8), drawn(2, 4, 10, 8, seed=1))

    def test_learned_bias(self) -> None:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

        # One bias for all heads. Its width needs padding for the kernel.
        compare(attend, drawn(2, 4, 6, 8), drawn(2, 4, 5, 8), drawn(2, 4, 5, 8, seed=1), drawn(1, 1, 6, 5))

    def test_groups(self) -> None:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        inputs = drawn(2, 4, 6, 8), drawn(2, 2, 6, 8), drawn(2, 2, 6, 8, seed=1)
        compare(attend, *inputs)
        compare(attend, *(t.bfloat16() for t in inputs))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_sequences_of_several_lengths(self, dtype: torch.dtype) -> None:
        """Compare attention of nested tensors, which torch packs for the kernels, with that of each sequence alone."""
        lengths = [3, 6, 1]
        parts = [[drawn(length, 2, 8, dtype=dtype, seed=n) for length in lengths] for n in range(3)]

        def attend(*rows: torch.Tensor) -> list[torch.Tensor]:
            split = [rows[0:3], rows[3:6], rows[6:9]]
            q, k, v = (torch.nested.as_nested_tensor(list(part), layout=torch.jagged).transpose(1, 2) for part in split)
            return list(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).unbind())

        def one_by_one(*rows: torch.Tensor) -> list[torch.Tensor]:
            return [F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in rows[n::3])).transpose(0, 1) for n in range(3)]

        flat = [t for part in parts for t in part]
        compare(attend, *flat, reference=one_by_one, tolerance=0.05 if dtype is torch.bfloat16 else None)


class TestPackedAttention:
    """Kernels that take packed sequences of several lengths."""

    STARTS = (0, 3, 9, 10)

    def packed(self) -> list[torch.Tensor]:
        return [drawn(10, 2, 8, seed=n) for n in range(3)]

    def one_by_one(self, *rows: torch.Tensor, **options: Any) -> torch.Tensor:
        parts = [
            reference_attention(*(t[begin:end].transpose(0, 1).unsqueeze(0) for t in rows), **options)[0].transpose(0, 1)
            for begin, end in zip(self.STARTS, self.STARTS[1:], strict=False)
        ]
        return torch.cat(parts)

    @pytest.mark.parametrize("options", [{}, {"causal": "last"}, {"window": (1, 0)}], ids=str)
    def test_flash(self, options: dict[str, Any]) -> None:
        def attend(*rows: torch.Tensor) -> torch.Tensor:
            starts = torch.tensor(self.STARTS, dtype=torch.int32, device=rows[0].device)
            left, right = options.get("window", (None, None))
            causal = "causal" in options
            return aten._flash_attention_forward(
                *rows, starts, starts, 6, 6, 0.0, causal, False, window_size_left=left, window_size_right=right
            )[0]

        compare(attend, *self.packed(), reference=lambda *rows: self.one_by_one(*rows, **options))

    @pytest.mark.parametrize("mask_type", [0, 1, 2])
    def test_efficient(self, mask_type: int) -> None:
        def attend(*rows: torch.Tensor) -> torch.Tensor:
            starts = torch.tensor(self.STARTS, dtype=torch.int32, device=rows[0].device)
            batch = [t.unsqueeze(0) for t in rows]
            return aten._efficient_attention_forward(*batch, None, starts, starts, 6, 6, 0.0, mask_type, True)[0][0]

        causal = {0: None, 1: "first", 2: "last"}[mask_type]
        compare(attend, *self.packed(), reference=lambda *rows: self.one_by_one(*rows, causal=causal))

    def test_efficient_with_bias(self) -> None:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            turned = [t.transpose(1, 2) for t in (q, k, v)]
            actual = aten._efficient_attention_forward(*turned, bias, None, None, None, None, 0.0, 0, True)
            return actual[0].transpose(1, 2)

        compare(
            attend,
            drawn(2, 4, 6, 8),
            drawn(2, 4, 9, 8),
            drawn(2, 4, 9, 8, seed=1),
            drawn(2, 4, 6, 9),
            reference=reference_attention,
        )

    @pytest.mark.skipif(
        not hasattr(aten, "_cudnn_attention_forward"), reason="torch 2.6 has cuDNN's attention for batches alone"
    )
    @pytest.mark.parametrize("causal", [False, True])
    def test_cudnn(self, causal: bool) -> None:
        def attend(*rows: torch.Tensor) -> torch.Tensor:
            starts = torch.tensor(self.STARTS, dtype=torch.int32, device=rows[0].device)
            return aten._cudnn_attention_forward(*rows, None, starts, starts, 6, 6, True, 0.0, causal, False)[0]

        def expect(*rows: torch.Tensor) -> torch.Tensor:
            return self.one_by_one(*rows, causal="first" if causal else None)

        rows = [t.cuda() for t in self.packed()]
        # Before torch 2.9 it has no gradient: https://github.com/pytorch/pytorch/pull/149282.
        if hasattr(aten, "_cudnn_attention_backward"):
            compare(attend, *self.packed(), reference=expect)
        else:
            torch.testing.assert_close(attend(*rows).cpu(), expect(*self.packed()))
        starts, others = (torch.tensor(lengths, dtype=torch.int32).cuda() for lengths in (self.STARTS, (0, 4, 9, 10)))
        with pytest.raises(NotImplementedError, match="causal with unequal packed lengths, is not simulated"):
            aten._cudnn_attention_forward(*rows, None, starts, others, 6, 6, True, 0.0, True, False)

    @pytest.mark.skipif(not hasattr(aten, "_flash_attention_forward_no_dropout_inplace"), reason="torch 2.6 has no such op")
    def test_flash_in_place(self) -> None:
        starts = torch.tensor(self.STARTS, dtype=torch.int32, device="cuda")
        rows = [t.cuda() for t in self.packed()]
        options = (starts, starts, 6, 6, 0.0, True, False)
        expected, logsumexp, *_ = aten._flash_attention_forward(*rows, *options)
        out = torch.empty_like(expected)
        actual = aten._flash_attention_forward_no_dropout_inplace(out, *rows, *options)
        assert torch.equal(out, expected)
        assert torch.equal(actual, logsumexp)

    def test_dropout_mask_differs_between_sequences(self) -> None:
        def attend(*rows: torch.Tensor) -> torch.Tensor:
            torch.cuda.manual_seed(1)
            starts = torch.tensor((0, 3, 6), dtype=torch.int32, device="cuda")
            return aten._flash_attention_forward(*rows, starts, starts, 3, 3, 0.5, False, False)[0]

        same = drawn(3, 2, 4, dtype=torch.float64).cuda()
        rows = [torch.cat([same, same]).requires_grad_() for _ in range(3)]
        assert torch.autograd.gradcheck(attend, rows)
        output = attend(*rows)
        assert not torch.equal(output[:3], output[3:])

    def test_dropout_mask(self) -> None:
        """The op fills the mask with random numbers. Dropout keeps an element if its number exceeds the probability."""
        q, k, v = (drawn(1, 1, 6, 8, seed=n) for n in range(3))
        torch.cuda.manual_seed(5)
        output, _, seed, offset = aten._scaled_dot_product_efficient_attention(
            q.cuda(), k.cuda(), v.cuda(), None, True, dropout_p=0.3
        )
        mask = torch.empty(1, 1, 6, 6, device="cuda")
        torch._fill_mem_eff_dropout_mask_(mask, 0.3, seed.item(), offset.item())
        kept = (mask.cpu() > 0.3) / 0.7
        torch.testing.assert_close(output.cpu(), reference_attention(q, k, v, kept=kept))


class TestBatchNorm:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("affine", [True, False])
    @pytest.mark.parametrize("counted", [True, False])
    def test_sync_batch_norm_of_parts_equals_batch_norm(self, dtype: torch.dtype, affine: bool, counted: bool) -> None:
        """Call the ops of SyncBatchNorm with two parts of a batch. The op with counts takes parts of unequal size."""
        whole = drawn(8, 3, 4, dtype=dtype) + 1
        grad = drawn(8, 3, 4, dtype=dtype, seed=1)
        weight, bias = (drawn(3, dtype=dtype, seed=n) if affine else None for n in (1, 2))
        expected_mean, expected_var = torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype)
        wanting = [t.clone().requires_grad_() for t in (whole, weight, bias) if t is not None]
        expected = F.batch_norm(wanting[0], expected_mean, expected_var, *(wanting[1:] or (None, None)), True, 0.2, 1e-5)
        expected_grads = torch.autograd.grad(expected, wanting, grad)

        here = [None if t is None else t.cuda() for t in (weight, bias)]
        sizes = (3, 5) if counted else (4, 4)
        parts = [part.cuda() for part in whole.split(sizes)]
        grads = [part.cuda() for part in grad.split(sizes)]
        running_mean, running_var = torch.zeros(3, dtype=dtype).cuda(), torch.ones(3, dtype=dtype).cuda()
        part_statistics = zip(*(torch.batch_norm_stats(part, 1e-5) for part in parts), strict=True)
        mean, invstd = (torch.stack(statistics) for statistics in part_statistics)
        counts = torch.tensor([float(part.numel() / 3) for part in parts], device="cuda", dtype=dtype)
        gather: Any = torch.batch_norm_gather_stats_with_counts if counted else torch.batch_norm_gather_stats
        mean, invstd = gather(
            parts[0], mean, invstd, running_mean, running_var, 0.2, 1e-5, counts if counted else int(counts[0])
        )
        output = torch.cat([torch.batch_norm_elemt(part, *here, mean, invstd, 1e-5) for part in parts])
        reduced = [
            torch.batch_norm_backward_reduce(g, part, mean, invstd, here[0], True, affine, affine)
            for g, part in zip(grads, parts, strict=True)
        ]
        sum_dy, sum_dy_xmu = (sum(r[n] for r in reduced) for n in (0, 1))
        grad_input = torch.cat(
            [
                torch.batch_norm_backward_elemt(g, part, mean, invstd, here[0], sum_dy, sum_dy_xmu, counts.int())
                for g, part in zip(grads, parts, strict=True)
            ]
        )
        close: Callable[..., None] = lambda a, b: torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)  # noqa: E731
        close(output, expected.detach())
        close(running_mean, expected_mean)
        close(running_var, expected_var)
        close(grad_input, expected_grads[0])
        if affine:
            close(sum(r[2] for r in reduced), expected_grads[1])
            close(sum(r[3] for r in reduced), expected_grads[2])

    @pytest.mark.parametrize("training", [True, False])
    def test_cudnn_batch_norm(self, training: bool) -> None:
        def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
            mean, var = torch.full((3,), 0.5, device=x.device), torch.full((3,), 2.0, device=x.device)
            if x.is_cuda:
                result = torch.cudnn_batch_norm(x, weight, bias, mean, var, training, 0.3, 1e-5)[0]
            else:
                result = F.batch_norm(x, mean, var, weight, bias, training, 0.3, 1e-5)
            return result, mean + 0 * weight, var + 0 * weight

        compare(norm, drawn(4, 3, 5), drawn(3), drawn(3, seed=1), tolerance=1e-4)


class TestRmsNorm:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    @pytest.mark.parametrize("shape", [(6,), (4, 6)])
    def test_with_weight(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return F.rms_norm(x, shape, weight, 1e-5)

        compare(norm, drawn(3, 4, 6, dtype=dtype), drawn(*shape, dtype=dtype), tolerance=2 * TOLERANCES[dtype])

    @pytest.mark.parametrize("eps", [None, 1e-3])
    def test_without_weight(self, eps: float | None) -> None:
        compare(lambda x: F.rms_norm(x, (6,), None, eps), drawn(3, 4, 6))

    def test_whole_tensor(self) -> None:
        compare(lambda x, weight: F.rms_norm(x, (4, 6), weight), drawn(4, 6), drawn(4, 6, seed=1))


SOFTMAXES: dict[str, Callable[..., torch.Tensor]] = {"softmax": torch.softmax, "log_softmax": torch.log_softmax}


@pytest.mark.parametrize("name", SOFTMAXES)
class TestSoftmaxFromHalfToFloat:
    @pytest.mark.parametrize("dim", [0, -1])
    def test_forward_and_backward(self, name: str, dim: int) -> None:
        def softmax(x: torch.Tensor) -> torch.Tensor:
            return SOFTMAXES[name](x, dim, dtype=torch.float32)

        compare(softmax, drawn(3, 5, dtype=torch.float16))

    def test_under_autocast(self, name: str) -> None:
        x = drawn(3, 5, dtype=torch.float16).cuda()
        with torch.autocast("cuda", dtype=torch.float16):
            result = SOFTMAXES[name](x, -1)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result.cpu(), SOFTMAXES[name](x.cpu().float(), -1))

    def test_out(self, name: str) -> None:
        x = drawn(3, 5, dtype=torch.float16).cuda()
        out = torch.empty(0, device="cuda")
        op = getattr(aten, f"_{name}")
        assert op.out(x, -1, True, out=out) is out
        assert torch.equal(out, op(x, -1, True))
        grad = torch.ones_like(out)
        backward: Any = getattr(aten, f"_{name}_backward_data")
        into = torch.empty(0, device="cuda", dtype=torch.float16)
        backward.out(grad, out, -1, torch.float16, **{"grad_input" if name == "softmax" else "out": into})
        assert torch.equal(into, backward(grad, out, -1, torch.float16))

    def test_conversion_of_other_types_raises(self, name: str) -> None:
        x = drawn(3, 5, dtype=torch.bfloat16).cuda()
        with pytest.raises(RuntimeError, match="conversion is supported for Half type only"):
            getattr(aten, f"_{name}")(x, -1, True)
        with pytest.raises(RuntimeError, match="expected input and grad types to match"):
            getattr(aten, f"_{name}_backward_data")(x.float(), x.float(), -1, torch.bfloat16)


typed_products = pytest.mark.skipif(
    not hasattr(aten.mm, "dtype"), reason="torch 2.6 has no products with a type for the result"
)


@typed_products
class TestTypedProducts:
    # The sums in products of these inputs exceed the range or precision of half types.
    def inputs(self, *batch: int) -> list[torch.Tensor]:
        return [(drawn(*batch, *shape) * 40).half() for shape in ((5, 300), (300, 4), (5, 4))]

    def expected(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return (left.double() @ right.double()).float()

    def test_mm_and_bmm(self) -> None:
        for batch in ((), (3,)):
            left, right, _ = self.inputs(*batch)
            product: Any = torch.bmm if batch else torch.mm
            actual = product(left.cuda(), right.cuda(), out_dtype=torch.float32)
            assert actual.dtype == torch.float32
            torch.testing.assert_close(actual.cpu(), self.expected(left, right), rtol=1e-5, atol=1e-2)
            out = torch.empty(0, device="cuda")
            getattr(aten, product.__name__).dtype_out(left.cuda(), right.cuda(), torch.float32, out=out)
            assert torch.equal(out, actual)

    def test_addmm_and_baddbmm(self) -> None:
        for batch in ((), (3,)):
            left, right, added = self.inputs(*batch)
            product: Any = torch.baddbmm if batch else torch.addmm
            actual = product(added.cuda(), left.cuda(), right.cuda(), out_dtype=torch.float32, beta=0.5, alpha=2)
            expected = 0.5 * added.float() + 2 * self.expected(left, right)
            torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-2)
            nothing = torch.full_like(added, float("nan")).cuda()
            ignored = product(nothing, left.cuda(), right.cuda(), out_dtype=torch.float32, beta=0)
            torch.testing.assert_close(ignored.cpu(), self.expected(left, right), rtol=1e-5, atol=1e-2)


class TestScaledProducts:
    def quantized(self) -> tuple[torch.Tensor, torch.Tensor]:
        return drawn(32, 16).to(torch.float8_e4m3fn), drawn(48, 16, seed=1).to(torch.float8_e4m3fn).t()

    @pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
    def test_one_scale(self, out: torch.dtype) -> None:
        left, right = self.quantized()
        a, b = torch.tensor(0.5), torch.tensor(3.0)
        bias = drawn(48).to(torch.bfloat16) if out is torch.bfloat16 else None
        actual = torch._scaled_mm(
            left.cuda(), right.cuda(), a.cuda(), b.cuda(), bias=None if bias is None else bias.cuda(), out_dtype=out
        )
        expected = (left.float() * a) @ (right.float() * b) + (0 if bias is None else bias.float())
        assert actual.dtype == out
        torch.testing.assert_close(actual.cpu(), expected.to(out))

    def test_scale_for_each_row(self) -> None:
        left, right = self.quantized()
        a, b = torch.rand(32, 1) + 0.5, torch.rand(1, 48) + 0.5
        actual = torch._scaled_mm(left.cuda(), right.cuda(), a.cuda(), b.cuda(), out_dtype=torch.bfloat16)
        torch.testing.assert_close(actual.cpu(), ((left.float() * a) @ (right.float() * b)).bfloat16())

    def test_float8_result_saturates(self) -> None:
        left, right = self.quantized()
        one, large = torch.tensor(1.0).cuda(), torch.tensor(1e6).cuda()
        actual = torch._scaled_mm(left.cuda(), right.cuda(), one, large, out_dtype=torch.float8_e4m3fn)
        assert actual.float().abs().max().item() == 448

    def test_scale_for_each_block(self) -> None:
        left, right = drawn(32, 256).to(torch.float8_e4m3fn), drawn(48, 256, seed=1).to(torch.float8_e4m3fn).t()
        a, b = torch.rand(32, 2) + 0.5, torch.rand(2, 1) + 0.5
        actual = torch._scaled_mm(left.cuda(), right.cuda(), a.cuda(), b.cuda(), out_dtype=torch.bfloat16)
        halves = [slice(0, 128), slice(128, 256)]
        expected = sum((left.float()[:, h] * a[:, n : n + 1]) @ (right.float()[h] * b[n]) for n, h in enumerate(halves))
        torch.testing.assert_close(actual.cpu(), expected.bfloat16())  # type: ignore[union-attr]

    def test_scaled_result_in_out(self) -> None:
        left, right = self.quantized()
        one, half = torch.tensor(1.0).cuda(), torch.tensor(0.5).cuda()
        out = torch.empty(32, 48, dtype=torch.float8_e4m3fn, device="cuda")
        options: dict[str, Any] = {"scale_result": half, "out_dtype": torch.float8_e4m3fn}
        assert torch._scaled_mm(left.cuda(), right.cuda(), one, one, out=out, **options) is out
        assert torch.equal(out.float().cpu(), (left.float() @ right.float() * 0.5).to(torch.float8_e4m3fn).float())

    def test_unknown_scales_raise(self) -> None:
        """CUDA's error says which scales there are. Earlier versions of torch say it otherwise."""
        left, right, one = *(each.cuda() for each in self.quantized()), torch.ones((), device="cuda")
        unknown = "^Invalid scaling configuration|is not simulated"
        for arguments in (
            *((left, right, one.to(dtype), one) for dtype in (torch.bfloat16, torch.float64)),
            (left.bfloat16(), right.bfloat16(), one, one),
            (left, right, torch.ones(3, 5, device="cuda"), torch.ones(5, 3, device="cuda")),
        ):
            with pytest.raises(RuntimeError, match=unknown):
                torch._scaled_mm(*arguments, out_dtype=torch.bfloat16)


class TestSparse24:
    def test_products(self) -> None:
        dense = drawn(64, 64).half()
        dense[:, 0::4] = 0
        dense[:, 2::4] = 0
        from torch.sparse._semi_structured_conversions import sparse_semi_structured_from_dense_cutlass

        values, meta = sparse_semi_structured_from_dense_cutlass(dense)
        other = drawn(64, 32, seed=1).half()
        added = drawn(64, seed=2).half()
        expected = dense.float() @ other.float()
        actual = aten._sparse_semi_structured_mm(values.cuda(), meta.cuda(), other.cuda())
        torch.testing.assert_close(actual.cpu(), expected.half(), rtol=1e-2, atol=1e-2)
        actual = aten._sparse_semi_structured_addmm(added.cuda(), values.cuda(), meta.cuda(), other.cuda(), alpha=2, beta=0.5)
        wanted = (2 * expected + 0.5 * added.float().unsqueeze(1)).half()
        torch.testing.assert_close(actual.cpu(), wanted, rtol=1e-2, atol=1e-2)

    def pruned(self, dtype: torch.dtype) -> torch.Tensor:
        """A matrix with at most two values in each group of four: at all pairs of positions, one, and none."""
        kept = torch.tensor([(i < j) and (k in (i, j)) for i in range(4) for j in range(4) for k in range(4)]).reshape(16, 4)
        kept[0, 2] = True
        return (drawn(32, 64) * 8 * kept.repeat(32, 1).reshape(32, 64)).round().to(dtype)

    @pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.bfloat16, torch.float32])
    def test_compressed(self, dtype: torch.dtype) -> None:
        dense, other = self.pruned(dtype), (drawn(64, 16, seed=1) * 2).round().to(dtype)
        compressed = torch._cslt_compress(dense.cuda())
        assert compressed.shape == (32, 64 * (10 if dtype == torch.int8 else 9) // 16)
        expected = dense.float() @ other.float()
        expected = expected.clamp(-128, 127) if dtype == torch.int8 else expected
        for transposed in (False, True):
            actual = torch._cslt_sparse_mm(compressed, other.cuda(), transpose_result=transposed).cpu()
            torch.testing.assert_close(actual.t() if transposed else actual, expected.to(dtype))
        assert torch._cslt_sparse_mm_search(compressed, other.cuda()) == 0

    def test_compressed_with_scales_and_bias(self) -> None:
        dense, other = self.pruned(torch.int8), (drawn(64, 16, seed=1) * 2).round().to(torch.int8)
        scales, bias = drawn(32, seed=2), drawn(32, seed=3)
        compressed = torch._cslt_compress(dense.cuda())
        actual = torch._cslt_sparse_mm(
            compressed, other.cuda(), alpha=scales.cuda(), bias=bias.cuda(), out_dtype=torch.bfloat16
        )
        wanted = (dense.float() @ other.float()) * scales[:, None] + bias[:, None]
        torch.testing.assert_close(actual.cpu(), wanted.bfloat16())

    def test_refused_types(self) -> None:
        with pytest.raises(RuntimeError, match="Unsupported dtype for cuSPARSELt"):
            torch._cslt_compress(torch.ones(32, 32, dtype=torch.float64, device="cuda"))
        half = torch.ones(64, 16, dtype=torch.half, device="cuda")
        with pytest.raises(RuntimeError, match="out_dtype support only available"):
            torch._cslt_sparse_mm(torch._cslt_compress(self.pruned(torch.half).cuda()), half, out_dtype=torch.bfloat16)

    def test_tensors_of_torch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.sparse.SparseSemiStructuredTensor, "_FORCE_CUTLASS", False)
        layer, x = nn.Linear(64, 32, dtype=torch.half), drawn(16, 64, dtype=torch.half)
        layer.weight = nn.Parameter(self.pruned(torch.half))
        wanted = F.linear(x.float(), layer.weight.float(), layer.bias.float()).half()
        layer.cuda()
        layer.weight = nn.Parameter(torch.sparse.to_sparse_semi_structured(layer.weight.detach()), requires_grad=False)
        torch.testing.assert_close(layer(x.cuda()).detach().cpu(), wanted.detach(), rtol=2e-3, atol=2e-3)


class TestInt4Weights:
    @pytest.mark.parametrize("tiles", [2, 4, 8])
    @pytest.mark.parametrize("group", [32, 64, 256])
    def test_product(self, tiles: int, group: int) -> None:
        values = torch.randint(0, 16, (24, 256), generator=torch.Generator().manual_seed(tiles))
        x, scales_and_zeros = drawn(3, 256, dtype=torch.bfloat16), drawn(256 // group, 24, 2, dtype=torch.bfloat16)
        weights = (values[:, ::2] << 4 | values[:, 1::2]).to(torch.uint8).cuda()
        packed = torch._convert_weight_to_int4pack(weights, tiles)
        assert packed.shape == (3, 256 // (16 * tiles), 32, tiles // 2)
        assert packed.dtype == torch.int32
        scales, zeros = scales_and_zeros.float().repeat_interleave(group, 0).unbind(-1)
        wanted = x.float() @ ((values - 8) * scales.T + zeros.T).bfloat16().float().T
        actual = torch._weight_int4pack_mm(x.cuda(), packed, group, scales_and_zeros.cuda())
        torch.testing.assert_close(actual.cpu(), wanted.bfloat16())

    def test_layout_of_the_tensor_cores(self) -> None:
        weights = torch.zeros(8, 16, dtype=torch.uint8)
        weights[5, [2, 6, 10, 14]] = torch.tensor([0x12, 0x34, 0x56, 0x78], dtype=torch.uint8)
        packed = torch._convert_weight_to_int4pack(weights.cuda(), 2).cpu()
        # Thread 4 * 5 + 2 has row 5, and bytes 2, 6, 10, 14: their high halves from bit 0 on, their low halves from bit 16 on.
        assert packed[0, 0, 22, 0] == 0x86427531 - 2**32
        assert packed.count_nonzero() == 1

    def test_checks(self) -> None:
        x, weights = (
            torch.ones(2, 64, dtype=torch.bfloat16, device="cuda"),
            torch.zeros(8, 32, dtype=torch.uint8, device="cuda"),
        )
        scales = torch.ones(2, 8, 2, dtype=torch.bfloat16, device="cuda")
        packed = torch._convert_weight_to_int4pack(weights, 2)
        with pytest.raises(RuntimeError, match="Expected innerKTiles == 2"):
            torch._convert_weight_to_int4pack(weights, 3)
        with pytest.raises(RuntimeError, match=r"Expected A\.dtype"):
            torch._weight_int4pack_mm(x.half(), packed, 32, scales)
        with pytest.raises(RuntimeError, match="Expected qGroupSize == 32"):
            torch._weight_int4pack_mm(x, packed, 16, scales)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_triangular_solve_of_compressed_rows_refuses_half_types(dtype: torch.dtype) -> None:
    matrix, b = torch.eye(3, device="cuda"), torch.ones(3, 2, device="cuda")
    assert torch.triangular_solve(b, (2 * matrix).to_sparse_csr()).solution.tolist() == [[0.5, 0.5]] * 3
    with pytest.raises(NotImplementedError, match="triangular_solve_out_sparse_csr_cuda_impl"):
        torch.triangular_solve(b.to(dtype), matrix.to(dtype).to_sparse_csr())


class TestDropout:
    def test_fused(self) -> None:
        x = torch.ones(100, 100, device="cuda", requires_grad=True)
        torch.cuda.manual_seed(4)
        output, mask = torch._fused_dropout(x, 0.75)
        torch.cuda.manual_seed(4)
        assert torch.equal(torch._fused_dropout(x, 0.75)[0], output)
        assert mask.dtype == torch.uint8
        assert mask.float().mean().item() == pytest.approx(0.75, abs=0.02)
        assert torch.equal(output, mask / 0.75)
        output.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, mask / 0.75)

    def test_masked_scale(self) -> None:
        x, mask = drawn(3, 4), torch.tensor([0, 1, 1, 0], dtype=torch.uint8)
        actual = torch._masked_scale(x.cuda(), mask.expand(3, 4).contiguous().cuda(), 2.0)
        assert torch.equal(actual.cpu(), x * mask * 2)


class TestConvolutions:
    @pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": 2}])
    @pytest.mark.parametrize("dimensions", [2, 3])
    def test_depthwise(self, dimensions: int, options: dict[str, int]) -> None:
        convolve: Any = F.conv2d if dimensions == 2 else F.conv3d
        x, weight, bias = drawn(2, 4, *[7] * dimensions), drawn(8, 1, *[3] * dimensions), drawn(8)
        compare(lambda *tensors: convolve(*tensors, groups=4, **options), x, weight, bias)
        op: Any = torch._C._nn._conv_depthwise2d if dimensions == 2 else torch._C._nn.conv_depthwise3d
        lists = [[options.get(name, usual)] * dimensions for name, usual in (("stride", 1), ("padding", 0), ("dilation", 1))]
        actual = op(x.cuda(), weight.cuda(), [3] * dimensions, bias.cuda(), *lists)
        torch.testing.assert_close(actual.cpu(), convolve(x, weight, bias, groups=4, **options))

    def test_cudnn_convolutions(self) -> None:
        x, weight, bias, z = drawn(2, 4, 7, 7), drawn(6, 2, 3, 3), drawn(6), drawn(2, 6, 4, 4)
        here = [t.cuda() for t in (x, weight, bias, z)]
        plain = F.conv2d(x, weight, None, 2, 1, 1, 2)
        biased = F.conv2d(x, weight, bias, 2, 1, 1, 2)
        lists = ([1, 1], [2, 2], [1, 1])
        actual = [
            torch.cudnn_convolution(here[0], here[1], *lists, 2, False, False, False),
            torch.cudnn_convolution_relu(here[0], here[1], here[2], [2, 2], [1, 1], [1, 1], 2),
            torch.cudnn_convolution_add_relu(here[0], here[1], here[3], 0.5, here[2], [2, 2], [1, 1], [1, 1], 2),
        ]
        for mine, theirs in zip(actual, (plain, biased.relu(), (biased + 0.5 * z).relu()), strict=True):
            torch.testing.assert_close(mine.cpu(), theirs)
        turned = torch.cudnn_convolution_transpose(here[3], here[1], [1, 1], [0, 0], [2, 2], [1, 1], 2, False, False, False)
        torch.testing.assert_close(turned.cpu(), F.conv_transpose2d(z, weight, None, 2, 1, 0, 2))

    def test_cudnn_grid_sampler(self) -> None:
        def sample(x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
            if x.is_cuda:
                return torch.cudnn_grid_sampler(x, torch.cudnn_affine_grid_generator(theta, 2, 3, 5, 6))
            return F.grid_sample(x, F.affine_grid(theta, [2, 3, 5, 6], align_corners=True), align_corners=True)

        compare(sample, drawn(2, 3, 4, 4), drawn(2, 2, 3) * 0.3, tolerance=1e-4)


INTO = {
    "_conv_depthwise2d": lambda: (drawn(2, 4, 6, 6), drawn(8, 1, 3, 3), [3, 3], None, [1, 1], [1, 1], [1, 1]),
    "cudnn_convolution": lambda: (drawn(2, 4, 6, 6), drawn(8, 2, 3, 3), [1, 1], [1, 1], [1, 1], 2, False, False, False),
    "batch_norm_elemt": lambda: (drawn(2, 4, 6), drawn(4), drawn(4, seed=1), drawn(4, seed=2), drawn(4, seed=3).abs(), 1e-5),
}


@pytest.mark.parametrize("name", INTO)
@pytest.mark.parametrize("shape", [(0,), None], ids=["empty", "fitting"])
def test_out_argument_holds_the_result(name: str, shape: tuple[int, ...] | None) -> None:
    arguments = [value.cuda() if isinstance(value, torch.Tensor) else value for value in INTO[name]()]
    operation = getattr(aten, name)
    expected = operation(*arguments)
    out = torch.empty(expected.shape if shape is None else shape, device="cuda")
    assert operation.out(*arguments, out=out) is out
    assert torch.equal(out, expected)


@pytest.mark.parametrize("name", ["fft", "ifft2", "irfft", "rfft", "rfft2"])
def test_fourier_transforms_of_expanded_tensors(name: str) -> None:
    """Gradients of sums have stride 0, which the CPU's transforms refuse before torch 2.9."""
    function = getattr(torch.fft, name)
    element = torch.full((1, 1, 1), 2.0, dtype=torch.float32 if name.startswith("r") else torch.complex64)
    actual = function(element.cuda().expand(4, 4, 16))
    torch.testing.assert_close(actual.cpu(), function(element.repeat(4, 4, 16)))


def _running(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return weight.detach().clone(), weight.detach().abs()


_COMPUTED_AS_FLOAT: dict[str, Callable[..., Any]] = {
    "batch_norm": lambda x, w, b: torch.native_batch_norm(x, w, b, *_running(w), True, 0.3, 1e-5),
    "batch_norm_in_evaluation": lambda x, w, b: torch.native_batch_norm(x, w, b, *_running(w), False, 0.3, 1e-5),
    "batch_norm_without_parameters": lambda x, w, b: torch.native_batch_norm(x, None, None, None, None, True, 0.3, 1e-5),
    "layer_norm": lambda x, w, b: torch.native_layer_norm(x, (6,), w, b, 1e-5),
    "layer_norm_without_parameters": lambda x, w, b: torch.native_layer_norm(x, (6,), None, None, 1e-5),
    "grid": lambda x, w, b: aten.grid_sampler_2d(x[None, None], x[None, :, :2, None].expand(-1, -1, -1, 2) / 4, 0, 0, True),
    "grid_3d": lambda x, w, b: aten.grid_sampler_3d(
        x[None, None, None], x[None, :, :2, None, None].expand(-1, -1, -1, -1, 3) / 4, 0, 0, True
    ),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", _COMPUTED_AS_FLOAT)
def test_half_types_are_computed_as_float_and_rounded_once(name: str, dtype: torch.dtype) -> None:
    arguments = [drawn(48, 6, dtype=dtype), *(drawn(6, dtype=dtype, seed=seed) for seed in (1, 2))]

    def run(as_float: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        here = [(tensor.float() if as_float else tensor).cuda().requires_grad_() for tensor in arguments]
        outputs = tensors(_COMPUTED_AS_FLOAT[name](*here))
        weights = drawn(*outputs[0].shape, dtype=dtype, seed=9).to(outputs[0])
        gradients = torch.autograd.grad(outputs[0], here, weights, allow_unused=True)
        return outputs, [gradient for gradient in gradients if gradient is not None]

    (output, *statistics), gradients = run(as_float=False)
    (float_output, *float_statistics), float_gradients = run(as_float=True)
    assert torch.equal(output, float_output.to(dtype))
    torch.testing.assert_close(statistics, float_statistics)
    rounded = [gradient.to(dtype) for gradient in float_gradients]
    torch.testing.assert_close(gradients, rounded, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_batch_norm_updates_statistics_in_half_types(dtype: torch.dtype) -> None:
    x, mean, variance = drawn(8, 3, dtype=dtype), torch.zeros(3, dtype=dtype), torch.ones(3, dtype=dtype)
    here = mean.cuda(), variance.cuda()
    expected = mean.float(), variance.float()
    F.batch_norm(x.cuda(), *here, training=True, momentum=0.5)
    F.batch_norm(x.float(), *expected, training=True, momentum=0.5)
    torch.testing.assert_close([t.cpu() for t in here], [t.to(dtype) for t in expected])


def test_ctc_loss_does_not_use_cudnn() -> None:
    def loss(scores: torch.Tensor) -> torch.Tensor:
        # For int32 targets on the host and blank 0, torch would choose cuDNN.
        targets, lengths = torch.tensor([1, 2, 2, 1, 3, 2], dtype=torch.int32), torch.tensor([3, 3], dtype=torch.int32)
        frames = torch.full((2,), 7, dtype=torch.int32)
        with torch.backends.cudnn.flags(enabled=True):
            return F.ctc_loss(scores.log_softmax(-1), targets, frames, lengths)

    compare(loss, drawn(7, 2, 4))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("_to_sparse_semi_structured", ((32, 32),)),
        ("_triton_scaled_dot_attention", ((1, 1, 4, 4), (1, 1, 4, 4), (1, 1, 4, 4))),
    ],
)
def test_error_names_op(name: str, arguments: tuple[tuple[int, ...], ...]) -> None:
    tensors = [torch.ones(shape, dtype=torch.half, device="cuda") for shape in arguments]
    with pytest.raises(NotImplementedError, match=f"aten::{name} is not simulated"):
        getattr(aten, name)(*tensors)


@pytest.mark.parametrize("include_last_offset", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bags_return_the_indices_of_cuda(mode: str, include_last_offset: bool) -> None:
    """The backward reads them, and their sizes count: they differ from the CPU's."""
    indices, offsets = torch.tensor([1, 5, 2, 2, 7, 0]), torch.tensor([0, 2, 2, 5, 6] if include_last_offset else [0, 2, 2, 5])

    def function(weight: torch.Tensor) -> torch.Tensor:
        there = indices.to(weight.device), offsets.to(weight.device)
        return F.embedding_bag(there[0], weight, there[1], mode=mode, include_last_offset=include_last_offset)

    for found, expected in zip(*(results(function, [drawn(8, 4)], device) for device in ("cuda", "cpu")), strict=True):
        torch.testing.assert_close(found, expected)
    number = ["sum", "mean", "max"].index(mode)
    arguments = drawn(8, 4).cuda(), indices.cuda(), offsets.cuda(), False, number, False, None, include_last_offset
    _, bags, sizes, maxima = aten._embedding_bag(*arguments)
    assert bags.tolist() == [0, 0, 2, 2, 2, 3]
    assert (sizes.shape, maxima.shape) == (offsets.shape, (4, 4) if mode == "max" else (0,))
