"""``python docs/make_figures.py [measure {devices,memory,operations} | draw | rehearse]``: the guide's plots.

``measure`` measures on simulated GPUs with this Python, whose torch is a CUDA build, and writes the result to
docs/figures.json. ``draw``, the default, draws all figures of that file as docs/*.svg. It needs matplotlib and no torch.
``rehearse`` rehearses README's example with this Python, and writes the picture docs/rehearsal.svg.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FIGURES = HERE / "figures.json"
DEVICES = (1, 8, 72)

# Times calls of this package and of torch alternately. The last two run after initialization.
DEVICE_PROGRAM = """
import json, time, torch
import accelerator as acc

def fastest(*calls, number=200, rounds=50):
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for place, call in enumerate(calls):
            start = time.perf_counter()
            for _ in range(number):
                call()
            best[place] = min(best[place], (time.perf_counter() - start) / number * 1e6)
    return best

theirs = torch.accelerator
microseconds = {
    "device_count(), before init": fastest(acc.device_count, torch.cuda.device_count, number=20),
    "utilization(0)": fastest(lambda: acc.utilization(0), lambda: torch.cuda.utilization(0)),
}
torch.ones(1, device="cuda")
microseconds["current_device_index()"] = fastest(acc.current_device_index, theirs.current_device_index)
microseconds["memory_allocated()"] = fastest(acc.memory_allocated, torch.cuda.memory_allocated)
print(json.dumps(microseconds))
"""

# Without a checkpoint, a layer saves three tensors of 1 MiB for backward. With a checkpoint, it saves only its input.
MEMORY_PROGRAM = """
import contextlib, json, os, sys, tempfile
import torch, torch.distributed as dist, torch.multiprocessing as mp, torch.utils.checkpoint as of_torch
import accelerator as acc
from accelerator import checkpointing

LAYERS, MIB = 24, 2**20

def measure(run):
    blocks = torch.nn.ModuleList(
        torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 512)) for _ in range(LAYERS)
    ).cuda()
    x = torch.randn(512, 512, device="cuda", requires_grad=True)
    for parameter in blocks.parameters():  # drop their gradients, which are not measured
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    before = acc.memory_allocated()
    acc.reset_peak_memory_stats()
    h = x
    for block in blocks:
        h = run(block, h)
    loss = h.sum()
    del h
    held = acc.memory_allocated() - before
    loss.backward()
    return held / MIB, (acc.max_memory_allocated() - before) / MIB

def offloaded_by_torch(block, h):
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return of_torch.checkpoint(block, h, use_reentrant=False)

def rank_main(rank, size, folder):
    acc.set_device_index(rank)
    if size > 1:
        dist.init_process_group("nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
        checkpointing.configure(partition_activations=True, group=dist.group.WORLD)
        results = {f"partitioned, {size} ranks": measure(checkpointing.checkpoint)}
        dist.destroy_process_group()
    else:
        results = {
            "no checkpoint": measure(lambda block, h: block(h)),
            "torch": measure(lambda block, h: of_torch.checkpoint(block, h, use_reentrant=False)),
            "torch, save_on_cpu": measure(offloaded_by_torch),
        }
        checkpointing.configure()
        results["checkpoint"] = measure(checkpointing.checkpoint)
        checkpointing.configure(checkpoint_in_cpu=True)
        results["checkpoint_in_cpu"] = measure(checkpointing.checkpoint)
    if rank == 0:
        print(json.dumps(results), flush=True)

if __name__ == "__main__":
    for size in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(rank_main, (size, folder), nprocs=size)
"""


def simulated(gpus: int, *command: str) -> str:
    run = [sys.executable, "-m", "accelerator", "simulate", "--gpus", str(gpus), "--memory", "1GiB", "--", sys.executable]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(
        [*run, *command], cwd=HERE.parent, env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=400
    )
    return done.stdout


def measure_devices() -> Any:
    """Return the microseconds of calls of this package and of torch, by the number of GPUs."""
    return {gpus: json.loads(simulated(gpus, "-W", "ignore", "-c", DEVICE_PROGRAM).splitlines()[-1]) for gpus in DEVICES}


def measure_operations() -> Any:
    """Return the rows of the simulation's benchmark that time ops."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        simulated(2, "-m", "tests.benchmarks.simulation", "--json", file.name)
        return [row for row in json.loads(Path(file.name).read_text(encoding="utf-8")) if row["unit"] == "µs"]


def measure_memory() -> dict[str, list[float]]:
    """Return MiB beyond parameters and input, after the forward pass and at the peak, for each kind of checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "memory.py")  # a file, because spawned processes import it
        program.write_text(MEMORY_PROGRAM, encoding="utf-8")
        printed = simulated(4, "-W", "ignore", str(program))
    figures: dict[str, list[float]] = {}
    for line in printed.splitlines():
        figures |= json.loads(line)
    return figures


MEASURES = {"devices": measure_devices, "memory": measure_memory, "operations": measure_operations}


def read_figures() -> dict[str, Any]:
    return json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}


def draw_devices(axes: Any, figures: Any) -> None:
    for index, call in enumerate(figures[str(DEVICES[0])]):
        for place, (whose, style) in enumerate((("here", "-"), ("torch", "--"))):
            values = [figures[str(gpus)][call][place] for gpus in DEVICES]
            axes.plot(DEVICES, values, style, color=f"C{index}", marker="o", markersize=3, label=f"{call}, {whose}")
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="µs a call", xticks=DEVICES, xticklabels=DEVICES)
    axes.minorticks_off()
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)


def draw_memory(axes: Any, figures: Any) -> None:
    """Draw two bars for each kind of checkpoint: memory after the forward pass and at the peak."""
    names = list(figures)
    for place, label in enumerate(("after the forward pass", "at most")):
        rows = [row + (place - 0.5) * 0.38 for row in range(len(names))]
        bars = axes.barh(rows, [figures[name][place] for name in names], height=0.36, label=label)
        axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="MiB on each GPU beyond parameters and input")
    axes.margins(x=0.13)
    axes.legend(loc="lower right")


def draw_operations(axes: Any, figures: Any) -> None:
    rows = [row for row in figures if row["unit"] == "µs"]
    axes.barh([row["name"] for row in rows], [row["minimum"] for row in rows], xerr=[row["spread"] for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel="µs more than on the CPU")


DRAWINGS = {"devices": draw_devices, "memory": draw_memory, "operations": draw_operations}


def draw() -> None:
    import matplotlib

    matplotlib.use("svg")
    # With a fixed salt, the same figures give the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "accelerator", "svg.fonttype": "none", "font.size": 10})
    from matplotlib import pyplot

    for name, figures in read_figures().items():
        # Narrow and tall, so that the text is readable on a phone.
        figure, axes = pyplot.subplots(figsize=(5.6, 4.2), layout="constrained")
        DRAWINGS[name](axes, figures)
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        figure.savefig(HERE / f"{name}.svg", metadata={"Date": None})
        pyplot.close(figure)
        print(HERE / f"{name}.svg")


def readme_example() -> tuple[str, list[str]]:
    """Return the program that README rehearses, and the arguments of the command."""
    text = (HERE.parent / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n([^`]*TransformerEncoder[^`]*)```", text)
    (command,) = re.findall(r"^python -m accelerator (rehearse .*) -- python train\.py$", text, re.MULTILINE)
    return program, command.split()


def rehearse() -> None:
    program, arguments = readme_example()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(program, encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
        command = [sys.executable, "-m", "accelerator", *arguments, "--", sys.executable, "train.py"]
        subprocess.run(command, cwd=folder, env=environment, check=True, timeout=400)
        shutil.copy(Path(folder, arguments[-1]), HERE / "rehearsal.svg")


def main(arguments: list[str]) -> None:
    match arguments or ["draw"]:
        case ["measure", name] if name in MEASURES:
            figures = {**read_figures(), name: MEASURES[name]()}
            FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        case ["draw"]:
            draw()
        case ["rehearse"]:
            rehearse()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
