"""Cases from PyTorch's tests of checkpoints on GPUs, run with our checkpoints and with torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.checkpointing_cases import ALL_CHECKPOINTS, Checkpoint, none, torch_non_reentrant

all_checkpoints = pytest.mark.parametrize("ckpt", ALL_CHECKPOINTS, ids=["checkpoint", "non_reentrant", "torch"])


def allocated_during_backward(ckpt: Checkpoint, retain: bool) -> list[int]:
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


@all_checkpoints
@pytest.mark.parametrize("retain", [False, True])
def test_backward_frees_used_tensors(ckpt: Checkpoint, retain: bool) -> None:
    # Without checkpoints, a retained graph frees nothing.
    assert len(set(allocated_during_backward(none, True))) == 1
    results = allocated_during_backward(ckpt, retain)
    # The recomputation registers hooks too, but no backward runs through its graph.
    assert len(results) == 3
    assert results == sorted(set(results), reverse=True)


@all_checkpoints
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
    assert peak(ckpt) <= peak(torch_non_reentrant)


@all_checkpoints
def test_checkpoint_of_a_data_parallel_module(ckpt: Checkpoint) -> None:
    model = nn.Linear(4, 4, bias=False, device="cuda")
    x = torch.randn(6, 4, device="cuda", requires_grad=True)

    def gradients(ckpt: Checkpoint, module: nn.Module) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(ckpt(module, x).sin().sum(), (x, *model.parameters()))

    expected = gradients(none, model)
    for one, other in zip(gradients(ckpt, nn.DataParallel(model)), expected, strict=True):
        torch.testing.assert_close(one, other)


@all_checkpoints
def test_recomputation_repeats_the_dropout_mask(ckpt: Checkpoint) -> None:
    def gradient(ckpt: Checkpoint) -> torch.Tensor:
        torch.cuda.manual_seed(5)
        x = torch.ones(2000, device="cuda", requires_grad=True)
        (results,) = torch.autograd.grad(ckpt(lambda h: nn.functional.dropout(h).sin(), nn.functional.dropout(x)).sum(), x)
        return results

    assert torch.equal(gradient(none), gradient(ckpt))


@all_checkpoints
def test_recomputation_restores_the_device_context(ckpt: Checkpoint) -> None:
    if ckpt is torch_non_reentrant and torch.__version__ < "2.15":
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
