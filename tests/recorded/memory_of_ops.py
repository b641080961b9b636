"""``python -m tests.recorded.memory_of_ops FILE [TYPE]``: the memory that ops on large tensors take, forward and backward.

Run it on a GPU to record its figures, or on a simulated one to compare them. The file has, by the name of an op and for each
type: bytes allocated after the forward, their peak in it, and the same two for the backward if there is one.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

FIGURES = ("allocated_bytes.all.current", "allocated_bytes.all.peak")
RUNS = 2  # the first one may load a kernel's library
DTYPES = ("float32", "bfloat16")
REDUCTIONS = ("mean", "sum", "none")
# Channels, output channels, size of the kernel, stride, padding and groups.
CONVOLUTIONS = (
    *((64, 64, 3, 1, 1, 1), (64, 128, 3, 2, 1, 1), (64, 64, 1, 1, 0, 1), (64, 64, 7, 2, 3, 1), (64, 64, 3, 1, 1, 64)),
    *((64, 64, 5, 1, 2, 64), (64, 64, 3, 1, 1, 8), (64, 256, 1, 1, 0, 1), (64, 32, 4, 4, 0, 1), (64, 64, 16, 16, 0, 1)),
)


class Case(NamedTuple):
    """A call, and how to make its arguments: those that require gradients get them in the backward."""

    name: str
    make: Callable[[], tuple[Any, ...]]
    call: Callable[..., Any]


def floats(*shape: int, dtype: torch.dtype, requires_grad: bool = True) -> torch.Tensor:
    return torch.rand(*shape, device="cuda").to(dtype).requires_grad_(requires_grad)


def integers(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, device="cuda")


def elementwise_and_reductions(dtype: torch.dtype) -> Iterator[Case]:
    matrix = partial(floats, 1000, 1003, dtype=dtype)
    for name in ("softmax", "log_softmax", "cumsum", "cumprod", "logsumexp", "logcumsumexp"):
        for dim in (0, 1):
            yield Case(f"{name} dim {dim}", lambda: (matrix(),), partial(getattr(torch, name), dim=dim))
    reductions = "sum mean prod amax var std median nanmedian norm any all argmax max nansum count_nonzero nanmean"
    for name in (*reductions.split(), "nonzero", "isfinite", "sort", "erfinv"):
        yield Case(name, lambda: (matrix(),), getattr(torch, name))
    for dim in (0, 1):
        for name in ("sum", "amax", "var", "median", "sort", "argsort", "max", "mode", "cummax"):
            yield Case(f"{name} dim {dim}", lambda: (matrix(),), partial(getattr(torch, name), dim=dim))
        for name in ("kthvalue", "topk"):
            yield Case(f"{name} dim {dim}", lambda: (matrix(),), partial(getattr(torch, name), k=5, dim=dim))
        yield Case(f"norm dim {dim}", lambda: (matrix(),), partial(torch.norm, dim=dim))
    activations = "gelu silu relu mish softplus hardswish glu logsigmoid dropout alpha_dropout rrelu elu leaky_relu normalize"
    for name in (*activations.split(), "gumbel_softmax"):
        yield Case(name, lambda: (floats(1000, 1004, dtype=dtype),), getattr(F, name))


def losses(dtype: torch.dtype, reduction: str) -> Iterator[Case]:
    names = "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div"
    for name in (*names.split(), "soft_margin_loss", "poisson_nll_loss", "multilabel_soft_margin_loss"):

        def pair() -> tuple[torch.Tensor, torch.Tensor]:
            return floats(1000, 1003, dtype=dtype), floats(1000, 1003, dtype=dtype, requires_grad=False)

        yield Case(f"{name} {reduction}", pair, partial(getattr(F, name), reduction=reduction))
    entropy = partial(F.cross_entropy, reduction=reduction)
    yield Case(f"cross_entropy {reduction}", lambda: (floats(2048, 32000, dtype=dtype), integers(32000, 2048)), entropy)
    yield Case(
        f"cross_entropy smooth {reduction}",
        lambda: (floats(512, 32000, dtype=dtype), integers(32000, 512)),
        partial(entropy, label_smoothing=0.1),
    )
    yield Case(
        f"cross_entropy probs {reduction}",
        lambda: (floats(512, 3200, dtype=dtype), floats(512, 3200, dtype=dtype, requires_grad=False)),
        entropy,
    )
    yield Case(
        f"nll2d {reduction}",
        lambda: (floats(8, 20, 128, 128, dtype=dtype), integers(20, 8, 128, 128)),
        partial(F.nll_loss, reduction=reduction),
    )


def norms_and_pictures(dtype: torch.dtype, channels_last: bool) -> Iterator[Case]:
    def picture() -> torch.Tensor:
        x = floats(16, 64, 64, 64, dtype=dtype)
        return x.detach().contiguous(memory_format=torch.channels_last).requires_grad_() if channels_last else x

    def normalized() -> tuple[torch.Tensor, ...]:
        weights = floats(64, dtype=torch.float32), floats(64, dtype=torch.float32)
        return picture(), torch.zeros(64, device="cuda"), torch.ones(64, device="cuda"), *weights

    suffix = " channels_last" if channels_last else ""
    yield Case(f"batch_norm{suffix}", normalized, partial(F.batch_norm, training=True))
    yield Case(f"batch_norm eval{suffix}", normalized, F.batch_norm)
    sized = {"max_pool2d": 2, "avg_pool2d": 2, "adaptive_avg_pool2d": 7, "adaptive_max_pool2d": 7, "pixel_shuffle": 2}
    for name, size in {**sized, "pixel_unshuffle": 2}.items():
        yield Case(f"{name}{suffix}", lambda: (picture(),), lambda x, name=name, size=size: getattr(F, name)(x, size))
    for mode in ("nearest", "bilinear", "bicubic", "area"):
        yield Case(f"interpolate {mode}{suffix}", lambda: (picture(),), partial(F.interpolate, scale_factor=2, mode=mode))
    smaller = partial(F.interpolate, scale_factor=0.5, mode="bilinear", antialias=True)
    yield Case(f"interpolate aa{suffix}", lambda: (picture(),), smaller)
    for convolution in CONVOLUTIONS:
        channels, outputs, size, stride, padding, groups = convolution
        call = partial(F.conv2d, stride=stride, padding=padding, groups=groups)

        def weight(outputs: int = outputs, inputs: int = channels // groups, size: int = size) -> torch.Tensor:
            return floats(outputs, inputs, size, size, dtype=dtype)

        def bias(outputs: int = outputs) -> torch.Tensor:
            return floats(outputs, dtype=dtype)

        yield Case(f"conv2d {convolution}{suffix}", lambda weight=weight: (picture(), weight()), call)
        yield Case(f"conv2d bias {convolution}{suffix}", lambda weight=weight, bias=bias: (picture(), weight(), bias()), call)


def norms_and_folds(dtype: torch.dtype) -> Iterator[Case]:
    def make(*shape: int, scales: int, width: int) -> tuple[torch.Tensor, ...]:
        return floats(*shape, dtype=dtype), *(floats(width, dtype=dtype) for _ in range(scales))

    rows, picture = partial(make, 4096, 1024, width=1024), partial(make, 16, 64, 64, 64, width=64)
    yield Case("layer_norm", partial(rows, scales=2), lambda x, *scales: F.layer_norm(x, (1024,), *scales))
    yield Case("rms_norm", partial(rows, scales=1), lambda x, scale: F.rms_norm(x, (1024,), scale))
    yield Case("group_norm", partial(picture, scales=2), lambda x, *scales: F.group_norm(x, 8, *scales))
    yield Case("instance_norm", partial(picture, scales=0), F.instance_norm)
    yield Case("unfold", lambda: (floats(8, 16, 64, 64, dtype=dtype),), partial(F.unfold, kernel_size=3))
    yield Case("fold", lambda: (floats(8, 144, 62 * 62, dtype=dtype),), partial(F.fold, output_size=64, kernel_size=3))


def linear(dtype: torch.dtype) -> Iterator[Case]:
    for rows, inputs, outputs in ((1024, 1024, 1024), (4096, 768, 3072), (8, 4096, 4096), (1, 4096, 32000)):

        def make(*, bias: bool, rows: int = rows, inputs: int = inputs, outputs: int = outputs) -> tuple[torch.Tensor, ...]:
            weights = floats(rows, inputs, dtype=dtype), floats(outputs, inputs, dtype=dtype)
            return (*weights, floats(outputs, dtype=dtype)) if bias else weights

        yield Case(f"linear {rows, inputs, outputs}", partial(make, bias=True), F.linear)
        yield Case(f"linear nobias {rows, inputs, outputs}", partial(make, bias=False), F.linear)
    square = partial(floats, 1024, 1024, dtype=dtype)
    yield Case("linear gelu", lambda: (square(), square(), floats(1024, dtype=dtype)), lambda *all: F.gelu(F.linear(*all)))
    yield Case("bmm", lambda: (floats(64, 256, 64, dtype=dtype), floats(64, 64, 256, dtype=dtype)), torch.bmm)
    yield Case("addmm", lambda: (square(), square(), square()), torch.addmm)


def attention(dtype: torch.dtype) -> Iterator[Case]:
    attend = F.scaled_dot_product_attention
    for features in (64, 80, 128, 256):
        make = partial(floats, 2, 8, 512, features, dtype=dtype)
        for options in ({}, {"is_causal": True}, {"dropout_p": 0.1}):
            yield Case(f"sdpa {features} {options}", lambda make=make: (make(), make(), make()), partial(attend, **options))
    make = partial(floats, 2, 8, 512, 64, dtype=dtype)
    mask = partial(floats, 2, 1, 512, 512, dtype=dtype, requires_grad=False)
    yield Case("sdpa mask", lambda: (make(), make(), make(), mask()), attend)
    yield Case("sdpa boolmask", lambda: (make(), make(), make(), mask() > 0.1), attend)


def lookups(dtype: torch.dtype) -> Iterator[Case]:
    yield Case("embedding", lambda: (integers(32000, 8, 512), floats(32000, 512, dtype=dtype)), F.embedding)
    yield Case("embedding small", lambda: (integers(1000, 64), floats(1000, 512, dtype=dtype)), F.embedding)
    yield Case("embedding_bag", lambda: (integers(1000, 512, 20), floats(1000, 512, dtype=dtype)), F.embedding_bag)
    yield Case("index", lambda: (floats(10000, 128, dtype=dtype), integers(10000, 50000)), lambda x, at: x[at])


def recurrent(dtype: torch.dtype) -> Iterator[Case]:
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        for width, batch, steps in ((256, 16, 64), (512, 32, 100)):

            def make(kind: Any = kind, width: int = width, batch: int = batch, steps: int = steps) -> tuple[Any, ...]:
                return kind(width, width, 2).cuda().to(dtype), floats(steps, batch, width, dtype=dtype)

            yield Case(f"{kind.__name__} {width}", make, lambda model, x: model(x)[0])


def optimizers() -> Iterator[Case]:
    options: tuple[dict[str, bool], ...] = ({}, {"foreach": True}, {"fused": True})
    for name in ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad", "Adafactor"):
        for option in options[: 3 if name in ("Adam", "AdamW", "SGD") else 2]:
            chosen = {**option, **({"lr": 0.1, "momentum": 0.9} if name == "SGD" else {})}

            def make(name: str = name, chosen: dict[str, Any] = chosen) -> tuple[Any, ...]:
                parameters = [floats(1024, 512, dtype=torch.float32) for _ in range(12)]
                return getattr(torch.optim, name)(parameters, **chosen), parameters

            yield Case(f"optim {name} {option}", make, step)


def step(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def cases(dtype: torch.dtype) -> Iterator[Case]:
    yield from (*elementwise_and_reductions(dtype), *norms_and_folds(dtype), *linear(dtype), *attention(dtype))
    yield from lookups(dtype)
    for reduction in REDUCTIONS:
        yield from losses(dtype, reduction)
    for channels_last in (False, True):
        yield from norms_and_pictures(dtype, channels_last)
    if dtype == torch.float32:
        yield from (*recurrent(dtype), *optimizers())


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for each in value for tensor in tensors(each)] if isinstance(value, (tuple, list)) else []


def changes(function: Callable[[], Any]) -> tuple[Any, list[int]]:
    """Call a function. Return its result, and how the figures changed."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    result = function()
    after = torch.cuda.memory_stats()
    return result, [after.get(name, 0) - before.get(name, 0) for name in FIGURES]


def measure(case: Case) -> list[int]:
    gc.collect()
    torch.manual_seed(0)
    arguments = case.make()
    figures: list[int] = []
    for _ in range(RUNS):
        for tensor in tensors(arguments):
            tensor.grad = None
        result, figures = changes(lambda: case.call(*arguments))
        outputs = [tensor for tensor in tensors(result) if tensor.requires_grad]
        if outputs:
            gradients = [torch.ones_like(output) for output in outputs]
            figures += changes(partial(torch.autograd.backward, outputs, gradients))[1]
        del result, outputs
    return figures


def main() -> None:
    file, *dtypes = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.autograd.set_multithreading_enabled(False)  # else another thread frees memory after the backward
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # the workspace of cuBLAS
    figures: dict[str, list[list[int]]] = {}
    for dtype in dtypes or DTYPES:
        for case in cases(getattr(torch, dtype)):
            figures.setdefault(case.name, []).append(measure(case))
    rows = [f"{json.dumps(name)}: {json.dumps(of_types)}" for name, of_types in sorted(figures.items())]
    # A line of the file has 128 characters at most, as one of the sources.
    lines = [row if len(row) <= 125 else row.replace("], [", "],\n    [") for row in rows]
    Path(file).write_text("{\n  " + ",\n  ".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
