"""``python -m tests.benchmarks.rehearsal [--gate]``: the cost of a rehearsal.

Run it on GPUs that compute nothing: ``python -m accelerator simulate --memory 400GiB --no-compute -- python -m
tests.benchmarks.rehearsal``. It alternates training steps of Llama 3.1 8B on a simulated GPU and on meta tensors, in CPU time.
With ``--gate`` the exit status is 1 if the ratio exceeds its budget, as for the other benchmarks, or the host's memory 2 GB.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from . import gate

BUDGET = 2.0
HOST_MEMORY = 2e9
ROUNDS = 5
WIDTH, LAYERS, HEADS, KEY_HEADS, HIDDEN, WORDS, LENGTH = 4096, 32, 32, 8, 14336, 128256, 4096


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        features = WIDTH // HEADS
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, KEY_HEADS * features, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        q, k, v = (layer(normed).unflatten(-1, (-1, WIDTH // HEADS)) for layer in (self.query, self.key, self.value))
        k, v = (part.repeat_interleave(HEADS // KEY_HEADS, 2, output_size=HEADS) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def timer(device: str) -> Callable[[], float]:
    """Return a function that takes one training step and returns its CPU time. The first steps are taken."""
    with torch.device("meta"):
        layers = [nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(LAYERS)), nn.RMSNorm(WIDTH)]
        model = nn.Sequential(*layers, nn.Linear(WIDTH, WORDS, bias=False)).bfloat16()
    model = model.to_empty(device=device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    batch, target = (torch.zeros(1, LENGTH, dtype=torch.int64, device=device) for _ in range(2))

    def seconds() -> float:
        start = time.process_time()
        optimizer.zero_grad()
        functional.cross_entropy(model(batch).flatten(0, 1).float(), target.flatten()).backward()
        optimizer.step()
        return time.process_time() - start

    seconds()
    seconds()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gate", action="store_true", help="exit with status 1 if a figure is above its budget")
    options = parser.parse_args()
    if os.environ.get("ACCELERATOR_SIM_COMPUTE") != "0":
        parser.error("run it under 'python -m accelerator simulate --memory 400GiB --no-compute --'")
    torch.set_num_threads(1)
    on_gpu, on_meta = timer("cuda"), timer("meta")
    times = [(on_gpu(), on_meta()) for _ in range(ROUNDS)]
    ratios = [rehearsed / meta for rehearsed, meta in times]
    ratio, spread = min(rehearsed for rehearsed, _ in times) / min(meta for _, meta in times), gate.spread(ratios)
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"a rehearsed step of Llama 3.1 8B, of the step on meta tensors: {ratio:.2f} (spread {spread:.2f}, budget {BUDGET})")
    print(f"memory of the host: {host / 1e9:.2f} GB (budget {HOST_MEMORY / 1e9:.0f})")
    return int(options.gate and not (gate.passes(ratio, BUDGET, spread) and host <= HOST_MEMORY))


if __name__ == "__main__":
    sys.exit(main())
