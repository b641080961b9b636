"""A rank of a training that waits alone for a killed node, starts it again, and then trains with it: torchrun --nnodes 1:2."""

from __future__ import annotations

import subprocess
import sys
import time

import torch.distributed as dist

from tests.simulation.cluster import reformed_rank


def main() -> None:
    reformed_rank.join()
    if dist.get_world_size() == 1:
        command = [sys.executable, "-m", "accelerator", "fault", "node=1", "restart"]
        subprocess.run(command, check=True)
        time.sleep(100)  # torchrun ends this process when the node asks to join
        sys.exit("no node has joined")
    reformed_rank.count_ranks()


if __name__ == "__main__":
    main()
