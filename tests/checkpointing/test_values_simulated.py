"""Tests of values on simulated GPUs: equal to those without checkpoints, bit by bit, and close to those of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accelerator import checkpointing
from accelerator.checkpointing import transfers
from tests.support.checkpointing_cases import OURS, Checkpoint, Drops, none
from tests.support.checkpointing_memory import MANY, MODES

LAYERS, ROWS, WIDTH = 4, 6, 8
CASTS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Relative tolerances: a GPU and the CPU sum products in different orders, which changes the last bits.
CLOSE = {"float32": 1e-5, "bfloat16": 0.06, "float16": 0.01}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: torch.Tensor, drop: Callable[[torch.Tensor], torch.Tensor], *, extras: dict[str, Any]) -> torch.Tensor:
        h = h + drop(self.down(torch.tanh(self.first(h)))) * extras["scale"][0]
        return drop(h).sin()


def gradients(ckpt: Checkpoint, device: str, cast: torch.dtype | None, drops: Drops) -> list[torch.Tensor]:
    """Return the outputs and all gradients of two iterations."""
    torch.manual_seed(2)
    layers = [Layer().to(device) for _ in range(LAYERS)]
    generator = torch.Generator().manual_seed(3)
    results: list[torch.Tensor] = []
    for _ in range(2):
        x = torch.randn(ROWS, WIDTH, generator=generator).to(device).requires_grad_()
        scale = torch.randn(WIDTH, generator=generator).to(device).requires_grad_()
        with torch.autocast(device.partition(":")[0], dtype=cast, enabled=cast is not None):
            h = x * 1
            for layer in layers:
                h = ckpt(layer, h, drops, extras={"scale": [scale, None]})
        h.float().square().sum().backward()
        parameters = [p for layer in layers for p in layer.parameters()]
        results += [h.detach(), *[p.grad.clone() for p in (x, scale, *parameters) if p.grad is not None]]
    assert len(results) == 2 * (3 + 4 * LAYERS)
    return results


@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=pytest.mark.slow), "cuda:1"])
@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ckpt", OURS, ids=["checkpoint", "non_reentrant"])
def test_gradients_under_dropout_and_autocast(ckpt: Checkpoint, mode: str, cast: str, device: str) -> None:
    dtype, plain = CASTS[cast], Drops()
    expected = gradients(none, device, dtype, plain)
    checkpointing.configure(**{**MODES[mode], **({"num_checkpoints": LAYERS} if "contiguous" in mode else {})})
    drops = Drops()
    results = gradients(ckpt, device, dtype, drops)
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
    # A layer draws two masks in forward, and the same two in its recomputation.
    assert len(drops.masks) == 2 * len(plain.masks) == 8 * LAYERS
    if dtype is not None and not torch.amp.is_autocast_available("cpu"):
        return
    onto_cpu = gradients(none, "cpu", dtype, Drops(plain.masks))
    for index, (one, other) in enumerate(zip(results, onto_cpu, strict=True)):
        scale = max(float(other.abs().max()), 1e-3)
        assert float((one.cpu().float() - other.float()).abs().max()) <= CLOSE[cast] * scale, f"value {index}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("numel", [1, 100, 4099])
def test_offloaded_bytes_are_restored(numel: int, dtype: torch.dtype) -> None:
    original = torch.randn(numel, generator=torch.Generator().manual_seed(4)).to(dtype)
    source = original.cuda()
    host = transfers.allocate(numel, dtype, source.device, True)
    host.fill_(-1)
    moved = transfers.Offloaded(source, host)
    torch.cuda.synchronize()
    assert torch.equal(host.view(torch.uint8), original.view(torch.uint8))
    assert moved.fetch() is source
    # From here on, only the host memory has the values.
    source.fill_(-2)
    for _ in range(2):
        back = moved.fetch()
        assert back.data_ptr() != source.data_ptr()
        assert torch.equal(back.cpu().view(torch.uint8), original.view(torch.uint8))
        back.fill_(-3)


@pytest.mark.parametrize("mode", [mode for mode in MODES if "cpu" in mode])
def test_offloaded_inputs_and_gradients_are_equal(mode: str) -> None:
    checkpointing.configure(**{**MODES[mode], **({"num_checkpoints": LAYERS} if "contiguous" in mode else {})})
    x = torch.linspace(0, 1, 1000, device="cuda").requires_grad_()
    received: list[torch.Tensor] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        received.append(h.detach().clone())
        return h.sin().exp()

    h = x * 1
    for _ in range(LAYERS):
        h = checkpointing.checkpoint(function, h)
    h.sum().backward()
    reference = torch.linspace(0, 1, 1000, device="cuda").requires_grad_()
    h = reference * 1
    for _ in range(LAYERS):
        h = h.sin().exp()
    h.sum().backward()
    assert x.grad is not None
    assert reference.grad is not None
    assert torch.equal(x.grad, reference.grad)
    # Recomputation receives the same inputs as forward, in reverse order.
    assert all(torch.equal(*pair) for pair in zip(received[:LAYERS], reversed(received[LAYERS:]), strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_many_checkpoints_are_close_to_the_cpu(mode: str) -> None:
    checkpointing.configure(**MODES[mode])
    start = torch.linspace(0.1, 0.9, 64)
    x = start.cuda().requires_grad_()
    total = torch.zeros(64, dtype=torch.float64, device="cuda")
    for index in range(MANY):
        h = x * (1 + index % 7)
        for _ in range(2):
            h = checkpointing.checkpoint(lambda h: h.sin().exp(), h)
        h.sum().backward()
        assert x.grad is not None
        total += x.grad
        x.grad = None
    reference = torch.zeros(64, dtype=torch.float64)
    for factor in range(7):
        y = start.clone().requires_grad_()
        h = (y * (1 + factor)).sin().exp().sin().exp()
        reference += torch.autograd.grad(h.sum(), y)[0].double() * len(range(factor, MANY, 7))
    assert torch.allclose(total.cpu(), reference, rtol=1e-5, atol=0)
