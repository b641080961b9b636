"""``python -m tests.support.deepspeed_training``: DeepSpeed with this package installed beside it, and on this package.

Needs DeepSpeed (``DS_BUILD_OPS=0 pip install deepspeed``). DeepSpeed's own sources look for a package called ``accelerator``
and must not take this one for theirs; and its accelerator object, replaced by this module, trains a model.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch

import accelerator as acc


def keeps_its_own() -> None:
    """DeepSpeed imports with this package installed, and has its own accelerator."""
    from deepspeed.accelerator import get_accelerator

    own = get_accelerator()
    assert type(own).__module__.startswith("deepspeed."), type(own)


def answers_alike() -> None:
    """This module has every method of DeepSpeed's abstract class, and its CPU object's answers where those are right."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator

    missing = [name for name in DeepSpeedAccelerator.__abstractmethods__ if not hasattr(acc, name)]
    assert missing == [], missing
    own = get_accelerator()
    for name in ("is_synchronized_device", "use_host_timers", "is_bf16_supported", "is_triton_supported", "device_name"):
        assert getattr(acc, name)() == getattr(own, name)(), name
    tensor = torch.ones(2)
    assert acc.on_accelerator(tensor) == own.on_accelerator(tensor)
    assert torch.equal(acc.FloatTensor([1, 2]), own.FloatTensor([1, 2]))


def train() -> list[float]:
    """Train a small model through DeepSpeed, whose accelerator object is this module; return the losses."""
    import deepspeed
    from deepspeed.accelerator import real_accelerator

    real_accelerator.ds_accelerator = acc  # what get_accelerator() returns, also to modules that have imported it
    assert deepspeed.get_accelerator() is acc
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    configuration: dict[str, Any] = {
        "train_batch_size": 16,
        "steps_per_print": 1_000_000,
    }
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration)
    inputs = torch.randn(16, 8)
    targets = inputs.sum(dim=1, keepdim=True)
    losses: list[float] = []
    for _ in range(60):
        loss = torch.nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Run all three and print what came out."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        keeps_its_own()
        answers_alike()
        losses = train()
        torch.distributed.destroy_process_group()
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps on {acc.current_device_name()}")
    assert losses[-1] < losses[0] / 10, losses


if __name__ == "__main__":
    main()
