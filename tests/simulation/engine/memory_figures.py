"""``python -m tests.simulation.engine.memory_figures``: compares the memory figures of ops with and without the engine.

Runs samples of PyTorch's operator database three times each, and prints the samples whose figures differ. The exit status is
1 if there are any but those of EXPECTED.
"""

from __future__ import annotations

import gc
import itertools
import json
import subprocess
import sys
import tempfile
from typing import Any

from tests.support import simulated_environment

RUNS = 3
SAMPLES = 6
FIGURES = (
    "allocated_bytes.all.current",
    "allocated_bytes.all.peak",
    "allocation.all.allocated",
    "allocated_bytes.all.allocated",
)

# Why the figures of these entries differ.
EXPECTED = {"linalg.lstsq": "the engine's solution keeps LAPACK's larger storage, which Python copies into one of its size"}


def measure() -> dict[str, list[list[int]]]:
    """Return by sample the changes of the figures in each run."""
    import torch

    from tests.simulation.ops import operators

    figures: dict[str, list[list[int]]] = {}
    samples: list[Any] = []
    gc.disable()  # a collection would free what earlier samples left in cycles
    for name, op in sorted(operators.entries().items()):
        dtype = operators.dtype_of(op)
        if dtype is None:
            continue
        gc.collect()
        torch.manual_seed(0)
        for index in range(SAMPLES):
            try:
                samples = samples if index else list(itertools.islice(op.sample_inputs("cuda", dtype), SAMPLES))
                runs = [changes(op, samples[index]) for _ in range(RUNS)]
            except Exception:  # not supported, or there are no more samples
                break
            figures[f"{name}[{index}]"] = runs
    return figures


def changes(op: Any, sample: Any) -> list[int]:
    """Return how a call changes the figures."""
    import torch

    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    result = op(sample.input, *sample.args, **sample.kwargs)
    after = torch.cuda.memory_stats()
    del result
    return [after.get(name, 0) - before.get(name, 0) for name in FIGURES]


def run(**variables: str) -> dict[str, list[list[int]]]:
    environment = {**simulated_environment(gpus=1), **variables}
    command = [sys.executable, "-W", "ignore", "-m", "tests.simulation.engine.memory_figures", "--measure"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, list[list[int]]] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> int:
    if "--measure" in sys.argv:
        print(json.dumps(measure()))
        return 0
    with tempfile.TemporaryDirectory() as cache:
        without = run(XDG_CACHE_HOME=cache, TMPDIR=cache, CXX="no-compiler")
    with_engine = run()
    different = {name for name in with_engine.keys() | without.keys() if with_engine.get(name) != without.get(name)}
    for name in sorted(different):
        print(name, "engine:", with_engine.get(name), "Python:", without.get(name))
    unexpected = {name for name in different if name.partition("[")[0].removesuffix(".grad_oriented") not in EXPECTED}
    print(f"{len(with_engine)} samples, {len(different)} differ, {len(unexpected)} of them unexpected ({', '.join(FIGURES)})")
    return int(bool(unexpected))


if __name__ == "__main__":
    sys.exit(main())
