"""``python -m tests.simulation.rehearsal.rehearsed_ranks FOLDER [NAME...]``: the peaks of small programs of four ranks.

Writes the peaks of each rank to a file of FOLDER. Run it on four GPUs of a simulated machine that computes and on those of one
that does not, and compare the files. Leaves out programs that the installed torch cannot run.
"""

from __future__ import annotations

import inspect
import itertools
import os
import pickle
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .rehearsed_programs import STEPS, measure

WORLD = 4
WIDTH, HIDDEN, WORDS, LENGTH, BATCH = 128, 512, 1000, 64, 4

PROGRAMS: dict[str, Callable[[], object]] = {}
UNSUPPORTED: set[str] = set()
"""Programs that this version of torch cannot run."""


def program(function: Callable[[], object]) -> Callable[[], object]:
    PROGRAMS[function.__name__] = function
    return function


def needs_ignored_parameters(function: Callable[[], object]) -> Callable[[], object]:
    """Mark a program that passes ``ignored_params`` to ``fully_shard``, which torch 2.6 does not take."""
    from torch.distributed.fsdp import fully_shard

    if "ignored_params" not in inspect.signature(fully_shard).parameters:
        UNSUPPORTED.add(function.__name__)
    return function


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Attend(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [project(x).unflatten(-1, (-1, 32)).transpose(1, 2) for project in (self.query, self.key, self.value)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, feed: Callable[[], nn.Module] = Feed) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.feed = Attend(), feed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.first(x))
        return x + self.feed(self.second(x))


class Model(nn.Module):
    def __init__(self, layers: int = 2, checkpoints: bool = False, feed: Callable[[], nn.Module] = Feed) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Layer(feed) for _ in range(layers))
        self.checkpoints = checkpoints

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.head(x)


def tokens(batch: int = BATCH) -> torch.Tensor:
    return torch.randint(WORDS, (batch, LENGTH)).cuda()


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def release_finished_works() -> None:
    """Make the process group release the tensors of its finished collectives.

    From torch 2.8 on, a work holds its tensors until it is waited for. DistributedDataParallel waits for the work's future
    instead. Then a thread of the process group, which looks at the works every 100 ms, notes that the work has ended, and the
    next collective releases its tensors. When that is depends on the time that the program takes.
    """
    torch.cuda.synchronize()
    probe = torch.zeros(1, device="cuda")
    address = probe.data_ptr()
    dist.all_reduce(probe, async_op=True)
    del probe
    deadline = time.monotonic() + 60
    while True:
        is_held = torch.tensor([is_allocated(address)], dtype=torch.int64).cuda()
        dist.all_reduce(is_held)  # all ranks make the same number of calls
        if not is_held.item():
            return
        assert time.monotonic() < deadline, "the process group does not release the tensor of a finished collective"
        del is_held
        time.sleep(0.02)


def is_allocated(address: int) -> bool:
    blocks = (block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"])
    return any(block["address"] == address and block["state"] == "active_allocated" for block in blocks)


def train(model: nn.Module, micro: int = 1, clip: bool = False, loss: Any = loss_of, **options: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for _ in range(STEPS):
        for _ in range(micro):
            batch = tokens()
            loss(model(batch), batch).backward()
            if isinstance(model, nn.parallel.DistributedDataParallel):
                release_finished_works()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()


# ---- Replicated. ----


def _replicate(micro: int = 1, compresses: bool = False, **options: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    made = nn.parallel.DistributedDataParallel(Model().cuda(), **options)
    if compresses:
        made.register_comm_hook(None, bf16_compress_hook)
    train(made, micro)


for _name, _options in {
    "replicated": {},
    "replicated_with_views": {"gradient_as_bucket_view": True},
    "replicated_small_buckets": {"bucket_cap_mb": 0.1},
    "replicated_static": {"static_graph": True},
    "replicated_compressed": {"compresses": True},
    "replicated_accumulated": {"micro": 2},
}.items():
    PROGRAMS[_name] = partial(_replicate, **_options)


@program
def sharded_optimizer() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(Model().cuda())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    for _ in range(STEPS):
        batch = tokens()
        loss_of(model(batch), batch).backward()
        release_finished_works()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()


@program
def synchronized_batch_norm() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)).cuda()
    model(torch.zeros(2, 3, 32, 32, device="cuda"))
    made = nn.parallel.DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model))
    for _ in range(STEPS):
        made(torch.randn(8, 3, 32, 32, device="cuda")).square().mean().backward()
    torch.cuda.synchronize()


# ---- Sharded. ----


def shard(model: Model, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def _fully_shard(checkpoints: bool = False, micro: int = 1, clip: bool = False, mixed: bool = False, **options: Any) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if mixed:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if options.pop("hybrid", False):
        options["mesh"] = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
    train(shard(Model(4, checkpoints).cuda(), **options), micro, clip)


for _name, _options in {
    "sharded": {},
    "sharded_kept": {"reshard_after_forward": False},
    "sharded_partly": {"reshard_after_forward": 2},
    "sharded_bfloat16": {"mixed": True},
    "sharded_checkpoints": {"checkpoints": True},
    "sharded_clipped": {"clip": True},
    "sharded_accumulated": {"micro": 2},
    "sharded_hybrid": {"hybrid": True},
    "sharded_hybrid_bfloat16_checkpoints": {"hybrid": True, "mixed": True, "checkpoints": True},
}.items():
    PROGRAMS[_name] = partial(_fully_shard, **_options)


@program
def sharded_without_synchronization() -> None:
    model: Any = shard(Model().cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS * 2):
        model.set_requires_gradient_sync(step % 2 == 1)
        batch = tokens()
        loss_of(model(batch), batch).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    torch.cuda.synchronize()


@program
def sharded_prefetched() -> None:
    model: Any = shard(Model(4).cuda())
    for first, second in itertools.pairwise(model.layers):
        first.set_modules_to_forward_prefetch([second])
    train(model)


@program
def sharded_state() -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    model = shard(Model().cuda())
    train(model)
    get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def _fully_shard_first(strategy: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({Layer})
    options: Any = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": True, "auto_wrap_policy": policy}
    train(FullyShardedDataParallel(Model().cuda(), **options))


for _strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
    PROGRAMS[f"first_{_strategy.lower()}"] = partial(_fully_shard_first, _strategy)


# ---- Tensor parallel. ----


def split(model: Model, mesh: Any, by_sequence: bool = False) -> Model:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    rows: Any = RowwiseParallel(output_layouts=Shard(1)) if by_sequence else RowwiseParallel()
    plan: dict[str, Any] = {f"attend.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    plan |= {"feed.up": ColwiseParallel(), "feed.gate": ColwiseParallel(), "feed.down": rows, "attend.out": rows}
    if by_sequence:
        from torch.distributed.tensor import Replicate

        gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= {"first": SequenceParallel(), "second": SequenceParallel(), "attend": gather, "feed": gather}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    from torch.distributed.tensor import Replicate

    layouts: Any = {"input_layouts": Replicate(), "output_layouts": Shard(1) if by_sequence else Replicate()}
    head: Any = ColwiseParallel(input_layouts=Shard(1) if by_sequence else Replicate(), output_layouts=Replicate())
    parallelize_module(model, mesh, {"words": RowwiseParallel(**layouts), "head": head})
    return model


def _tensor_parallel(by_sequence: bool, checkpoints: bool = False) -> None:
    train(split(Model(2, checkpoints).cuda(), init_device_mesh("cuda", (WORLD,)), by_sequence), foreach=False)


def _two_dimensions(by_sequence: bool, checkpoints: bool = False, **options: Any) -> None:
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("data", "tensor"))
    model = split(Model(2, checkpoints).cuda(), mesh["tensor"], by_sequence)
    train(shard(model, mesh=mesh["data"], **options), foreach=False)


PROGRAMS["tensor_parallel"] = partial(_tensor_parallel, False)
PROGRAMS["sequence_parallel"] = partial(_tensor_parallel, True)
PROGRAMS["sequence_parallel_checkpoints"] = partial(_tensor_parallel, True, True)
PROGRAMS["sharded_tensor_parallel"] = partial(_two_dimensions, False)
PROGRAMS["sharded_sequence_parallel"] = partial(_two_dimensions, True)
PROGRAMS["sharded_sequence_parallel_checkpoints"] = partial(_two_dimensions, True, True)
PROGRAMS["sharded_sequence_parallel_kept"] = partial(_two_dimensions, True, reshard_after_forward=False)


@program
def parallel_loss() -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

    mesh = init_device_mesh("cuda", (WORLD,))
    head: Any = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
    model = parallelize_module(Model().cuda(), mesh, {"head": head})
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(STEPS):
        batch = tokens()
        with loss_parallel():
            loss_of(model(batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()


@program
def distributed_tensors() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cuda", (WORLD,))
    a, b = (distribute_tensor(torch.randn(512, 512).cuda(), mesh, [Shard(dim)]) for dim in (0, 1))
    for _ in range(STEPS):
        product = a @ b.redistribute(mesh, [Replicate()])
        product.redistribute(mesh, [Shard(1)]).full_tensor().sum()


# ---- Pipelines. ----


def _pipeline(schedule: str, stages: int = 1, micro: int = 4, wrap: bool = False) -> None:
    from torch.distributed import pipelining

    rank, device = dist.get_rank(), torch.device("cuda", torch.cuda.current_device())
    mesh = init_device_mesh("cuda", (2, 2) if wrap else (1, WORLD), mesh_dim_names=("data", "pipeline"))
    group = mesh["pipeline"].get_group()
    index, ranks = (rank % 2, 2) if wrap else (rank, WORLD)
    made: list[Any] = []
    for each in range(stages):
        module: Any = nn.Sequential(Layer(), Layer()).cuda()
        if wrap:
            from torch.distributed.fsdp import fully_shard

            fully_shard(module, mesh=mesh["data"])
        number = index + each * ranks
        made.append(pipelining.PipelineStage(module, number, ranks * stages, device, group=group))
    kind: Any = getattr(pipelining, schedule)
    runs = kind(made if stages > 1 else made[0], micro, loss_fn=lambda output, target: (output - target).square().mean())
    parameters = [parameter for stage in made for parameter in stage.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters)
    for _ in range(STEPS):
        x = torch.randn(BATCH * micro, LENGTH, WIDTH, device="cuda")
        is_first, is_last = index == 0, index == ranks - 1
        runs.step(*([x] if is_first else []), **({"target": x, "losses": []} if is_last else {}))
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()


PROGRAMS["pipeline_gpipe"] = partial(_pipeline, "ScheduleGPipe")
PROGRAMS["pipeline_1f1b"] = partial(_pipeline, "Schedule1F1B")
PROGRAMS["pipeline_1f1b_8"] = partial(_pipeline, "Schedule1F1B", micro=8)
PROGRAMS["pipeline_interleaved"] = partial(_pipeline, "ScheduleInterleaved1F1B", 2)
PROGRAMS["pipeline_breadth_first"] = partial(_pipeline, "ScheduleLoopedBFS", 2)
PROGRAMS["pipeline_sharded"] = partial(_pipeline, "Schedule1F1B", wrap=True)


# ---- Experts. ----


class Experts(nn.Module):
    """Each rank has one expert, which gets as many tokens of each rank as it has room for."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.expert = nn.Linear(WIDTH, WORLD), Feed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed.nn.functional import all_to_all_single

        flat = x.flatten(0, -2)
        scores = self.router(flat).softmax(-1)
        capacity = flat.size(0) // WORLD
        weights, chosen = scores.topk(capacity, 0)
        sent = flat[chosen.T.flatten()]
        received = all_to_all_single(torch.empty_like(sent), sent)
        returned = all_to_all_single(torch.empty_like(sent), self.expert(received))
        output = torch.zeros_like(flat).index_add(0, chosen.T.flatten(), returned * weights.T.reshape(-1, 1))
        return output.view_as(x)


@program
def experts() -> None:
    train(Model(2, False, Experts).cuda())


@program
def experts_checkpointed() -> None:
    train(Model(2, True, Experts).cuda())


@program
@needs_ignored_parameters
def experts_sharded() -> None:
    """The dense parts are sharded and the experts are not."""
    from torch.distributed.fsdp import fully_shard

    model = Model(2, False, Experts).cuda()
    for layer in model.layers:
        fully_shard(layer.attend)  # type: ignore[arg-type]
    fully_shard(model, ignored_params={each for layer in model.layers for each in layer.feed.parameters()})  # type: ignore[union-attr]
    train(model, foreach=False)


@program
def experts_of_known_counts() -> None:
    """Tokens of all ranks, of which the host reads how many there are for each expert."""
    expert = Feed().cuda()
    for _ in range(STEPS):
        x = torch.randn(256, WIDTH, device="cuda")
        counts = torch.tensor([32, 64, 96, 64]).cuda()
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        sizes: list[int] = received.tolist()
        target = torch.empty(sum(sizes), WIDTH, device="cuda")
        dist.all_to_all_single(target, x, sizes, counts.tolist())
        expert(target).sum().backward()


# ---- Sequences in parts, and collectives. ----


@program
def ring_attention() -> None:
    rank = dist.get_rank()
    for _ in range(STEPS):
        query, key, value = (torch.randn(2, 4, 256, 32, device="cuda") for _ in range(3))
        total = torch.zeros_like(query)
        for _ in range(WORLD):
            received = torch.empty_like(torch.stack([key, value]))
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, torch.stack([key, value]), (rank + 1) % WORLD),
                    dist.P2POp(dist.irecv, received, (rank - 1) % WORLD),
                ]
            )
            total += F.scaled_dot_product_attention(query, key, value)
            for work in works:
                work.wait()
            key, value = received.unbind()
            release_finished_works()  # what was sent
        torch.cuda.synchronize()


@program
def heads_for_sequences() -> None:
    """All-to-all between the parts of the sequence and of the heads, as in DeepSpeed Ulysses."""
    from torch.distributed.nn.functional import all_to_all_single

    project = nn.Linear(WIDTH, 3 * WIDTH).cuda()
    for _ in range(STEPS):
        x = torch.randn(2, LENGTH, WIDTH, device="cuda")
        heads = project(x).view(2, LENGTH, WORLD, -1).permute(2, 0, 1, 3).contiguous()
        whole = all_to_all_single(torch.empty_like(heads), heads).transpose(0, 1).reshape(2, WORLD * LENGTH, 3, -1)
        attended = F.scaled_dot_product_attention(*whole.unbind(2))
        parts = attended.view(2, WORLD, LENGTH, -1).transpose(0, 1).contiguous()
        all_to_all_single(torch.empty_like(parts), parts).sum().backward()
    torch.cuda.synchronize()


@program
def gathers() -> None:
    x = torch.randn(512, 512, device="cuda")
    for _ in range(STEPS):
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x)
        whole = torch.cat(parts)
        dist.reduce_scatter(torch.empty_like(x), list(whole.chunk(WORLD)))
        dist.broadcast(whole, 1)
        dist.reduce(whole, 2)
        dist.gather(x, parts if dist.get_rank() == 0 else None, 0)
        dist.scatter(x, parts if dist.get_rank() == 3 else None, 3)
    torch.cuda.synchronize()


@program
def functional_collectives() -> None:
    import torch.distributed._functional_collectives as functional

    x = torch.randn(512, 512, device="cuda")
    for _ in range(STEPS):
        total = functional.all_reduce(x, "sum", dist.group.WORLD)
        whole = functional.all_gather_tensor(total, 0, dist.group.WORLD)
        functional.reduce_scatter_tensor(whole, "sum", 0, dist.group.WORLD).sum()


@program
def subgroups() -> None:
    group, _ = dist.new_subgroups(2)
    x = torch.randn(512, 512, device="cuda")
    for _ in range(STEPS):
        dist.all_reduce(x, group=group)
        dist.all_gather_into_tensor(torch.empty(1024, 512, device="cuda"), x, group=group)
    torch.cuda.synchronize()


def run_program(name: str) -> None:
    PROGRAMS[name]()
    release_finished_works()


def run(rank: int, folder: Path, names: list[str]) -> None:
    torch.cuda.set_device(rank)
    store: Any = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=WORLD)
    torch.ones(8, 8, device="cuda").mm(torch.ones(8, 8, device="cuda"))  # the workspace of cuBLAS
    dist.barrier()
    figures: dict[str, Any] = {}
    for name in (each for each in names or PROGRAMS if each not in UNSUPPORTED):
        figures[name] = measure(partial(run_program, name))
        if isinstance(figures[name], str):
            break  # the other ranks may wait for this one
        dist.barrier()
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(figures))
    if not isinstance(figures[name], str):
        dist.destroy_process_group()


def main() -> None:
    folder, *names = sys.argv[1:]
    children = []
    for rank in range(1, WORLD):
        child = os.fork()
        if child == 0:
            run(rank, Path(folder), names)
            return
        children.append(child)
    run(0, Path(folder), names)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * (WORLD - 1)


if __name__ == "__main__":
    main()
