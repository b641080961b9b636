"""A rank of a cluster of simulated machines, for torchrun: ``cluster_rank.py CASE [FOLDER]``."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.simulation.nccl import torch_cases
from tests.simulation.trainings import training_ranks, trainings

NODES = int(os.environ["PET_NNODES"])


def _sharded() -> tuple[Any, torch.optim.Optimizer]:
    """Return a language model that is sharded within each node and replicated over the nodes."""
    mesh = init_device_mesh("cuda", (NODES, dist.get_world_size() // NODES), mesh_dim_names=("node", "gpu"))
    model = training_ranks.language().cuda()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, trainings.adamw(model.parameters())


def collectives() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch_cases.check_collectives(rank, ranks)
    torch_cases.check_messages(rank, ranks)
    torch_cases.check_groups(rank, ranks)


def train(folder: str) -> None:
    """Train and save a checkpoint and the losses."""
    model, optimizer = _sharded()
    training = training_ranks.train(model, optimizer, training_ranks.own_batch())
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=f"{folder}/checkpoint")
    whole = {name: value.full_tensor().cpu() for name, value in states["model"].items()}
    if dist.get_rank() == 0:
        torch.save((tuple(training), whole), f"{folder}/trained")


def load(folder: str) -> None:
    """Load the checkpoint into a model of other weights and sharding, and save the whole weights."""
    model, optimizer = _sharded()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=f"{folder}/checkpoint")
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    whole = {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(whole, f"{folder}/loaded")


def deepspeed(folder: str) -> None:
    """Train with DeepSpeed, without and with a second copy of the partitioned parameters in each node."""
    losses = [_train_with_deepspeed(partitions) for partitions in (1, dist.get_world_size() // NODES)]
    if dist.get_rank() == 0:
        torch.save(losses, f"{folder}/losses")


def _train_with_deepspeed(partitions: int) -> list[float]:
    import deepspeed

    zero = {"stage": 3, "zero_hpz_partition_size": partitions}
    zero |= {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 100_000}  # the default bucket takes 2 GiB
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "optimizer": optimizer}
    model = training_ranks.language()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    inputs, target = training_ranks.own_batch()
    losses = []
    for _ in range(trainings.STEPS):
        loss = trainings.cross_entropy(engine(inputs), target)
        engine.backward(loss)
        engine.step()
        losses.append(training_ranks.averaged(loss))
    return losses


def step_forever(folder: str) -> None:
    """Take steps until another rank ends."""
    Path(folder, f"{os.environ['PET_NODE_RANK']}-{os.getppid()}").touch()
    while True:
        ones = torch.ones(1, device="cuda")
        dist.all_reduce(ones)
        assert ones.item() == dist.get_world_size()


def main(case: str, *arguments: str) -> None:
    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=torch.device("cuda", device), timeout=timedelta(seconds=200))
    cases = (collectives, train, load, deepspeed, step_forever)
    {function.__name__: function for function in cases}[case](*arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
