"""A model, its data, and a loop that trains it on the device that there is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import accelerator as acc


class Line(Dataset[Any]):
    """Points on a line."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tensor([index / 64])
        return x, 3 * x + 1


def set_up(local_rank: int = 0, seed: int = 0) -> torch.device:
    """Choose a device and seed it."""
    acc.set_device_index(local_rank)
    acc.manual_seed_all(seed)
    return acc.device(local_rank)


def batches(workers: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The data, read by forked workers."""
    yield from DataLoader(Line(), batch_size=16, num_workers=workers, pin_memory=acc.is_available())


def train(device: torch.device, *, epochs: int = 2, workers: int = 0) -> tuple[torch.nn.Module, list[float]]:
    """Train a small model; gives it, and the loss of each step."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    for _ in range(epochs):
        for x, y in batches(workers):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    acc.synchronize()
    return model, losses
