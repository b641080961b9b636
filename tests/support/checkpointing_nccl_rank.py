"""One rank of the nccl worlds that ``test_nccl.py`` starts: it trains tensor-parallel layers in checkpoints of every mode.

Run as ``python -m tests.support.checkpointing_nccl_rank RANK SIZE FOLDER`` with a GPU for each rank. The rank writes the
values without checkpoints, the dropout masks, and the values of each mode.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accelerator import checkpointing
from tests.support.checkpointing_cases import OURS, Checkpoint, Drops, none
from tests.support.checkpointing_memory import MODES
from tests.support.checkpointing_worker import Summed

LAYERS = 3
SHAPES = {"odd": (3, 7), "even": (4, 8)}


class Layer(nn.Module):
    """A tensor-parallel layer: ``own`` differs between the ranks, ``shared`` is the same on all of them."""

    def __init__(self, width: int, index: int, rank: int) -> None:
        super().__init__()
        torch.manual_seed(100 * index + rank)
        self.own = nn.Linear(width, width)
        torch.manual_seed(100 * index + 99)
        self.shared = nn.Linear(width, width)


def inputs(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def values(h: torch.Tensor, x: torch.Tensor, layers: list[Layer]) -> list[torch.Tensor]:
    """Return the output and the gradients of a rank after its backward."""
    gradients = [each.grad for each in (x, *(p for layer in layers for p in layer.parameters())) if each.grad is not None]
    assert len(gradients) == 1 + 4 * LAYERS
    return [each.detach().cpu() for each in (h, *gradients)]


def train(ckpt: Checkpoint, shape: tuple[int, int], drops: Drops) -> list[torch.Tensor]:
    layers = [Layer(shape[1], index, dist.get_rank()).cuda() for index in range(LAYERS)]
    checkpointing.model_parallel_cuda_manual_seed(11)
    tracker = checkpointing.get_cuda_rng_tracker()
    x = inputs(shape).cuda().requires_grad_()

    def forward(h: torch.Tensor, layer: Layer) -> torch.Tensor:
        with tracker.fork():
            part = drops(torch.tanh(layer.own(h)))
        return drops(layer.shared(Summed.apply(part))) + h

    h = x * 1
    for layer in layers:
        h = ckpt(forward, h, layer)
    h.square().sum().backward()
    tracker.reset()
    return values(h, x, layers)


def reference(shape: tuple[int, int], rank: int, masks: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Return the expected values of a rank. One process computes them on the CPU from the masks of all ranks."""
    layers = [[Layer(shape[1], index, each) for index in range(LAYERS)] for each in range(len(masks))]
    x = inputs(shape).requires_grad_()
    h = x * 1
    for index in range(LAYERS):
        parts = [torch.tanh(own[index].own(h)) * masks[each][2 * index] for each, own in enumerate(layers)]
        # A rank's gradient flows only through its own part of the sum.
        whole = torch.stack([part if each == rank else part.detach() for each, part in enumerate(parts)]).sum(0)
        h = layers[rank][index].shared(whole) * masks[rank][2 * index + 1] + h
    h.square().sum().backward()
    return values(h, x, layers[rank])


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=size)
    results: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        checkpointing.configure(group=dist.group.WORLD)
        drops = Drops()
        results[name] = {"plain": train(none, shape, drops), "masks": drops.masks}
        for mode, settings in MODES.items():
            for ckpt in OURS:
                counts = {"num_checkpoints": LAYERS} if "contiguous" in mode else {}
                checkpointing.configure(group=dist.group.WORLD, **{**settings, **counts})
                results[name][f"{mode}, {ckpt.__name__}"] = train(ckpt, shape, Drops())
    checkpointing.configure()
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
