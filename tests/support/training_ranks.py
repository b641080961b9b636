"""Trainings shared by ranks: a program that forks them, and prints every rank's losses.

Run as ``python -m tests.support.training_ranks WORLD``: one rank for each simulated GPU, over nccl.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support import trainings
from tests.support.trainings import STEPS, Language, adamw, cross_entropy

if TYPE_CHECKING:
    from collections.abc import Callable

# How many sentences the whole batch has: it can be shared by one, two and four ranks.
SENTENCES = 8


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(17, (SENTENCES, 8), generator=generator)
    return words, words.roll(-1, 1)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What a rank sees of a batch."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()].cuda()


def averaged(loss: torch.Tensor) -> float:
    """The loss over the whole batch."""
    value = loss.detach().clone()
    dist.all_reduce(value, op=dist.ReduceOp.AVG)
    return value.item()


def language() -> Language:
    torch.manual_seed(0)
    return Language()


def data_parallel_losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    inputs, target = (own_part(tensor) for tensor in batch())
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        losses.append(averaged(loss))
    return losses


def ddp(**options: Any) -> list[float]:
    wrapped = nn.parallel.DistributedDataParallel(language().cuda(), device_ids=[torch.cuda.current_device()], **options)
    return data_parallel_losses(wrapped, adamw(wrapped.parameters()))


def ddp_static_graph() -> list[float]:
    return ddp(static_graph=True, gradient_as_bucket_view=True)


def zero_redundancy() -> list[float]:
    wrapped = nn.parallel.DistributedDataParallel(language().cuda(), device_ids=[torch.cuda.current_device()])
    return data_parallel_losses(wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=0.01))


def fsdp2() -> list[float]:
    model = language().cuda()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return data_parallel_losses(model, adamw(model.parameters()))


def fsdp2_mixed() -> list[float]:
    model = language().cuda()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return data_parallel_losses(model, adamw(model.parameters()))


def fsdp1() -> list[float]:
    model = FullyShardedDataParallel(language().cuda(), device_id=torch.cuda.current_device(), use_orig_params=True)
    return data_parallel_losses(model, adamw(model.parameters()))


def tensor_parallel() -> list[float]:
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = language().cuda()
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    inputs, target = (tensor.cuda() for tensor in batch())
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def pipeline() -> list[float]:
    """Blocks of a net on consecutive ranks, activations and gradients sent from one to the next."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = deep_net()
    share = len(layers) // world
    stage = nn.Sequential(*layers[rank * share : (rank + 1) * share]).cuda()
    optimizer = adamw(stage.parameters())
    inputs, target = trainings.pictures("cuda", 16)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        if rank == 0:
            x = inputs
        else:
            x = torch.empty(6, 16, device="cuda")
            dist.recv(x, rank - 1)
            x.requires_grad_()
        y = stage(x)
        loss = torch.zeros((), device="cuda")
        if rank < world - 1:
            dist.send(y.detach(), rank + 1)
            gradient = torch.empty_like(y)
            dist.recv(gradient, rank + 1)
            y.backward(gradient)
        else:
            loss = cross_entropy(y[:, :5], target)
            loss.backward()
        if rank > 0:
            assert x.grad is not None
            dist.send(x.grad, rank - 1)
        optimizer.step()
        dist.broadcast(loss := loss.detach(), world - 1)
        losses.append(loss.item())
    return losses


def deep_net() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]


class Pictures(nn.Module):
    """A net with a batch norm. A bias before it would have no gradient but noise, which Adam makes as large as any."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(24, 5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(SENTENCES, 3, 9, 9, generator=generator), torch.arange(SENTENCES) % 5


def sync_batch_norm() -> list[float]:
    torch.manual_seed(0)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Pictures()).cuda()
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
    optimizer = adamw(wrapped.parameters())
    inputs, target = (own_part(tensor) for tensor in pictures())
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(wrapped(inputs), target)
        loss.backward()
        optimizer.step()
        losses.append(averaged(loss))
    # What the running statistics have become shows in evaluation only.
    model.eval()
    losses.append(averaged(cross_entropy(model(inputs), target)))
    return losses


TRAININGS: dict[str, Callable[[], list[float]]] = {
    training.__name__: training
    for training in (
        ddp,
        ddp_static_graph,
        zero_redundancy,
        fsdp1,
        fsdp2,
        fsdp2_mixed,
        tensor_parallel,
        pipeline,
        sync_batch_norm,
    )
}


def tried(training: Callable[[], list[float]]) -> list[float] | str:
    """The losses of a training, or why there are none."""
    try:
        return training()
    except Exception:
        return traceback.format_exc()


def run_rank(rank: int, world: int, directory: Path) -> None:
    torch.set_num_threads(1)
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
        device_id=torch.device("cuda", rank),
    )
    results = {name: tried(training) for name, training in TRAININGS.items()}
    (directory / str(rank)).write_text(json.dumps(results))
    dist.destroy_process_group()


def main(world: int) -> int:
    importlib.import_module("torch._dynamo")  # which DDP imports: here once for all ranks
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    run_rank(rank, world, directory)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            children.append(child)
        failed = [rank for rank, child in enumerate(children) if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]
        if failed:
            print(f"ranks {failed} failed", file=sys.stderr)
            return 1
        print(json.dumps([json.loads((directory / str(rank)).read_text()) for rank in range(world)]))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
