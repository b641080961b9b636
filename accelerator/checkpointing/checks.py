"""The slow checks of ``determinism_check="debug"``: values, not only shapes, and the same values on every rank."""

from __future__ import annotations

import zlib

import torch

from .._torch import state
from .configuration import Settings, partition_group
from .groups import SINGLE_RANK, Group


def digest(tensor: torch.Tensor) -> int:
    """A number that two tensors share only if their bytes are, in all likelihood, the same."""
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).to(torch.int64)
    # Weights that repeat only after a prime number of bytes, so that swapped elements are noticed.
    weights = torch.arange(data.numel(), device=data.device) % 8191 + 1
    return int((data * weights).sum()) * 1_000_003 + int(data.sum())


def same_on_all_ranks(arguments: list[tuple[torch.Tensor, str]], settings: Settings) -> None:
    """Compare arguments across the ranks that partition them; every rank finds the same.

    Raises:
        RuntimeError: naming the arguments that differ.
    """
    group = partition_group(settings) if settings.partition_activations else SINGLE_RANK
    if group.size == 1:
        return
    counts = _gather([len(arguments)], group)
    if len(set(map(tuple, counts))) > 1:
        raise RuntimeError("Partitioned checkpointing needs the same arguments on every rank; their numbers differ.")
    mine = [number for tensor, name in arguments for number in (_kind(tensor, name), digest(tensor) & _LARGEST)]
    everyone = _gather(mine, group)
    places = {place // 2 for row in everyone for place, number in enumerate(row) if number != everyone[0][place]}
    if places:
        raise RuntimeError(
            f"Partitioned checkpointing needs the same arguments on every rank of the group, but these differ: "
            f"{', '.join(arguments[place][1] for place in sorted(places))}."
        )


_LARGEST = 2**63 - 1


def _kind(tensor: torch.Tensor, name: str) -> int:
    return zlib.crc32(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())


def _gather(numbers: list[int], group: Group) -> list[list[int]]:
    """The numbers of each rank, of which all have equally many. torch's gathering of objects would need NumPy."""
    from torch import distributed

    on_host = distributed.get_backend(group.handle) in ("gloo", "mpi")
    mine = torch.tensor(numbers, dtype=torch.int64, device="cpu" if on_host else state.current().device_type)
    everyone = [torch.empty_like(mine) for _ in range(group.size)]
    distributed.all_gather(everyone, mine, group=group.handle)
    return [row.tolist() for row in everyone]
