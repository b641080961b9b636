"""``python -m tests.benchmarks.checkpointing [--gate]``: what a checkpoint costs and saves, beside torch's and DeepSpeed's.

Runs on the CPU. Times are those of twelve tiny layers, forward and backward, taken in turns; from the fastest and from the
median round of each that of the same layers without checkpoints is subtracted. Peaks are the resident memory that a process
of its own adds while it trains twelve wide layers. Held bytes are what the inputs of checkpoints occupy between forward and
backward, on each rank of two gloo processes. With ``--gate`` the exit status is 1 if a plain checkpoint costs more than 0.6 of
torch's non-reentrant one, or partitioned inputs hold more than their share.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

LAYERS = 12
ROUNDS = 400
BUDGET = 0.6

Checkpoint = Callable[..., torch.Tensor]

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "partition": {"partition_activations": True},
    "cpu": {"checkpoint_in_cpu": True},
    "contiguous": {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": LAYERS},
}


def contenders() -> dict[str, tuple[Callable[[], None], Checkpoint]]:
    """What is compared: how to prepare for a round, and the function to call."""
    from accelerator import checkpointing

    found: dict[str, tuple[Callable[[], None], Checkpoint]] = {
        "no checkpoint": (lambda: None, lambda function, h: function(h)),
        "torch, non-reentrant": (lambda: None, lambda f, h: torch_checkpoint.checkpoint(f, h, use_reentrant=False)),
        "torch, reentrant": (lambda: None, lambda f, h: torch_checkpoint.checkpoint(f, h, use_reentrant=True)),
    }
    for name, settings in MODES.items():
        found[f"ours, {name}"] = (lambda settings=settings: checkpointing.configure(**settings), checkpointing.checkpoint)
    found["ours, non_reentrant_checkpoint"] = (checkpointing.configure, checkpointing.non_reentrant_checkpoint)
    return found | deepspeeds()


def deepspeeds() -> dict[str, tuple[Callable[[], None], Checkpoint]]:
    """DeepSpeed's two, where it is installed."""
    if importlib.util.find_spec("deepspeed") is None:
        return {}
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    import deepspeed  # type: ignore[import-not-found, unused-ignore]

    theirs: Any = deepspeed.checkpointing
    return {
        "DeepSpeed": (lambda: None, theirs.checkpoint),
        "DeepSpeed, non_reentrant": (lambda: None, theirs.non_reentrant_checkpoint),
    }


def times() -> dict[str, tuple[float, float]]:
    """Microseconds that each adds to a layer: by the fastest round, and by the median one."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(LAYERS)]
    x = torch.randn(4, 8, requires_grad=True)
    rounds: dict[str, list[float]] = {}
    found = contenders()
    for _ in range(ROUNDS):
        for name, (prepare, checkpoint) in found.items():
            prepare()
            start = time.perf_counter()
            h = x
            for layer in layers:
                h = checkpoint(layer, h)
            h.sum().backward()
            rounds.setdefault(name, []).append(time.perf_counter() - start)
    fastest, median = ({name: pick(each) for name, each in rounds.items()} for pick in (min, statistics.median))
    base = "no checkpoint"
    return {
        name: tuple((by[name] - by[base]) / LAYERS * 1e6 for by in (fastest, median))  # type: ignore[misc]
        for name in rounds
        if name != base
    }


def train_and_tell_the_peak(name: str) -> None:
    """Print by how many MiB the resident memory of this process grew at most while it trained with this contender."""
    from accelerator import checkpointing

    torch.manual_seed(0)
    width, rows = 256, 4096

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    layers = [block() for _ in range(LAYERS)]
    prepare, checkpoint = contenders()[name]
    prepare()
    # What the libraries import and allocate for themselves at first use does not count.
    checkpoint(layers[0], torch.randn(8, width, requires_grad=True)).sum().backward()
    checkpointing.reset()
    gc.collect()
    # Forgets the highest resident memory so far, that of importing.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    h = torch.randn(rows, width, requires_grad=True)
    for layer in layers:
        h = checkpoint(layer, h)
    h.sum().backward()
    print((resident("VmHWM") - before) / 2**10)


def resident(what: str) -> int:
    """KiB: what this process occupies now, or the most that it occupied."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what))


def peaks() -> dict[str, float]:
    """MiB, each measured in a process of its own."""
    found: dict[str, float] = {}
    for name in contenders():
        command = [sys.executable, "-m", "tests.benchmarks.checkpointing", "--peak", name]
        # Large blocks are mapped one by one, so that what is freed counts no longer.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=300).stdout
        found[name] = float(output.split()[-1])
    return found


def tell_held_bytes(rank: int, size: int, folder: str) -> None:
    """Print what the inputs of checkpoints occupy on this rank, by mode and number of elements."""
    import torch.distributed as dist

    from accelerator import checkpointing

    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    found: dict[str, list[int]] = {}
    for numel in (2**18, 2**18 + 1, 2**20):
        for name, settings in MODES.items():
            checkpointing.configure(group=dist.group.WORLD, **settings)
            x = torch.zeros(numel, requires_grad=True)
            h = x * 1
            for _ in range(LAYERS):
                h = checkpointing.checkpoint(lambda h: h.sin().exp(), h)
            storages = {
                item.untyped_storage().data_ptr(): item.untyped_storage().nbytes()
                for item in gc.get_objects()
                if issubclass(type(item), torch.Tensor) and item.layout is torch.strided
            }
            storages.pop(x.untyped_storage().data_ptr())
            storages.pop(h.untyped_storage().data_ptr())
            found.setdefault(name, []).append(sum(each for each in storages.values() if each >= 2**16))
            h.sum().backward()
            del x, h
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(found))


def held(size: int) -> dict[str, list[int]]:
    """Bytes that one rank of so many holds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.benchmarks.checkpointing", "--held"]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "ACCELERATOR_BACKEND": "cpu"}
        ranks = [
            subprocess.Popen([*command, str(rank), str(size), folder], env=environment, stdout=subprocess.PIPE, text=True)
            for rank in range(size)
        ]
        return json.loads(next(iter([rank.communicate(timeout=300)[0] for rank in ranks])).splitlines()[-1])  # type: ignore[no-any-return]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gate", action="store_true", help="exit with 1 if a budget is exceeded")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--held", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if chosen.peak:
        train_and_tell_the_peak(chosen.peak)
        return 0
    if chosen.held:
        tell_held_bytes(int(chosen.held[0]), int(chosen.held[1]), chosen.held[2])
        return 0
    print(f"torch {torch.__version__}, DeepSpeed {'not ' if not deepspeeds() else ''}installed")
    cost, peak = times(), peaks()
    theirs = cost["torch, non-reentrant"]
    print(f"\n| {'checkpoint':30} | fastest, µs | of torch's | median, µs | of torch's | peak, MiB |")
    print(f"|{'-' * 32}|------------:|-----------:|-----------:|-----------:|----------:|")
    print(f"| {'no checkpoint':30} | {'':11} | {'':10} | {'':10} | {'':10} | {peak['no checkpoint']:9.0f} |")
    for name, (fastest, median) in cost.items():
        ratios = fastest / theirs[0], median / theirs[1]
        print(f"| {name:30} | {fastest:11.1f} | {ratios[0]:10.2f} | {median:10.1f} | {ratios[1]:10.2f} | {peak[name]:9.0f} |")
    failed = any(cost[name][0] > BUDGET * theirs[0] for name in ("ours, plain", "ours, non_reentrant_checkpoint"))
    if torch.distributed.is_available():
        size = 2
        found = held(size)
        print(f"\nbytes held for {LAYERS} inputs between forward and backward on one of {size} ranks, by elements of an input")
        print(f"| {'mode':12} | {2**18:>12} | {2**18 + 1:>12} | {2**20:>12} |")
        print(f"|{'-' * 14}|-------------:|-------------:|-------------:|")
        for name, each in found.items():
            print(f"| {name:12} | " + " | ".join(f"{number:12}" for number in each) + " |")
        share = [LAYERS * 4 * -(-numel // size) for numel in (2**18, 2**18 + 1, 2**20)]
        failed |= any(part > allowed for part, allowed in zip(found["partition"], share, strict=True))
    return int(chosen.gate and failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
