"""Cases from PyTorch's tests of checkpoints on GPUs, run with our checkpoints and with torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.checkpointing_cases import EVERYONE, Checkpoint, none, torchs

everyone = pytest.mark.parametrize("ckpt", EVERYONE, ids=["checkpoint", "non_reentrant", "torch"])


def held_along_backward(ckpt: Checkpoint, retain: bool) -> list[int]:
    """Return the allocated bytes at each step of a backward."""
    x = torch.zeros(1 << 16, device="cuda", requires_grad=True)
    x.grad = torch.zeros_like(x)
    held: list[int] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            h = h**2
            h.register_hook(lambda gradient: held.append(torch.cuda.memory_allocated()))
        return (h**2).sum()

    before = torch.cuda.memory_allocated()
    ckpt(function, x).backward(retain_graph=retain)
    return [each - before for each in held]


@everyone
@pytest.mark.parametrize("retain", [False, True])
def test_backward_frees_what_it_has_used(ckpt: Checkpoint, retain: bool) -> None:
    # Without checkpoints, a retained graph frees nothing.
    assert len(set(held_along_backward(none, True))) == 1
    results = held_along_backward(ckpt, retain)
    # The recomputation registers hooks too, but no backward runs through its graph.
    assert len(results) == 3
    assert results == sorted(set(results), reverse=True)


@everyone
def test_checkpoints_save_memory(ckpt: Checkpoint) -> None:
    def peak(ckpt: Checkpoint) -> int:
        layers = [nn.Sequential(*(nn.Linear(64, 64, device="cuda") for _ in range(3))) for _ in range(8)]
        for layer in layers:
            for parameter in layer.parameters():
                parameter.grad = torch.ones_like(parameter)
        h = torch.randn(100, 64, device="cuda", requires_grad=True).clone()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for layer in layers:
            h = ckpt(layer, h)
        h.sum().backward()
        return torch.cuda.max_memory_allocated() - before

    peak(none)  # the first products allocate cuBLAS's workspaces
    assert peak(ckpt) < peak(none) / 2
    assert peak(ckpt) <= peak(torchs)


@everyone
def test_around_data_parallel(ckpt: Checkpoint) -> None:
    model = nn.Linear(4, 4, bias=False, device="cuda")
    x = torch.randn(6, 4, device="cuda", requires_grad=True)

    def gradients(ckpt: Checkpoint, module: nn.Module) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(ckpt(module, x).sin().sum(), (x, *model.parameters()))

    expected = gradients(none, model)
    for one, other in zip(gradients(ckpt, nn.DataParallel(model)), expected, strict=True):
        torch.testing.assert_close(one, other)


@everyone
def test_dropout_draws_the_same_again(ckpt: Checkpoint) -> None:
    def gradient(ckpt: Checkpoint) -> torch.Tensor:
        torch.cuda.manual_seed(5)
        x = torch.ones(2000, device="cuda", requires_grad=True)
        (results,) = torch.autograd.grad(ckpt(lambda h: nn.functional.dropout(h).sin(), nn.functional.dropout(x)).sum(), x)
        return results

    assert torch.equal(gradient(none), gradient(ckpt))


@everyone
def test_what_a_device_in_force_made_is_made_there_again(ckpt: Checkpoint) -> None:
    if ckpt is torchs and torch.__version__ < "2.15":
        pytest.skip("torch of old recomputes under the device in force in backward")
    places: list[str] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        made = torch.ones(4)
        places.append(str(made.device))
        return h * made

    x = torch.ones(4, device="cuda", requires_grad=True)
    with torch.device("cuda"):
        out = ckpt(function, x)
    out.sum().backward()
    assert places == ["cuda:0", "cuda:0"]
