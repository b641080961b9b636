"""Races of compiled code, of Triton kernels and of collectives."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tests import support
from tests.support import simulated_environment
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = needs_cuda_torch

_REPORT = """
from accelerator import simulation
for race in simulation.races():
    print(race.first)
    print(race.second)
    print(race.advice)
    print(race.is_possible)
"""

_TRITON = """
import torch, triton, triton.language as tl

@triton.jit
def add_one(source, target, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(target + offsets, tl.load(source + offsets, mask) + 1, mask)

def launch(x, y):
    add_one[(2,)](x, y, x.numel(), BLOCK=512)

side = torch.cuda.Stream()
x, y = torch.ones(2000, device="cuda"), torch.zeros(2000, device="cuda")
torch.cuda.synchronize()
with torch.cuda.stream(side):
    launch(x[:1000], y[:1000])  # more elements than a launch has separate pieces
y[1000:].add_(1)  # other elements
x.sum()  # reads, as the kernel does
y[999:].sum()

@triton.jit
def count(target, flag, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.atomic_add(target + offsets, 1.0, offsets < 10)
    tl.atomic_cas(flag, 0, 1)

@triton.jit
def spread(source, target, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(target + offsets, tl.load(source + 2 * offsets))
torch.cuda.synchronize()
x, y = torch.ones(2000, device="cuda"), torch.zeros(2000, device="cuda")
totals, flag = torch.zeros(100, device="cuda"), torch.zeros(2, dtype=torch.int32, device="cuda")
torch.cuda.synchronize()
with torch.cuda.stream(side):
    launch(x[500:1000], y[500:1000])
    count[(1,)](totals, flag, BLOCK=16)
y[:500].sum()
x[1000:].zero_()
x[999:].zero_()
totals[10:].sum()
flag[1:].sum()
totals[:10].sum()
flag[:1].sum()
torch.cuda.synchronize()
with torch.cuda.stream(side):
    spread[(1,)](x, y, BLOCK=128)
    spread[(1,)](x, y, BLOCK=512)  # in more pieces than a launch has
x[1:2].zero_()
y[511:].sum()
"""


def _run(program: str) -> list[str]:
    done = support.python(program + _REPORT, simulated_environment(gpus=2, races="report"), timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_triton_kernel(tmp_path: Path) -> None:
    file = tmp_path / "triton_program.py"  # Triton reads the source of a kernel
    file.write_text(_TRITON)
    program = f"import torch, runpy\nrunpy.run_path({str(file)!r})\n"
    first, second, advice, is_possible, *lines = _run(program)
    assert first.startswith("add_one on stream 1 of cuda:0 writes it: ")
    assert first.endswith("triton_program.py:11 in launch")
    assert second.startswith("aten::sum on the default stream of cuda:0 reads it: ")
    assert second.endswith("triton_program.py:20 in <module>")
    assert "wait_stream" in advice
    assert is_possible == "False"
    found = [" ".join(lines[i : i + 2]) + " " + lines[i + 3] for i in range(0, len(lines), 4)]
    assert [re.sub(r" on \S.*?of cuda:0| it:|\S*program.py:| in \S+", "", each) for each in found] == [
        "add_one reads 11 aten::zero_ writes 41 False",
        "count writes 38 aten::sum reads 44 False",
        "count writes 38 aten::sum reads 45 False",
        "spread may read 49 aten::zero_ writes 50 True",
        "spread writes 49 aten::sum reads 51 False",
    ]


@pytest.mark.slow
def test_triton_kernel_raises_as_the_second_access(tmp_path: Path) -> None:
    file = tmp_path / "triton_program.py"
    file.write_text(
        _TRITON.replace("    launch(x[:1000], y[:1000])", "    y.add_(1)").partition("y[1000:]")[0]
        + """
try:
    launch(x, y)
except RuntimeError as error:
    print(str(error).partition(" of ")[0])
"""
    )
    done = support.python(f"import runpy\nrunpy.run_path({str(file)!r})\n", simulated_environment(gpus=1, races="raise"))
    assert (done.returncode, done.stdout) == (0, "race: 4096 bytes\n"), done.stdout + done.stderr


@pytest.mark.slow
def test_compiled_code() -> None:
    program = """
import torch

@torch.compile
def scale_and_add(scale, x, y):
    z = (scale * x).sin()
    y.add_(1)
    return z

side = torch.cuda.Stream()
x, y, scale = torch.ones(200, device="cuda"), torch.zeros(200, device="cuda"), torch.ones(())  # of the host
scale_and_add(scale, x, y)
torch.cuda.synchronize()
with torch.cuda.stream(side):
    z = scale_and_add(scale, x, y)
x.sum()
y.sum()
z.sum()
graph = torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    z = scale_and_add(scale, x, y)
torch.cuda.synchronize()
with torch.cuda.stream(side):
    graph.replay()
y.sum()
z.sum()
"""
    lines = _run(program)
    assert all(re.match(r"triton_\w+ on stream 1 of cuda:0 writes it: ", line) for line in lines[0::4]), lines
    assert [line.rpartition(" in ")[2] for line in lines[0::4]] == ["scale_and_add"] * 2 + ["<module>"] * 2
    places = ["17 in <module>", "18 in <module>", "26 in <module>", "27 in <module>"]
    assert [line.rpartition(":")[2] for line in lines[1::4]] == places


# While the program sleeps, NCCL's watchdog sees that the collective has ended. That orders nothing.
_RANK = """
import torch, ctypes, sys, time
import torch.distributed as dist

rank = int(sys.argv[1])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{sys.argv[2]}")
x = torch.ones(1000, device="cuda")
dist.all_reduce(x)
torch.cuda.synchronize()
work = dist.all_reduce(x, async_op=True)
time.sleep(float(sys.argv[4]))
if sys.argv[3] == "racy":
    x + 1
for _ in range(4):
    work.wait()
    x + 1
work = dist.all_reduce(x, async_op=True)
while ctypes.c_float.from_address(x.data_ptr()).value != 8:
    time.sleep(0.01)
time.sleep(0.2)  # the memory has the sum a little before the work counts as completed
assert work.is_completed()  # the first answer: a program need not ask again
x + 1
# Each rank reads its source and writes its target, to the last number.
one, both, totals = torch.ones(1000, device="cuda"), torch.ones(2000, device="cuda"), torch.ones(1000, device="cuda")
torch.cuda.synchronize()
gathering = dist.all_gather_into_tensor(both, one, async_op=True)
if sys.argv[3] == "racy":
    one[999:].zero_()
    both[1999:].sum()
gathering.wait()
both.zero_()
one.zero_()
scattering = dist.reduce_scatter_tensor(totals, both, async_op=True)
if sys.argv[3] == "racy":
    both[1999:].zero_()
    totals[999:].sum()
scattering.wait()
both.zero_()
totals.zero_()
sending = dist.broadcast(one, 0, async_op=True)
if sys.argv[3] == "racy":
    one[999:].sum()
sending.wait()
one.zero_()
torch.cuda.synchronize()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("seconds", support.sample([0, 1], 0))
@pytest.mark.parametrize("kind", ["racy", "ordered"])
def test_collective(kind: str, seconds: float) -> None:
    for lines in _ranks(_RANK, kind, str(seconds)):
        if kind == "ordered":
            assert lines == []
            continue
        first, second, advice, is_possible = lines[:4]
        assert lines[6::4] == [advice] * 5
        assert lines[7::4] == ["False"] * 5
        pairs = zip(lines[4::4], lines[5::4], strict=True)
        assert [[re.sub(r" on .* of cuda:\d| in <module>.*|<string>:", "", each) for each in pair] for pair in pairs] == [
            ["ncclAllGather reads it: 27", "aten::zero_ writes it: 29"],
            ["ncclAllGather writes it: 27", "aten::sum reads it: 30"],
            ["ncclReduceScatter reads it: 34", "aten::zero_ writes it: 36"],
            ["ncclReduceScatter writes it: 34", "aten::sum reads it: 37"],
            ["ncclBroadcast writes it: 41", "aten::sum reads it: 43"],
        ]
        assert first.startswith("ncclAllReduce on stream ")
        assert "writes it: " in first
        assert ":11 in <module>" in first
        assert "aten::add on the default stream" in second
        assert ":14 in <module>" in second
        assert advice == "call work.wait() on the collective before the second access"
        assert is_possible == "False"


def _ranks(program: str, *arguments: str, races: str = "report") -> list[list[str]]:
    """Run two ranks and return what each prints."""
    from concurrent.futures import ThreadPoolExecutor

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = simulated_environment(gpus=2, races=races)

    def rank(number: int) -> list[str]:
        done = support.python(program + _REPORT, environment, str(number), str(port), *arguments, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, range(2)))


_TRAINING = """
import torch, sys
import torch.distributed as dist
from torch import nn

rank, kind = int(sys.argv[1]), sys.argv[3]
torch.cuda.set_device(rank)
dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{sys.argv[2]}")
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
if kind.startswith("ddp"):
    options = dict(bucket_cap_mb=0.03, gradient_as_bucket_view="views" in kind, static_graph="static" in kind)
    model = nn.parallel.DistributedDataParallel(model.cuda(), device_ids=[rank], **options)
elif kind.startswith("fsdp2"):
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
    policy = CPUOffloadPolicy() if "offload" in kind else OffloadPolicy()
    model = model if "offload" in kind else model.cuda()
    for layer in (*model, model):
        fully_shard(layer, offload_policy=policy)
else:
    from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=rank, forward_prefetch=True,
        cpu_offload=CPUOffload("offload" in kind),
    )
optimizer = torch.optim.AdamW(model.parameters())
for step in range(5):
    x = torch.randn(16, 64).pin_memory().cuda(non_blocking=True)
    if "no_sync" in kind and step % 2:
        with model.no_sync():
            model(x).sum().backward()
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss.item()
torch.cuda.synchronize()
dist.destroy_process_group()
"""
_TRAININGS = ("ddp", "ddp views", "ddp static", "ddp no_sync", "fsdp1", "fsdp1 offload", "fsdp2", "fsdp2 offload")


@pytest.mark.slow
@pytest.mark.parametrize("kind", _TRAININGS)
def test_training_of_ranks_is_silent(kind: str) -> None:
    if "fsdp2" in kind:
        pytest.importorskip("torch.distributed.fsdp", reason="needs torch.distributed")
    assert _ranks(_TRAINING, kind) == [[], []]


_PIPELINE = """
import torch, sys
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

rank, kind = int(sys.argv[1]), sys.argv[3]
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", rank=rank, world_size=2, init_method=f"tcp://127.0.0.1:{sys.argv[2]}", device_id=device)
stages_of_rank = 2 if kind == "interleaved" else 1
modules = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()).to(device) for _ in range(stages_of_rank)]
stages = [PipelineStage(module, rank + 2 * i, 2 * stages_of_rank, device) for i, module in enumerate(modules)]
if kind == "interleaved":
    schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=nn.functional.mse_loss)
else:
    schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[kind](stages[0], 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.AdamW([parameter for module in modules for parameter in module.parameters()])
for _ in range(3):
    batch = torch.randn(16, 64).pin_memory().to(device, non_blocking=True)
    if rank == 0:
        schedule.step(batch)
    else:
        losses = []
        schedule.step(target=batch, losses=losses)
        assert len(losses) == 4
        torch.stack(losses).mean().item()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.synchronize()
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved"])
def test_pipeline_schedule_is_silent(kind: str) -> None:
    assert _ranks(_PIPELINE, kind, races="raise") == [[], []]
