"""``python -m tests.benchmarks.checkpointing [--gate] [--times] [--json FILE] [--clock cpu]``: the time and the memory of
checkpoints, compared with torch and DeepSpeed.

The benchmark runs on a GPU, real or simulated, if there is one, and else on the CPU. It prints up to five tables:

- Time: the time that a checkpoint adds to the forward and backward of a tiny layer. Each round has 40 turns. In a turn every
  contender runs twelve layers twice, and the second run is timed. The garbage collector runs before, so that no contender
  pays for the garbage of another one. The figure of a contender is its fastest run, minus that of the same layers without
  checkpoints. The table shows the minimum of five rounds, its ratio to the minimum of torch's non-reentrant checkpoint, and
  the interquartile range of the ratios of the rounds.
- Calls: the Python functions of this package that one checkpoint of the layer calls, and their modules. Unlike times, they are
  the same on every machine; the interpreter and the initialized accelerator change them by a few.
- Early stop: the time of layers of several widths if recomputation stops early, never stops early, or decides by size.
- Peak, only on the CPU: the resident memory that a separate process adds while it trains twelve wide layers.
- Held memory, only on the CPU: the memory that the inputs of checkpoints occupy between forward and backward, by number of
  layers and by number of ranks that share the inputs over gloo.

With ``--gate`` the exit status is 1 if the ratio of a plain checkpoint exceeds its budget by over 5 % and by over the
spread, if it takes more calls than its budget, or if partitioned inputs occupy more than a rank's share. ``--times`` leaves out
the tables of memory. ``--json`` also writes all figures to a file. ``--clock cpu`` measures CPU time instead of wall time. On
an overloaded machine wall time favors fast contenders, because only short runs finish without an interruption.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn

from . import gate

LAYERS = 12
ROUNDS = 5
TURNS = 40
# The ratio of a checkpoint's time to that of torch's non-reentrant checkpoint, for the tiny layer.
BUDGET = 0.30
# On a simulated GPU both times include the ops' own, which vary more between machines, so the gate leaves room there.
GATE = {"cpu": BUDGET, "cuda": 0.40}
# The Python calls of one checkpoint in this package, forward and backward: up to 23 and 20, and a few for other interpreters.
CALLS_BUDGET = (25, 22)
GATED = ("ours, plain", "ours, non_reentrant_checkpoint")
WIDTHS = (8, 64, 128, 256, 1024)

Checkpoint = Callable[..., torch.Tensor]

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "partition": {"partition_activations": True},
    "cpu": {"checkpoint_in_cpu": True},
    "contiguous": {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": LAYERS},
}


def contenders() -> dict[str, tuple[Callable[[], None], Checkpoint]]:
    """Return the contenders by name: a function that prepares a round, and the checkpoint function."""
    from accelerator import checkpointing

    results: dict[str, tuple[Callable[[], None], Checkpoint]] = {
        "no checkpoint": (lambda: None, lambda function, h: function(h)),
        "torch, non-reentrant": (lambda: None, lambda f, h: torch_checkpoint.checkpoint(f, h, use_reentrant=False)),
        "torch, reentrant": (lambda: None, lambda f, h: torch_checkpoint.checkpoint(f, h, use_reentrant=True)),
    }
    for name, settings in MODES.items():
        results[f"ours, {name}"] = (lambda settings=settings: checkpointing.configure(**settings), checkpointing.checkpoint)
    results["ours, non_reentrant_checkpoint"] = (checkpointing.configure, checkpointing.non_reentrant_checkpoint)
    return results | deepspeed_contenders()


def deepspeed_contenders() -> dict[str, tuple[Callable[[], None], Checkpoint]]:
    """Return the contenders of DeepSpeed, none if it is not installed."""
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


class Scale(nn.Module):
    """A tiny layer for GPUs without a library of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.weight


def tiny(device: str) -> Callable[[], nn.Module]:
    """Return a function that makes a tiny layer which the device can run."""
    try:
        nn.Linear(8, 8).to(device)(torch.ones(1, 8).to(device))
    except RuntimeError:
        return Scale
    return lambda: nn.Linear(8, 8)


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def turn(layers: list[nn.Module], x: torch.Tensor, checkpoint: Checkpoint, clock: Callable[[], float]) -> float:
    """Return the seconds of one forward and backward."""
    start = clock()
    h = x
    for layer in layers:
        h = checkpoint(layer, h)
    h.sum().backward()
    return clock() - start


class Cost(NamedTuple):
    """The time that a checkpoint adds to a layer: the minimum, its ratio to torch's minimum, and the spread of the ratios."""

    microseconds: float
    ratio: float
    spread: float


def times(device: str, clock: Callable[[], float]) -> dict[str, Cost]:
    """Return the cost of each contender."""
    torch.manual_seed(0)
    make = tiny(device)
    layers = [make().to(device) for _ in range(LAYERS)]
    x = torch.randn(32, 8).to(device).requires_grad_()  # more than 512 bytes: small ops compute even on GPUs that do not
    results = contenders()
    rounds: list[dict[str, float]] = []
    for _ in range(ROUNDS):
        fastest: dict[str, float] = {}
        for _ in range(TURNS):
            for name, (prepare, checkpoint) in results.items():
                prepare()
                gc.collect(0)
                turn(layers, x, checkpoint, clock)
                fastest[name] = min(fastest.get(name, math.inf), turn(layers, x, checkpoint, clock))
        base = fastest.pop("no checkpoint")
        rounds.append({name: (each - base) / LAYERS * 1e6 for name, each in fastest.items()})
    return {
        name: cost([each[name] for each in rounds], [each["torch, non-reentrant"] for each in rounds]) for name in rounds[0]
    }


def cost(mine: list[float], theirs: list[float]) -> Cost:
    ratios = [one / other for one, other in zip(mine, theirs, strict=True)]
    return Cost(min(mine), min(mine) / min(theirs), gate.spread(ratios))


def calls(checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
    """Return the modules of this package's functions that a forward and a backward call, a module for each call.

    The layer is on the CPU, whose backward runs in this thread. What follows which values are known, on GPUs that do not
    compute, is left out.
    """
    import accelerator

    package = str(Path(accelerator.__file__).parent)
    simulation = os.path.join(package, "simulation")
    layer, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    # Calls of first uses do not count.
    checkpoint(layer, x).sum().backward()
    modules: list[str] = []

    def record(frame: Any, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(package) and not file.startswith(simulation):
            modules.append(file[len(package) + 1 :])

    def profiled(function: Callable[[], Any]) -> tuple[Any, list[str]]:
        modules.clear()
        sys.setprofile(record)
        try:
            result = function()
        finally:
            sys.setprofile(None)
        return result, list(modules)

    out, forward = profiled(lambda: checkpoint(layer, x))
    _, backward = profiled(out.sum().backward)
    return forward, backward


def print_calls() -> dict[str, dict[str, list[str]]]:
    """Print the calls of the gated contenders, and return them by direction."""
    print(f"\n| {'checkpoint':30} | calls forward | in modules | calls backward | in modules |")
    print(f"|{'-' * 32}|--------------:|-----------:|---------------:|-----------:|")
    results: dict[str, dict[str, list[str]]] = {}
    for name in GATED:
        prepare, checkpoint = contenders()[name]
        prepare()
        forward, backward = calls(checkpoint)
        results[name] = {"forward": forward, "backward": backward}
        cells = f"{len(forward):13} | {len(set(forward)):10} | {len(backward):14} | {len(set(backward)):10}"
        print(f"| {name:30} | {cells} |")
    return results


def stopping(device: str, clock: Callable[[], float]) -> dict[int, list[float]]:
    """Return the microseconds of a layer for each width: with early stop, without early stop, and decided by size."""
    from accelerator import checkpointing

    checkpointing.configure()
    results: dict[int, list[float]] = {}
    for width in WIDTHS:
        layers: list[nn.Module] = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)).to(device)] * 4
        x = torch.randn(width, width).to(device).requires_grad_()
        fastest = [math.inf] * 3
        for _ in range(5 if width > 256 else 40):
            for place, early in enumerate((True, False, None)):
                with torch_checkpoint.set_checkpoint_early_stop(early):  # type: ignore[arg-type]
                    fastest[place] = min(fastest[place], turn(layers, x, checkpointing.checkpoint, clock))
        results[width] = [each / len(layers) * 1e6 for each in fastest]
    return results


def print_peak(name: str) -> None:
    """Train with a contender and print the peak growth of this process's resident memory, in MiB."""
    from accelerator import checkpointing

    torch.manual_seed(0)
    width, rows = 256, 4096

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    layers = [block() for _ in range(LAYERS)]
    prepare, checkpoint = contenders()[name]
    prepare()
    # The warm-up excludes the memory that the libraries allocate at first use.
    checkpoint(layers[0], torch.randn(8, width, requires_grad=True)).sum().backward()
    checkpointing.reset()
    gc.collect()
    # Resets VmHWM, the peak, which the imports have raised.
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    h = torch.randn(rows, width, requires_grad=True)
    for layer in layers:
        h = checkpoint(layer, h)
    h.sum().backward()
    print((resident("VmHWM") - before) / 2**10)


def resident(what: str) -> int:
    """Return the KiB of this process: resident now (VmRSS), or the peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what))


def peaks() -> dict[str, float]:
    """Return the peak of each contender in MiB. Each one runs in a separate process."""
    results: dict[str, float] = {}
    for name in contenders():
        command = [sys.executable, "-m", "tests.benchmarks.checkpointing", "--peak", name]
        # Large blocks get separate mappings, so that freed memory returns to the system at once.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=300).stdout
        results[name] = float(output.split()[-1])
    return results


def memory_contenders() -> dict[str, tuple[Callable[[int], None], Checkpoint]]:
    """Return the contenders for held memory by name: a function that prepares a number of layers, and the checkpoint function.

    The process must belong to a process group.
    """
    import torch.distributed as dist

    from accelerator import checkpointing

    plain = contenders()
    results: dict[str, tuple[Callable[[int], None], Checkpoint]] = {
        "torch, non-reentrant": (lambda layers: None, plain["torch, non-reentrant"][1])
    }

    def configure(layers: int, settings: dict[str, Any]) -> None:
        counted = {"num_checkpoints": layers} if "num_checkpoints" in settings else {}
        checkpointing.configure(group=dist.group.WORLD, **{**settings, **counted})

    for name, settings in MODES.items():
        results[f"ours, {name}"] = (lambda layers, settings=settings: configure(layers, settings), checkpointing.checkpoint)
    if "DeepSpeed" in plain:
        # Without partitioning, because DeepSpeed's needs its own communication, which first compiles an extension.
        results["DeepSpeed"] = (lambda layers: None, plain["DeepSpeed"][1])
    return results


DEPTHS = (6, 12, 24)
RANKS = (1, 2, 4)
# Bytes of a layer's input.
INPUT = 2**20


def print_held(rank: int, size: int, folder: str) -> None:
    """Print how many MiB the inputs of checkpoints occupy on this rank between forward and backward."""
    import torch.distributed as dist

    from accelerator import checkpointing

    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    results: dict[str, dict[int, float]] = {}
    compared = memory_contenders()
    # Freezing the objects of imported libraries, which are not garbage, makes the collections below faster.
    gc.freeze()
    for name, (prepare, checkpoint) in compared.items():
        results[name] = {}
        # The run with 2 layers is a warm-up: it includes the memory that the libraries allocate at first use.
        for layers in (2, *DEPTHS):
            checkpointing.configure()
            prepare(layers)
            x = torch.ones(INPUT // 4, requires_grad=True)
            gc.collect()
            before = resident("VmRSS")
            h = x * 1
            for _ in range(layers):
                h = checkpoint(lambda h: h.sin().exp(), h)
            gc.collect()
            # Subtracts the output, which is not an input of a checkpoint.
            results[name][layers] = (resident("VmRSS") - before) / 2**10 - INPUT / 2**20
            h.sum().backward()
            del x, h
        del results[name][2]
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(results))


def held(size: int) -> dict[str, dict[str, float]]:
    """Return the MiB that one of ``size`` ranks holds, by contender and number of layers."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.benchmarks.checkpointing", "--held"]
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "ACCELERATOR_BACKEND": "cpu",
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": "65536",
        }
        ranks = [
            subprocess.Popen([*command, str(rank), str(size), folder], env=environment, stdout=subprocess.PIPE, text=True)
            for rank in range(size)
        ]
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
        results: dict[str, dict[str, float]] = json.loads(outputs[0].splitlines()[-1])
        return results


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gate", action="store_true", help="exit with 1 if a budget is exceeded")
    parser.add_argument("--times", action="store_true", help="leave memory out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to a file too")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="which time counts")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--held", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if chosen.peak:
        print_peak(chosen.peak)
        return 0
    if chosen.held:
        print_held(int(chosen.held[0]), int(chosen.held[1]), chosen.held[2])
        return 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    clock = CLOCKS[chosen.clock]
    print(f"torch {torch.__version__} on {device}, DeepSpeed {'not ' if not deepspeed_contenders() else ''}installed")
    print(f"\n| {'checkpoint':30} | fastest, µs | of torch's | spread |")
    print(f"|{'-' * 32}|------------:|-----------:|-------:|")
    costs = times(device, clock)
    figures: dict[str, Any] = {"torch": torch.__version__, "device": device, "clock": chosen.clock}
    figures["costs"] = {name: each._asdict() for name, each in costs.items()}
    for name, each in costs.items():
        print(f"| {name:30} | {each.microseconds:11.1f} | {each.ratio:10.3f} | {each.spread:6.3f} |")
    failed = not all(gate.passes(costs[name].ratio, GATE[device], costs[name].spread) for name in GATED)
    figures["calls"] = print_calls()
    for each in figures["calls"].values():
        failed |= len(each["forward"]) > CALLS_BUDGET[0] or len(each["backward"]) > CALLS_BUDGET[1]
    if tiny(device) is not Scale:
        print("\nµs of two linear layers of so many features and rows, forward and backward; recomputations that stop")
        print("| features | early | never | by size |")
        print("|---------:|------:|------:|--------:|")
        figures["stopping"] = stopping(device, clock)
        for width, (early, never, size) in figures["stopping"].items():
            print(f"| {width:8} | {early:5.0f} | {never:5.0f} | {size:7.0f} |")
    if device == "cpu" and not chosen.times:
        print(f"\n| {'checkpoint':30} | peak, MiB |")
        print(f"|{'-' * 32}|----------:|")
        figures["peaks"] = peaks()
        for name, peak in figures["peaks"].items():
            print(f"| {name:30} | {peak:9.0f} |")
        if torch.distributed.is_available():
            figures["held"] = {size: held(size) for size in RANKS}
            failed |= not print_and_check_held_memory(figures["held"])
    if chosen.json:
        chosen.json.write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return int(chosen.gate and failed)


def print_and_check_held_memory(results: dict[int, dict[str, dict[str, float]]]) -> bool:
    """Print the memory that inputs hold, and return whether a rank holds only its share of partitioned inputs."""
    columns = [(size, layers) for size in RANKS for layers in DEPTHS]
    print("\nMiB held by inputs of 1 MiB between forward and backward, on each of so many ranks, with so many layers")
    print(
        f"| {'checkpoint':20} | " + " | ".join(f"{size} rank{'s' * (size > 1)}, {layers:2}" for size, layers in columns) + " |"
    )
    print(f"|{'-' * 22}|" + "|".join("-" * (12 + (size > 1)) + ":" for size, _ in columns) + "|")
    for name in results[1]:
        cells = (f"{results[size][name][str(layers)]:{11 + (size > 1)}.1f}" for size, layers in columns)
        print(f"| {name:20} | " + " | ".join(cells) + " |")
    return all(results[size]["ours, partition"][str(layers)] <= 1.05 * layers / size + 0.5 for size, layers in columns)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
