"""A rank of a training that goes on with the nodes that are left, for torchrun --nnodes 1:2."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

STEPS = 40


def join() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")


def count_ranks() -> None:
    ranks = torch.ones(1, device="cuda")
    for _ in range(STEPS):
        total = ranks.clone()
        dist.all_reduce(total)
    print(f"rank {dist.get_rank()} of {total.item():.0f}\n", end="", flush=True)  # by one write
    dist.destroy_process_group()


if __name__ == "__main__":
    join()
    count_ranks()
