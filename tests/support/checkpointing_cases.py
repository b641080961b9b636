"""Cases whose results must be equal, bit by bit, with and without checkpoints."""

from __future__ import annotations

import functools
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from accelerator import checkpointing

Checkpoint = Callable[..., Any]
Pair = namedtuple("Pair", "first second")


def none(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def torch_non_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs:
        return torch_checkpoint.checkpoint(lambda *inputs: function(*inputs, **kwargs), *args, use_reentrant=False)
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)


OURS = [checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint]
ALL_CHECKPOINTS = [*OURS, torch_non_reentrant]
# Whether our checkpoints respect ``set_checkpoint_early_stop(True)``. They do not if True is torch's default, as in torch 2.6.
RESPECTS_EARLY_STOP = torch.__version__ >= "2.13" or torch_checkpoint._enable_checkpoint_early_stop is None


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*(shape or (4,)), generator=torch.Generator().manual_seed(seed)).requires_grad_()


def selective(ckpt: Checkpoint, what: Any, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Run a selective checkpoint, torch's or ours. The options are those of ``create_selective_checkpoint_contexts``."""
    contexts = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, what, **options)
    if ckpt is torch_non_reentrant:
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=contexts)
    checkpointing.configure(context_fn=contexts)
    return ckpt(function, *args)


class Block(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.3) -> None:
        super().__init__()
        self.expand = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.dropout(self.down(torch.nn.functional.gelu(self.expand(x)))))


class Drops:
    """Dropout that records its masks, or applies recorded masks: a CPU and a GPU draw different random numbers."""

    def __init__(self, recorded: list[torch.Tensor] | None = None) -> None:
        self.masks: list[torch.Tensor] = []
        self.recorded = iter(recorded) if recorded is not None else None

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        if self.recorded is not None:
            return h * next(self.recorded).to(h)
        mask = torch.nn.functional.dropout(torch.ones_like(h), 0.4).detach()
        self.masks.append(mask.float().cpu())
        return h * mask


def x(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (3, 8)), generator=generator, requires_grad=True)


# Each case takes the checkpoint function to use and returns the values that must be equal.


def case_block(ckpt: Checkpoint) -> list[torch.Tensor]:
    torch.manual_seed(1)
    blocks, h = [Block() for _ in range(3)], x()
    out = h
    for block in blocks:
        out = ckpt(block, out)
    out.square().sum().backward()
    return [out, h.grad, *[p.grad for block in blocks for p in block.parameters()], torch.rand(3)]


def case_autograd_grad(ckpt: Checkpoint) -> list[torch.Tensor]:
    torch.manual_seed(1)
    block, h = Block(), x()
    return list(torch.autograd.grad(ckpt(block, h).sum(), [h, *block.parameters()]))


def case_gradient_of_one_input(ckpt: Checkpoint) -> list[torch.Tensor]:
    a, b = x(), x(seed=1)
    out = ckpt(lambda a, b: (a * b).sin() * b, a, b)
    first = torch.autograd.grad(out.sum(), a, retain_graph=True)
    second = torch.autograd.grad(out.sum(), b)
    return [*first, *second]


def case_retain_graph(ckpt: Checkpoint) -> list[torch.Tensor]:
    torch.manual_seed(1)
    block, h = Block(), x()
    out = ckpt(block, h).sum()
    out.backward(retain_graph=True)
    once = h.grad.clone()
    out.backward()
    return [once, h.grad]


def case_double_backward(ckpt: Checkpoint) -> list[torch.Tensor]:
    h = x()
    out = ckpt(lambda h: (h.sin() * h.exp()).sum(), h)
    (first,) = torch.autograd.grad(out, h, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), h)
    return [first, second]


def case_keywords(ckpt: Checkpoint) -> list[torch.Tensor]:
    a, b = x(), x(seed=1)
    out = ckpt(lambda a, *, scale, other: a.sin() * scale + other.exp(), a, scale=3, other=b)
    out.sum().backward()
    return [out, a.grad, b.grad]


def case_nested_structures(ckpt: Checkpoint) -> list[torch.Tensor]:
    a, b, c, d = (x(seed=i) for i in range(4))

    def function(pair: Any, table: Any, named: Any) -> Any:
        return pair[0].sin() * table["b"][0].cos() + named.first.exp() * table["more"]["d"]

    out = ckpt(function, [a, "ignored"], {"b": (b, None), "more": OrderedDict(d=d)}, Pair(c, 2))
    out.sum().backward()
    return [out, a.grad, b.grad, c.grad, d.grad]


def case_same_tensor_twice(ckpt: Checkpoint) -> list[torch.Tensor]:
    a = x()
    out = ckpt(lambda p, q, r: p.sin() * q.cos() + r[0], a, a, [a])
    out.sum().backward()
    return [out, a.grad]


def case_nested_checkpoints(ckpt: Checkpoint) -> list[torch.Tensor]:
    torch.manual_seed(1)
    inner, middle, h = Block(), Block(), x()

    def level_two(h: torch.Tensor) -> torch.Tensor:
        return ckpt(middle, ckpt(inner, h).sin()).cos()

    def level_one(h: torch.Tensor) -> torch.Tensor:
        return ckpt(level_two, h * 2).exp()

    out = ckpt(level_one, h)
    out.sum().backward()
    return [out, h.grad, *[p.grad for p in [*inner.parameters(), *middle.parameters()]], torch.rand(2)]


def case_gradient_inside(ckpt: Checkpoint) -> list[torch.Tensor]:
    h = x()

    def function(h: torch.Tensor) -> torch.Tensor:
        y = h.sin()
        (inside,) = torch.autograd.grad(y.exp().sum(), h, create_graph=True)
        return inside * y.cos()

    out = ckpt(function, h)
    out.sum().backward()
    return [out, h.grad]


def case_gradient_inside_frees_graph(ckpt: Checkpoint) -> list[torch.Tensor]:
    h = x()

    def function(h: torch.Tensor) -> torch.Tensor:
        (inside,) = torch.autograd.grad(h.sin().cos().sum(), h)
        return h.cos() * inside

    out = ckpt(function, h)
    out.sum().backward()
    return [out, h.grad]


def case_closure(ckpt: Checkpoint) -> list[torch.Tensor]:
    a, weight = x().detach(), x(seed=2)
    out = ckpt(lambda a: (a * weight).tanh(), a)
    out.sum().backward()
    return [out, weight.grad]


def case_outputs(ckpt: Checkpoint) -> list[torch.Tensor]:
    a, b = x(), x(seed=1)
    out = ckpt(lambda a, b: (a.sin(), {"b": [b.exp(), None]}, 3, (a > 0)), a, b)
    assert isinstance(out, tuple)
    assert out[1]["b"][1] is None
    assert out[2] == 3
    assert out[3].dtype is torch.bool
    (out[0].sum() + out[1]["b"][0].sum()).backward()
    return [out[0], a.grad, b.grad]


def case_output_is_input(ckpt: Checkpoint) -> list[torch.Tensor]:
    a = x()
    out = ckpt(lambda a: (a, a.sin()), a)
    (out[0] * out[1]).sum().backward()
    return [out[0], out[1], a.grad]


def case_views(ckpt: Checkpoint) -> list[torch.Tensor]:
    a = x(4, 6)
    out = ckpt(lambda v, w, e: (v.sin() @ w.cos()) * e, a.t(), a[:, ::2], a[0, 0].expand(6, 3))
    out.sum().backward()
    return [out, a.grad]


def case_autocast(ckpt: Checkpoint) -> list[torch.Tensor]:
    torch.manual_seed(1)
    block, h = Block(), x()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ckpt(block, h)
    out.float().sum().backward()
    return [out, h.grad, *[p.grad for p in block.parameters()]]


def case_autocast_only_in_backward(ckpt: Checkpoint) -> list[torch.Tensor]:
    torch.manual_seed(1)
    block, h = Block(), x()
    out = ckpt(block, h)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out.sum().backward()
    return [h.grad, *[p.grad for p in block.parameters()]]


def case_autocast_inside(ckpt: Checkpoint) -> list[torch.Tensor]:
    torch.manual_seed(1)
    block, h = Block(), x()

    def function(h: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = block(h)
        return block(h.float())

    out = ckpt(function, h)
    out.sum().backward()
    return [out, h.grad]


def case_default_device(ckpt: Checkpoint) -> list[torch.Tensor]:
    h = x()
    with torch.device("cpu"):
        out = ckpt(lambda h: h.sin() * torch.ones(8), h)
    out.sum().backward()
    return [out, h.grad]


def case_saved_on_cpu(ckpt: Checkpoint) -> list[torch.Tensor]:
    torch.manual_seed(1)
    block, h = Block(), x()
    with torch.autograd.graph.save_on_cpu():
        out = ckpt(block, h)
    out.sum().backward()
    return [out, h.grad]


def case_custom_function(ckpt: Checkpoint) -> list[torch.Tensor]:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(h)
            return h**3

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            (h,) = ctx.saved_tensors
            return gradients[0] * 3 * h**2

    h = x()
    out = ckpt(lambda h: Cube.apply(h.sin()).cos(), h)
    out.sum().backward()
    return [out, h.grad]


def case_batch_norm(ckpt: Checkpoint) -> list[torch.Tensor]:
    torch.manual_seed(1)
    norm, h = nn.BatchNorm1d(8), x()
    out = ckpt(lambda h: norm(h).exp(), h)
    out.sum().backward()
    return [out, h.grad]


def case_detached_part(ckpt: Checkpoint) -> list[torch.Tensor]:
    a = x()
    out = ckpt(lambda a: a.sin() * a.detach().exp(), a)
    out.sum().backward()
    return [out, a.grad]


def case_integers_and_masks(ckpt: Checkpoint) -> list[torch.Tensor]:
    embedding, tokens = nn.Embedding(10, 4), torch.tensor([[1, 2], [3, 4]])
    with torch.no_grad():
        embedding.weight.copy_(torch.arange(40.0).view(10, 4))
    out = ckpt(lambda tokens, mask, text: embedding(tokens).sin().masked_fill(mask, 0), tokens, torch.eye(2, 4) > 0, "x")
    out.sum().backward()
    return [out, embedding.weight.grad]


def case_inference_input(ckpt: Checkpoint) -> list[torch.Tensor]:
    with torch.inference_mode():
        mask = torch.ones(8)
    a = x()
    out = ckpt(lambda a, mask: a.sin() * mask.clone(), a, mask)
    out.sum().backward()
    return [out, a.grad]


CASES = {name: value for name, value in list(globals().items()) if name.startswith("case_")}
# torch's checkpoint saves its arguments for backward, which torch forbids for inference tensors.
UNSUPPORTED_BY_TORCH = {"case_inference_input"}
