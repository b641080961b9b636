"""A training with Hugging Face accelerate that continues from its last checkpoint, for test_resume_of_libraries.py.

torchrun ... with_accelerate.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, STEPS_PER_CHECKPOINT = 4, 3


def main() -> None:
    folder = Path(sys.argv[1])
    seedable = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(dataloader_config=seedable)
    set_seed(0)
    x = torch.randn(64, 8)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    set_seed(0, device_specific=True)  # each rank drops other elements
    step = max((int(path.name.removeprefix("step_")) for path in folder.glob("step_*")), default=0)
    if step:
        accelerator.load_state(folder / f"step_{step}")
    first, done = divmod(step, len(loader))
    for epoch in range(first, EPOCHS):
        loader.set_epoch(epoch)
        skipped = done if epoch == first else 0
        for x, target in accelerator.skip_first_batches(loader, skipped):
            loss = (model(x) - target).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            total = accelerator.reduce(loss.detach()).item()
            accelerator.print(f"step {step}: {total!r}", flush=True)
            if step % STEPS_PER_CHECKPOINT == 0:
                accelerator.save_state(folder / "new")
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    (folder / "new").rename(folder / f"step_{step}")
    accelerator.end_training()


main()
