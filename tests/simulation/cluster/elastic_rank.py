"""A rank of an elastic training, for torchrun. Rank 1 kills itself in the middle of the first two attempts."""

from __future__ import annotations

import json
import os
import signal

import torch
import torch.distributed as dist

DEATHS = 2
STEPS = 4


def main() -> None:
    rank, ranks, restarts = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    torch.cuda.set_device(rank)
    # torchrun's store outlives the attempts and holds the last one's unique id under the key of the next one. A rank that
    # reads it too early fails, on real GPUs too, and uses up a restart.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), ranks, is_master=False)
    attempt = dist.PrefixStore(f"attempt {restarts}", store)
    dist.init_process_group("nccl", store=attempt, rank=rank, world_size=ranks)
    weights = torch.ones(4, device="cuda")
    for step in range(STEPS):
        gradient = torch.full((4,), float(rank + 1 + step), device="cuda")
        if restarts < DEATHS and rank == 1 and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(gradient)
        weights -= 0.25 * gradient
    if rank == 0:
        print(json.dumps({"restarts": restarts, "weights": weights.tolist()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
