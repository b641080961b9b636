"""``python docs/make_figures.py [measure {devices,memory,operations} | draw]``: README's plots, from the benchmarks' figures.

``measure`` runs one of the benchmarks with this Python and keeps what it says in docs/figures.json: ``devices`` and
``operations`` on simulated GPUs, so with a CUDA build of torch; ``memory`` on the CPU, beside DeepSpeed where it is installed.
``draw``, the default, draws all that is kept there as docs/*.svg, for which it needs matplotlib and no torch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
KEPT = HERE / "figures.json"
DEVICES = (1, 8, 72)

# Each call is timed in turns with torch's, the last of them after both have brought the driver up.
PROGRAM = """
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
found = {
    "device_count(), before init": fastest(acc.device_count, torch.cuda.device_count, number=20),
    "utilization(0)": fastest(lambda: acc.utilization(0), lambda: torch.cuda.utilization(0)),
}
torch.ones(1, device="cuda")
found["current_device_index()"] = fastest(acc.current_device_index, theirs.current_device_index)
found["memory_allocated()"] = fastest(acc.memory_allocated, torch.cuda.memory_allocated)
print(json.dumps(found))
"""


def simulated(gpus: int, *command: str) -> str:
    run = [sys.executable, "-m", "accelerator", "simulate", "--gpus", str(gpus), "--memory", "1GiB", "--", sys.executable]
    return subprocess.run([*run, *command], cwd=HERE.parent, check=True, capture_output=True, text=True, timeout=400).stdout


def measure_devices() -> Any:
    """Microseconds of ours and of torch's, by the number of GPUs."""
    return {gpus: json.loads(simulated(gpus, "-W", "ignore", "-c", PROGRAM).splitlines()[-1]) for gpus in DEVICES}


def measure_operations() -> Any:
    """The rows of the benchmark of simulation that are about ops."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        simulated(2, "-m", "tests.benchmarks.simulation", "--json", file.name)
        return [row for row in json.loads(Path(file.name).read_text(encoding="utf-8")) if row["unit"] == "µs"]


def measure_memory() -> Any:
    """The figures of the benchmark of checkpointing."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "tests.benchmarks.checkpointing", "--json", file.name]
        subprocess.run(command, cwd=HERE.parent, check=True, stdout=subprocess.DEVNULL, timeout=900)
        return json.loads(Path(file.name).read_text(encoding="utf-8"))


MEASURES = {"devices": measure_devices, "memory": measure_memory, "operations": measure_operations}


def kept() -> dict[str, Any]:
    return json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}


def draw_devices(axes: Any, figures: Any) -> None:
    for index, call in enumerate(figures[str(DEVICES[0])]):
        for place, (whose, style) in enumerate((("here", "-"), ("torch", "--"))):
            values = [figures[str(gpus)][call][place] for gpus in DEVICES]
            axes.plot(DEVICES, values, style, color=f"C{index}", marker="o", markersize=3, label=f"{call}, {whose}")
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="µs a call", xticks=DEVICES, xticklabels=DEVICES)
    axes.minorticks_off()
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


def draw_memory(axes: Any, figures: Any) -> None:
    """What one rank holds against the layers; a color a contender, a line style a number of ranks."""
    held = figures["held"]
    for style, ranks in zip(("-", "--", ":"), held, strict=True):
        for index, (name, by_layers) in enumerate(held[ranks].items()):
            layers = [int(each) for each in by_layers]
            label = f"{name}, {ranks} rank{'s' * (ranks != '1')}"
            axes.plot(layers, list(by_layers.values()), style, color=f"C{index}", marker="o", markersize=3, label=label)
    axes.set(xlabel="layers, of 1 MiB of input each", ylabel="MiB held on a rank")
    axes.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))


def draw_operations(axes: Any, figures: Any) -> None:
    rows = [row for row in figures if row["unit"] == "µs"]
    axes.barh([row["what"] for row in rows], [row["minimum"] for row in rows], xerr=[row["spread"] for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel="µs more than on the CPU")


DRAWINGS = {"devices": draw_devices, "memory": draw_memory, "operations": draw_operations}


def draw() -> None:
    import matplotlib

    matplotlib.use("svg")
    # The same figures give the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "accelerator", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    for name, figures in kept().items():
        figure, axes = pyplot.subplots(figsize=(7.5, 3.2), layout="constrained")
        DRAWINGS[name](axes, figures)
        axes.grid(alpha=0.3)
        figure.savefig(HERE / f"{name}.svg", metadata={"Date": None})
        pyplot.close(figure)
        print(HERE / f"{name}.svg")


def main(arguments: list[str]) -> None:
    match arguments or ["draw"]:
        case ["measure", name] if name in MEASURES:
            figures = {**kept(), name: MEASURES[name]()}
            KEPT.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        case ["draw"]:
            draw()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
