"""Gradients averaged over as many processes as there are GPUs."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import accelerator as acc

from .training import set_up


def averaged(size: int, directory: os.PathLike[str]) -> list[torch.Tensor]:
    """What each of several processes has after all of them averaged what they had: 1, 2, ... at first."""
    context: Any = mp.start_processes(_rank, args=(size, str(directory)), nprocs=size, start_method="spawn", join=False)
    context.join()
    return [torch.load(os.path.join(directory, f"{rank}.pt")) for rank in range(size)]


def _rank(rank: int, size: int, directory: str) -> None:
    device = set_up(rank)
    store = dist.FileStore(os.path.join(directory, "store"), size)
    dist.init_process_group(acc.communication_backend_name(), store=store, rank=rank, world_size=size)
    mine = torch.full((4,), rank + 1.0).to(device)
    dist.all_reduce(mine)
    torch.save(mine.cpu() / size, os.path.join(directory, f"{rank}.pt"))
    dist.destroy_process_group()
