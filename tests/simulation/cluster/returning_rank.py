"""A rank of a training that waits alone for a killed node, starts it again, and then trains with it: torchrun --nnodes 1:2."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist

STEPS = 40


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    if dist.get_world_size() == 1:
        command = [sys.executable, "-m", "accelerator", "fault", "node=1", "restart"]
        subprocess.run(command, check=True)
        time.sleep(100)  # torchrun ends this process when the node asks to join
        sys.exit("no node has joined")
    ranks = torch.ones(1, device="cuda")
    for _ in range(STEPS):
        total = ranks.clone()
        dist.all_reduce(total)
    print(f"rank {dist.get_rank()} of {total.item():.0f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
