"""``python -m tests.deepspeed_training [--ranks N ...]``: train with DeepSpeed on its own accelerator and on this package.

Needs DeepSpeed (``DS_BUILD_OPS=0 pip install deepspeed``). DeepSpeed searches for a package called ``accelerator`` and must not
use this one before ``use_in_deepspeed()`` is called. The program then trains with ZeRO 0 to 3, in bfloat16 and with activation
checkpoints, on one rank and on several. The losses must equal those on DeepSpeed's own accelerator, bit by bit. The ranks use
gloo on the CPU, and nccl on simulated GPUs (``python -m accelerator simulate --gpus 2 -- python -m ...``).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import accelerator as acc

STEPS = 6
DEADLINE_S = 240
CASES: dict[str, dict[str, Any]] = {
    **{f"ZeRO {stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)},
    **{f"ZeRO {stage}, bf16": {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}} for stage in range(4)},
    **{f"ZeRO {stage}, checkpoints": {"zero_optimization": {"stage": stage}, "checkpoints": True} for stage in (0, 2, 3)},
}


def check_own_accelerator() -> None:
    """Check that DeepSpeed uses its own accelerator although this package is installed."""
    from deepspeed.accelerator import get_accelerator

    own = get_accelerator()
    assert type(own).__module__.startswith("deepspeed."), type(own)


def check_use_in_deepspeed() -> None:
    """Check that the object of ``use_in_deepspeed`` passes DeepSpeed's checks and returns the same as DeepSpeed's own."""
    from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator

    own = get_accelerator()
    on_the_cpu = acc.device_count() == 0
    acc.use_in_deepspeed()
    ours = get_accelerator()
    assert ours is not own
    assert isinstance(ours, DeepSpeedAccelerator)
    assert ours._name == own._name
    assert ours._communication_backend_name == own._communication_backend_name
    for name in dir(DeepSpeedAccelerator):
        assert name.startswith("_") or getattr(ours, name) is not None, name
    for name in ("is_synchronized_device", "use_host_timers", "is_bf16_supported", "device_name", "is_available",
                 "communication_backend_name", "op_builder_dir", "is_current_stream_capturing"):  # fmt: skip
        assert getattr(ours, name)() == getattr(own, name)(), name
    assert ours.is_triton_supported() == own.is_triton_supported()
    last = "cpu" if on_the_cpu else f"cuda:{acc.device_count() - 1}"
    rank = 3 if on_the_cpu else acc.device_count() - 1
    assert ours.device_name(str(rank)) == ours.device_name(rank) == ours.device_name(device_index=rank) == last
    for device in (rank, str(rank), torch.device(last)):
        ours.set_device(device)
        ours.synchronize(device)
    assert ours.current_device_name() == last
    for name in ("memory_allocated", "memory_stats", "total_memory", "get_rng_state", "current_stream", "default_generator"):
        getattr(ours, name)(device_index=0)
    ours.set_rng_state(ours.get_rng_state(device_index=0), device_index=0)
    assert isinstance(ours.current_stream(), ours.Stream)
    assert ours.random() is torch.random
    tensor = torch.ones(2, 3)
    assert ours.on_accelerator(tensor) == own.on_accelerator(tensor)
    assert torch.equal(ours.FloatTensor([1, 2]), own.FloatTensor([1, 2]).to(ours.device_name()))
    for options in ({}, {"make_copy": False}, {"make_copy": False, "match_shape": False}, {"make_copy": True}):
        pinned = ours.pin_memory(tensor, **options)
        assert ours.is_pinned(pinned) is not on_the_cpu
        assert pinned.numel() == 6
    assert ours.is_pinned(ours.pin_empty(2, dtype=torch.int8)) is not on_the_cpu
    for name in builder_names():
        assert ours.get_op_builder(name) is own.get_op_builder(name), name
        assert type(ours.create_op_builder(name)) is type(own.create_op_builder(name)), name
    # The functions of this package return the same as before.
    assert acc.is_available() is not on_the_cpu
    if on_the_cpu:
        assert acc.device_count() == 0 < ours.device_count()


def builder_names() -> set[str]:
    """Return the names of DeepSpeed's builders for CUDA and for the CPU, and one unknown name."""
    names = {"NoSuchBuilder"}
    for package in ("deepspeed.ops.op_builder", "deepspeed.ops.op_builder.cpu"):
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
            if not module.ispkg:
                names |= {name for name in dir(importlib.import_module(module.name)) if name.endswith("Builder")}
    return names


class Model(torch.nn.Module):
    """Three layers, of which the middle one can run under an activation checkpoint."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = torch.nn.Linear(8, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 1)
        self.checkpoints = checkpoints

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(inputs))
        if self.checkpoints:
            import deepspeed

            hidden = deepspeed.checkpointing.checkpoint(self._block, hidden)
        else:
            hidden = self._block(hidden)
        return self.last(hidden)

    def _block(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(torch.tanh(self.middle(hidden)), 0.1)


def train(case: dict[str, Any]) -> list[float]:
    """Train the model with DeepSpeed and return this rank's losses."""
    import deepspeed

    torch.manual_seed(0)
    options = dict(case)
    model = Model(options.pop("checkpoints", False))
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    configuration = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 16 // size,
        "steps_per_print": 1_000_000,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **options,
    }
    deepspeed.checkpointing.configure(None)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration)
    dtype = torch.bfloat16 if "bf16" in options else torch.float32
    generator = torch.Generator().manual_seed(1)
    losses: list[float] = []
    for _ in range(STEPS):
        data = torch.randn(16, 8, generator=generator)[rank::size]
        inputs, targets = data.to(engine.device, dtype), data.sum(dim=1, keepdim=True).to(engine.device, dtype)
        loss = torch.nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def rank(whose: str, meeting: str, losses_file: str) -> None:
    """Run one rank: train every case on DeepSpeed's own accelerator or on this package, and write the losses into a file."""
    import deepspeed

    check_own_accelerator()
    if whose == "ours":
        check_use_in_deepspeed()
    # Train without the operators that DeepSpeed would compile here, which takes minutes.
    deepspeed.ops.__compatible_ops__ = {}
    accelerator = deepspeed.get_accelerator()
    accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(
        accelerator.communication_backend_name(),
        init_method=f"file://{meeting}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    deepspeed.comm.init_distributed(auto_mpi_discovery=False)
    losses: dict[str, list[float]] = {}
    for name, case in CASES.items():
        losses[name] = train(case)
    Path(losses_file).write_text(json.dumps(losses))
    torch.distributed.destroy_process_group()
    # DeepSpeed keeps process groups. A thread of gloo that frees their last tensors while Python finalizes aborts the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def world(whose: str, size: int) -> list[dict[str, list[float]]]:
    """Start the ranks of a world and return their losses.

    Raises:
        RuntimeError: if a rank fails or the deadline passes. The other ranks are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        children: list[subprocess.Popen[str]] = []
        for index in range(size):
            variables = {
                "RANK": index,
                "LOCAL_RANK": index,
                "WORLD_SIZE": size,
                "LOCAL_WORLD_SIZE": size,
                "OMP_NUM_THREADS": 1,
            }
            environment = {**os.environ, **{name: str(value) for name, value in variables.items()}, "MASTER_ADDR": "127.0.0.1"}
            arguments = ["--rank", whose, f"{folder}/meeting", f"{folder}/{index}.json"]
            program = [sys.executable, "-m", "tests.deepspeed_training", *arguments]
            with open(f"{folder}/{index}.log", "w") as log:
                children.append(subprocess.Popen(program, env=environment, text=True, stdout=log, stderr=subprocess.STDOUT))
        try:
            deadline = time.monotonic() + DEADLINE_S
            while any(child.poll() is None for child in children) and time.monotonic() < deadline:
                if any(child.poll() for child in children):
                    break
                time.sleep(0.1)
            # Report a rank that failed, rather than one that waited for it in vain.
            for index, child in sorted(enumerate(children), key=lambda each: not each[1].poll()):
                if child.poll() != 0:
                    output = Path(f"{folder}/{index}.log").read_text()[-3000:]
                    raise RuntimeError(f"rank {index} of {size} on {whose}: status {child.poll()}\n{output}")
        finally:
            for child in children:
                child.kill()
                child.wait()
        return [json.loads(Path(f"{folder}/{index}.json").read_text()) for index in range(size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="sizes of the worlds to train in")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(*options.rank)
        return
    for size in options.ranks:
        try:
            own = world("own", size)
        except RuntimeError as error:
            # On a busy machine, DeepSpeed may fail to start with its own accelerator. That is not tested here, so try again.
            print(error)
            own = world("own", size)
        ours = world("ours", size)
        for name in CASES:
            first = own[0][name]
            same = [losses[name] for losses in own] == [losses[name] for losses in ours]
            falls = min(first) < first[0]
            print(f"{size} rank(s), {name:22} {first[0]:.5f} -> {first[-1]:.5f}  {'same losses' if same else 'LOSSES DIFFER'}")
            assert same, (name, own, ours)
            assert falls, (name, first)


if __name__ == "__main__":
    main()
