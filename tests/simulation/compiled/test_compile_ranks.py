"""Compiled functional collectives, DDP, FSDP2 and DTensor on two nccl ranks return the results of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import simulated_environment
from tests.support.simulation import linux_only
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [linux_only, needs_cuda_torch, pytest.mark.slow]

PROGRAM = """
import os
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

rank = int(os.environ["LOCAL_RANK"])
device = f"cuda:{rank}"
torch.cuda.set_device(rank)
dist.init_process_group("nccl")

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4)).to(device)

data = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).to(device)
part = data.chunk(2)[rank]
single = net()
single(data).square().mean().backward()
expected = [parameter.grad for parameter in single.parameters()]

def check_training(model):
    for _ in range(2):
        model.zero_grad()
        model(part).square().mean().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        result = parameter.grad
        result = result.full_tensor() if hasattr(result, "full_tensor") else result
        torch.testing.assert_close(result, gradient, rtol=1e-4, atol=1e-6)

def reduce_and_gather(x):
    return collectives.all_reduce(x * 2, "sum", dist.group.WORLD) + 1, collectives.all_gather_tensor(x, 0, dist.group.WORLD)

for one, other in zip(reduce_and_gather(part), torch.compile(reduce_and_gather, fullgraph=True)(part), strict=True):
    torch.testing.assert_close(other, one + 0)

check_training(torch.compile(nn.parallel.DistributedDataParallel(net(), device_ids=[rank])))

sharded = net()
for layer in sharded:
    if isinstance(layer, nn.Linear):
        layer.compile()
        fully_shard(layer)
check_training(torch.compile(fully_shard(sharded)))

mesh = init_device_mesh("cuda", (2,))
gather = torch.compile(lambda x: (x * 2).redistribute(mesh, [Replicate()]).to_local(), fullgraph=True)
torch.testing.assert_close(gather(distribute_tensor(data, mesh, [Shard(0)])), data * 2)
print("right", flush=True)
dist.destroy_process_group()
"""


def test_compiled_collectives_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    arguments = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(tmp_path / "program.py")]
    variables = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}  # compiles in other processes
    env = simulated_environment(variables, gpus=2, state=tmp_path / "state")
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True)
    assert done.stdout.count("right") == 2, done.stderr
