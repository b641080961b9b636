"""A rank of a small training that continues from its last checkpoint, for test_recovery.py.

torchrun ... survivor.py FOLDER ddp|fsdp|pipeline
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

STEPS, STEPS_PER_CHECKPOINT = 8, 3
TIMEOUT_S = 8
# With a key for each parameter, since the two stages of a pipeline have other parameters.
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def measure(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def run_stage(schedule: ScheduleGPipe, rank: int, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Run forward and backward of one stage, and return the loss, or 0 for the first stage."""
    losses: list[torch.Tensor] = []
    if rank == 0:
        schedule.step(x)
        return torch.zeros((), device=x.device)
    schedule.step(target=target, losses=losses)
    return torch.stack(losses).mean()


def main() -> None:
    folder, strategy = Path(sys.argv[1]), sys.argv[2]
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", timeout=timedelta(seconds=TIMEOUT_S), device_id=torch.device("cuda", rank))
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).cuda()
    schedule = None
    if strategy == "pipeline":
        model = model[:2] if rank == 0 else model[2:]
        stage = PipelineStage(model, rank, 2, torch.device("cuda", rank))
        schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=measure)
    else:
        model = DistributedDataParallel(model) if strategy == "ddp" else fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    saved = [int(path.parent.name) for path in folder.glob("*/.metadata")]
    step = max(saved, default=0)
    if saved:
        weights, state = get_state_dict(model, optimizer, options=OPTIONS)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder / str(step))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state, options=OPTIONS)
    while step < STEPS:
        torch.manual_seed(1000 * step + (0 if schedule else rank))
        x = torch.randn(16, 8).cuda()
        target = x.sum(1, keepdim=True)
        optimizer.zero_grad()
        if schedule:
            loss = run_stage(schedule, rank, x, target)
        else:
            loss = measure(model(x), target)
            loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        step += 1
        if rank == 0:
            print(f"step {step}: {total.item()!r}", flush=True)
        if step % STEPS_PER_CHECKPOINT == 0:
            weights, state = get_state_dict(model, optimizer, options=OPTIONS)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / str(step))
    dist.destroy_process_group()


main()
