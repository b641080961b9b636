"""``python -m tests.benchmarks.nccl [--gate] [--json FILE]``: a simulated nccl all_reduce against gloo on the CPU.

Run it on simulated GPUs: ``python -m accelerator simulate --gpus 2 -- python -m tests.benchmarks.nccl``. In each round two
ranks reduce 64 MiB of float32 over each backend several times. The ratio of a round compares the fastest calls. The row shows
the minimum ratio of the rounds and their interquartile range. With ``--gate`` the exit status is 1 if the minimum exceeds the
budget by over 5 % and by over that range.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from accelerator.simulation import is_simulated

from . import gate

RANKS = 2
SIZE = 64 * 2**20
ROUNDS = 5
CALLS = 4
BUDGET = 0.6


def measure(rank: int, store: str) -> list[tuple[float, float]]:
    """Return the seconds of the fastest call over nccl and over gloo for each round."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=RANKS, store=dist.FileStore(store, RANKS))
    tensors = {"nccl": torch.ones(SIZE // 4, device="cuda"), "gloo": torch.ones(SIZE // 4)}

    def reduce(backend: str) -> float:
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensors[backend])
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def fastest(call: Callable[[str], float], backend: str) -> float:
        return min(call(backend) for _ in range(CALLS))

    for backend in tensors:
        fastest(reduce, backend)  # the first calls connect the ranks
    rounds = [(fastest(reduce, "nccl"), fastest(reduce, "gloo")) for _ in range(ROUNDS)]
    dist.destroy_process_group()
    return rounds


def fork_ranks(folder: str) -> list[tuple[float, float]]:
    """Run one process per rank and return the measurements of rank 0."""
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                rounds = measure(rank, str(Path(folder, "store")))
                Path(folder, str(rank)).write_text(json.dumps(rounds), encoding="utf-8")
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    if any(os.waitpid(child, 0)[1] for child in children):
        raise RuntimeError("a rank failed")
    return json.loads(Path(folder, "0").read_text(encoding="utf-8"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gate", action="store_true", help="exit with status 1 if the minimum is above the budget")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the row there too")
    options = parser.parse_args()
    if not is_simulated():
        parser.error("run it under 'python -m accelerator simulate --gpus 2 --'")
    with tempfile.TemporaryDirectory() as folder:
        rounds = fork_ranks(folder)
    ratios = [nccl / gloo for nccl, gloo in rounds]
    minimum, spread = min(ratios), gate.spread(ratios)
    passes = gate.passes(minimum, BUDGET, spread)
    milliseconds = [statistics.median(times) * 1000 for times in zip(*rounds, strict=True)]
    what = f"all_reduce, {SIZE >> 20} MiB, {RANKS} ranks"
    print(f"{'nccl against gloo':32}{'minimum':>10}{'spread':>9}{'budget':>9}{'nccl ms':>10}{'gloo ms':>10}")
    print(
        f"{what:32}{minimum:10.2f}{spread:9.2f}{BUDGET:9.2f}{milliseconds[0]:10.1f}{milliseconds[1]:10.1f}"
        f"{'' if passes else '  over'}"
    )
    if options.json:
        row = {"what": what, "minimum": minimum, "spread": spread, "budget": BUDGET, "passes": passes, "ratios": ratios}
        options.json.write_text(json.dumps([row], indent=1) + "\n", encoding="utf-8")
    return int(options.gate and not passes)


if __name__ == "__main__":
    sys.exit(main())
