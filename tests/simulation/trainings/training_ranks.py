"""Runs distributed trainings over nccl in forked ranks, and saves the losses and the first gradients of each rank.

``python -m tests.simulation.trainings.training_ranks WORLD FILE`` runs on as many simulated GPUs as there are ranks. Each
worker of pytest imports this module, so that the ranks import late what takes a second.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from tests.simulation.trainings import trainings
from tests.simulation.trainings.trainings import STEPS, Language, adamw, cross_entropy

if TYPE_CHECKING:
    from collections.abc import Callable

# The number of sentences in the whole batch. It is divisible by one, two and four ranks.
SENTENCES = 8


class Training(NamedTuple):
    """The loss of each step, and the gradients of the first step."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(17, (SENTENCES, 8), generator=generator)
    return words, words.roll(-1, 1)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a batch."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()].cuda()


def averaged(loss: torch.Tensor) -> float:
    """Return the loss over the whole batch, the average of the ranks' losses."""
    value = loss.detach().clone()
    dist.all_reduce(value, op=dist.ReduceOp.AVG)
    return value.item()


def language() -> Language:
    torch.manual_seed(0)
    return Language()


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients by the parameters' names in the unsharded model."""
    gradients_by_name = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        if hasattr(gradient, "full_tensor"):
            gradient = gradient.full_tensor()
        gradients_by_name[name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")] = gradient.float().cpu()
    return gradients_by_name


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[torch.Tensor, torch.Tensor],
    gradients: Callable[[nn.Module], dict[str, torch.Tensor]] = whole_gradients,
) -> Training:
    inputs, target = data
    losses, first = [], None
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), target)
        loss.backward()
        first = first or gradients(model)
        optimizer.step()
        losses.append(averaged(loss))
    assert first
    return Training(losses, first)


def own_batch() -> tuple[torch.Tensor, torch.Tensor]:
    words, following = batch()
    return own_part(words), own_part(following)


def ddp(**options: Any) -> Training:
    wrapped = nn.parallel.DistributedDataParallel(language().cuda(), device_ids=[torch.cuda.current_device()], **options)
    return train(wrapped, adamw(wrapped.parameters()), own_batch())


def ddp_static_graph() -> Training:
    return ddp(static_graph=True, gradient_as_bucket_view=True)


def zero_redundancy() -> Training:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = nn.parallel.DistributedDataParallel(language().cuda(), device_ids=[torch.cuda.current_device()])
    return train(wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=0.01), own_batch())


def fsdp2() -> Training:
    from torch.distributed.fsdp import fully_shard

    model = language().cuda()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return train(model, adamw(model.parameters()), own_batch())


def fsdp2_mixed() -> Training:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = language().cuda()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return train(model, adamw(model.parameters()), own_batch())


def fsdp1() -> Training:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(language().cuda(), device_id=torch.cuda.current_device(), use_orig_params=True)

    def gradients(_: nn.Module) -> dict[str, torch.Tensor]:
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return whole_gradients(model)

    return train(model, adamw(model.parameters()), own_batch(), gradients)


def tensor_parallel() -> Training:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    model = language().cuda()
    for block in model.blocks:
        parallelize_module(block, mesh, {"widen": ColwiseParallel(), "narrow": RowwiseParallel()})
    words, following = batch()
    return train(model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False), (words.cuda(), following.cuda()))


def pipeline() -> Training:
    """Train a net whose consecutive layers are on consecutive ranks, which send each other activations and gradients."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = deep_net()
    share = len(layers) // world
    stage = nn.Sequential(*layers[rank * share : (rank + 1) * share]).cuda()
    optimizer = adamw(stage.parameters())
    inputs, target = trainings.pictures("cuda", 16)
    losses, first = [], {}
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
        first = first or own_gradients(stage, rank * share)
        optimizer.step()
        dist.broadcast(loss := loss.detach(), world - 1)
        losses.append(loss.item())
    return Training(losses, first)


def own_gradients(stage: nn.Module, start: int) -> dict[str, torch.Tensor]:
    """Return the gradients of one stage by their names in the whole net."""
    gradients_by_name = {}
    for name, gradient in whole_gradients(stage).items():
        index, _, rest = name.partition(".")
        gradients_by_name[f"{start + int(index)}.{rest}"] = gradient
    return gradients_by_name


def deep_net() -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]


class Pictures(nn.Module):
    """A net with a batch norm. The convolution before it has no bias.

    The gradient of such a bias would be rounding noise, from which Adam makes updates of normal size.
    """

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


def sync_batch_norm() -> Training:
    torch.manual_seed(0)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Pictures()).cuda()
    wrapped = nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
    inputs, target = (own_part(tensor) for tensor in pictures())
    losses, gradients = train(wrapped, adamw(wrapped.parameters()), (inputs, target))
    # Only evaluation mode uses the running statistics.
    model.eval()
    return Training([*losses, averaged(cross_entropy(model(inputs), target))], gradients)


TRAININGS: dict[str, Callable[[], Training]] = {
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


def run_training(training: Callable[[], Training]) -> tuple[Any, ...] | str:
    """Return a training's losses and gradients, or the traceback of its error."""
    try:
        return tuple(training())
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
    results = {name: run_training(training) for name, training in TRAININGS.items()}
    torch.save(results, directory / str(rank))
    dist.destroy_process_group()


def main(world: int, file: str) -> int:
    importlib.import_module("torch._dynamo")  # DDP imports it; import it once, before the forks
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
        torch.save([torch.load(directory / str(rank)) for rank in range(world)], file)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2]))
