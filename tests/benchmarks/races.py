"""``python -m tests.benchmarks.races [--gate]``: the cost of race detection.

Two processes on simulated GPUs, one with ``races="report"``, take turns at a training step of a small GPT, in CPU time on one
thread. With ``--gate`` the exit status is 1 if the ratio exceeds its budget, as for the other benchmarks.

What race detection costs while it is off, the gate of ``tests.benchmarks.simulation`` measures: an op's time beside the CPU's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from types import TracebackType

from accelerator.simulation import environment

from . import gate

BUDGET = 1.5
ROUNDS, STEPS = 7, 4
_WORKER = """
import sys, time, torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(256, 8, 1024, 0.0, "gelu", batch_first=True, norm_first=True)
layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
model = nn.Sequential(nn.Embedding(512, 256), layers, nn.Linear(256, 512)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
tokens = torch.randint(512, (4, 128)).cuda()

def step():
    start = time.process_time()
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(tokens).flatten(0, -2), tokens.flatten()).backward()
    optimizer.step()
    torch.cuda.synchronize()
    return time.process_time() - start

step()
for line in sys.stdin:
    print(min(step() for _ in range(int(line))), flush=True)
"""


class Process:
    """A process that takes training steps when it is asked to."""

    def __init__(self, finds_races: bool) -> None:
        machine = environment(1, races="report" if finds_races else None)
        command = [sys.executable, "-c", _WORKER]
        self._process = subprocess.Popen(command, env=machine, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Process:
        return self

    def seconds(self) -> float:
        """Return the CPU time of the fastest of a few steps."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(STEPS, file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.communicate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gate", action="store_true", help="exit with status 1 if the ratio is above its budget")
    options = parser.parse_args()
    with Process(finds_races=False) as off, Process(finds_races=True) as on:
        off.seconds()
        on.seconds()
        ratios = [on.seconds() / off.seconds() for _ in range(ROUNDS)]
    ratio, spread = min(ratios), gate.spread(ratios)
    passes = gate.passes(ratio, BUDGET, spread)
    print(f"GPT step with race detection, ratio {ratio:.2f}, spread {spread:.2f}, budget {BUDGET}{'' if passes else '  ABOVE'}")
    return int(options.gate and not passes)


if __name__ == "__main__":
    sys.exit(main())
