"""The slow checks of ``determinism_check="debug"``: values, not only shapes, and the same values on every rank."""

from __future__ import annotations

from typing import Any

import torch

from accelerator.checkpointing.configuration import Settings, partition_group
from accelerator.checkpointing.groups import ALONE


def digest(tensor: torch.Tensor) -> int:
    """A number that two tensors share only if their bytes are, in all likelihood, the same."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).to(torch.int64)
    # Weights that repeat only after a prime number of bytes, so that swapped elements are noticed.
    weights = torch.arange(data.numel(), device=data.device) % 8191 + 1
    return int((data * weights).sum()) * 1_000_003 + int(data.sum())


def same_on_all_ranks(arguments: list[tuple[torch.Tensor, str]], settings: Settings) -> None:
    """Compare arguments across the ranks that partition them; every rank finds the same.

    Raises:
        RuntimeError: naming the arguments that differ.
    """
    group = partition_group(settings) if settings.partition_activations else ALONE
    if group.size == 1:
        return
    from torch import distributed

    mine: list[tuple[object, ...]] = [
        (name, tuple(tensor.shape), str(tensor.dtype), digest(tensor)) for tensor, name in arguments
    ]
    everyone: list[list[tuple[object, ...]]] = [[] for _ in range(group.size)]
    gather: Any = distributed.all_gather_object
    gather(everyone, mine, group=group.handle)
    if differing := sorted(
        {each[0] for row in everyone for each, first in zip(row, everyone[0], strict=False) if each != first}, key=str
    ):
        raise RuntimeError(
            f"Partitioned checkpointing needs the same arguments on every rank of the group, but these differ: "
            f"{', '.join(map(str, differing))}."
        )
    if len({len(row) for row in everyone}) > 1:
        raise RuntimeError("Partitioned checkpointing needs the same arguments on every rank; their numbers differ.")
