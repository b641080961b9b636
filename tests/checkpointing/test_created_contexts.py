"""A checkpoint makes no CUDA context, which takes hundreds of MB, on a GPU that the process does not use."""

from __future__ import annotations

import pytest

from accelerator._machine import torch_build
from tests.support import run, simulated_environment

build = torch_build.read()
pytestmark = pytest.mark.skipif(build is None or build.cuda is None, reason="needs a CUDA build of torch")

CODE = """
import itertools, os, torch
import accelerator as acc
from accelerator import checkpointing

def check(what):
    # As nvidia-smi counts them: this process on each GPU.
    used = [os.getpid() in [each.pid for each in acc.processes(i)] for i in range(2)]
    assert used == [False, True], (what, used)

x = torch.ones(300, device="cuda:1", requires_grad=True)
assert torch.cuda.current_device() == 0
check("a tensor")
generator = torch.Generator("cuda:1").manual_seed(1)
norm = torch.nn.BatchNorm1d(3).to("cuda:1")
side = torch.cuda.Stream(1)

def function(h, generator):
    h = torch.nn.functional.dropout(h.sin(), 0.5)
    return norm((h + torch.rand(h.shape, generator=generator, device="cuda:1")).view(-1, 3)).view(-1).exp()

def in_stream(h, generator):
    with torch.cuda.device(1), torch.cuda.stream(side):
        return function(h, generator)

options = [
    {"checkpoint_in_cpu": True},
    {"profile": True},
    {"synchronize": True},
    {"preserve_rng_state": False},
    {"determinism_check": "none"},
    {"determinism_check": "debug"},
]
partitioned = {"partition_activations": True}
partitions = [{}, partitioned, {**partitioned, "contiguous_checkpointing": True, "num_checkpoints": 3}]
count = 0
for partition in partitions:
    for chosen in [(), *itertools.combinations(options, 1), *itertools.combinations(options, 2)]:
        settings = {key: value for each in (partition, *chosen) for key, value in each.items()}
        if settings.get("determinism_check") == "debug" and not settings.get("preserve_rng_state", True):
            continue  # the random numbers differ
        checkpointing.configure(**settings)
        for autocast in (False, True):
            h = x
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
                for called in (function, in_stream, function):
                    h = checkpointing.checkpoint(called, h, generator)
                    check(settings)
            h.float().sum().backward()
            check(settings)
            count += 1
        checkpointing.reset()
checkpointing.configure()
checkpointing.region_times(clear=True)
check("everything")
print(count)
"""


@pytest.mark.skipif(
    build is not None and build.version.startswith("2.6."),
    reason="torch 2.6 makes a context when a program leaves torch.cuda.stream()",
)
def test_no_checkpoint_makes_a_context_on_another_gpu() -> None:
    assert int(run(CODE, simulated_environment(gpus=2)).split()[-1]) == 126
