"""What a checkpoint keeps of an activation when it does not simply keep the tensor: this rank's part, on the host or not."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from . import transfers
from .buffers import Slot
from .configuration import Settings, partition_group
from .groups import SINGLE_RANK, Group, is_alive

_BYTES = torch.uint8


class Layout(NamedTuple):
    """How a tensor lies in memory: what its elements, kept in one dimension, become again."""

    shape: torch.Size
    stride: tuple[int, ...]
    # The shape without dimensions that repeat the same memory, whose elements need keeping only once.
    distinct: tuple[int, ...]
    # Whether those elements fill their memory without gaps.
    dense: bool


def layout(tensor: torch.Tensor) -> Layout | None:
    """How a tensor lies in memory; None if its elements overlap in a way that cannot be made again."""
    shape, stride = tensor.shape, tensor.stride()
    distinct = tuple(1 if step == 0 else length for length, step in zip(shape, stride, strict=True))
    extent = 1
    dense = True
    for step, length in sorted((step, length) for length, step in zip(distinct, stride, strict=True) if length > 1):
        if step < extent:
            return None
        dense = dense and step == extent
        extent = step * (length - 1) + extent
    return Layout(shape, stride, distinct, dense)


def flat(tensor: torch.Tensor, where: Layout) -> torch.Tensor:
    """The elements of a tensor in one dimension, without a copy if they fill their memory."""
    numel = math.prod(where.distinct)
    tensor = tensor.detach()
    if where.dense:
        return tensor.as_strided((numel,), (1,))
    return tensor.as_strided(where.distinct, where.stride).reshape(-1)


def unflat(elements: torch.Tensor, where: Layout) -> torch.Tensor:
    """The tensor again, with the strides that it had."""
    if where.dense:
        return elements.as_strided(where.shape, where.stride)
    extent = 1 + sum((length - 1) * step for length, step in zip(where.distinct, where.stride, strict=True))
    memory = torch.empty(extent, dtype=elements.dtype, device=elements.device)
    memory.as_strided(where.distinct, where.stride).copy_(elements.view(where.distinct))
    return memory.as_strided(where.shape, where.stride)


def is_activation(item: Any, size: int) -> bool:
    """Whether partitioning and offloading are for this argument."""
    return (
        isinstance(item, torch.Tensor)
        and not isinstance(item, torch.nn.Parameter)
        and item.is_floating_point()
        and item.numel() >= size
        and not getattr(item, "no_checkpointing", False)
    )


def part_size(numel: int, size: int) -> int:
    """Elements that each rank keeps, padding included."""
    return -(-numel // size)


class Gathering:
    """A tensor of one dimension that is being put together from the parts of all ranks."""

    __slots__ = ("_full", "_part", "_work")

    def __init__(self, part: torch.Tensor, group: Group) -> None:
        from torch import distributed

        if not is_alive(group):
            raise RuntimeError(
                "The process group that this checkpoint's arguments were partitioned over was destroyed between forward "
                "and backward; keep it until backward is done."
            )
        # As bytes, so that every dtype can be gathered whatever the backend knows to compute with.
        self._part = part.view(_BYTES)
        self._full = torch.empty(part.numel() * group.size, dtype=part.dtype, device=part.device)
        gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
        self._work = gather(self._full.view(_BYTES), self._part, group=group.handle, async_op=True)

    def wait(self) -> torch.Tensor:
        """The whole, padding included."""
        self._work.wait()
        return self._full


class StoredActivation:
    """What is kept of one activation, and how it becomes whole again."""

    __slots__ = (
        "_device",
        "_elements",
        "_gathering",
        "_group",
        "_host",
        "_layout",
        "_numel",
        "_requires_grad",
        "_slot",
        "_unpack",
    )

    def __init__(
        self,
        tensor: torch.Tensor,
        where: Layout,
        settings: Settings,
        group: Group,
        position: int,
        hooks: tuple[Any, Any] | None,
    ) -> None:
        self._layout = where
        self._group = group
        self._requires_grad = tensor.requires_grad
        self._gathering: Gathering | None = None
        self._host: transfers.Offloaded | None = None
        self._slot: Slot | None = None
        self._unpack: Any = None
        elements = flat(tensor, where)
        self._numel = elements.numel()
        size = part_size(self._numel, group.size)
        device, dtype = tensor.device, tensor.dtype
        host = settings.checkpoint_in_cpu and device.type != "cpu"
        part = own_part(elements, group)
        if settings.buffers is not None:
            self._slot = settings.buffers.take(position, size, dtype, device, settings.checkpoint_in_cpu)
            kept = self._slot.tensor
        elif host or hooks is None:
            kept = transfers.allocate(size, dtype, device, settings.checkpoint_in_cpu)
        else:
            kept = torch.empty(size, dtype=dtype, device=device)
        if host:
            # Padded before it leaves: every rank has to do the same, as what is gathered ahead depends on it.
            self._host = transfers.Offloaded(part if part.numel() == size else _padded(part, size), kept)
        else:
            kept[: part.numel()].copy_(part)
            # Never read, but a gather of undefined memory would make runs differ.
            kept[part.numel() :].zero_()
        if hooks is not None and self._host is None:
            # Hooks of the caller around the checkpoint see what it saves, as they see what an operation saves.
            kept = hooks[0](kept)
            self._unpack = hooks[1]
        self._elements: Any = kept
        self._device = device

    def start(self) -> None:
        """Begin to bring the activation back, ahead of the recomputation that needs it."""
        if self._host is not None:
            self._host.start()
        elif self._gathering is None and self._group.size > 1:
            self._gathering = Gathering(self._part(), self._group)

    def begin(self) -> None:
        """The same when the recomputation is next."""
        if self._gathering is None and self._group.size > 1:
            self._gathering = Gathering(self._part(), self._group)

    def restore(self, position: str) -> torch.Tensor:
        """The activation, as a leaf that is new memory each time."""
        if self._group.size > 1:
            self.begin()
            assert self._gathering is not None
            elements = self._gathering.wait()
            self._gathering = None
        else:
            elements = self._part()
            if self._slot is not None and self._host is None:
                # The slot may be taken by another checkpoint while the recomputed graph still refers to it.
                elements = elements.clone()
        if self._host is not None and self._host.changed:
            raise RuntimeError(changed(position))
        return unflat(elements[: self._numel], self._layout).requires_grad_(self._requires_grad)

    def _part(self) -> torch.Tensor:
        if self._host is not None:
            return self._host.take()
        part: torch.Tensor = self._elements if self._unpack is None else self._unpack(self._elements)
        return part.to(self._device)


def changed(position: str) -> str:
    """What is wrong when an argument was edited in place between forward and backward."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{position} of a checkpointed function, between its forward and its backward."
    )


def own_part(elements: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's elements, without padding: fewer than the others' at the end, perhaps none."""
    size = part_size(elements.numel(), group.size)
    return elements[group.rank * size : (group.rank + 1) * size]


def _padded(part: torch.Tensor, size: int) -> torch.Tensor:
    padded = part.new_zeros(size)
    padded[: part.numel()].copy_(part)
    return padded


def store_activation(
    tensor: torch.Tensor, settings: Settings, position: int, hooks: tuple[Any, Any] | None
) -> StoredActivation | None:
    """What to keep of an activation under these settings; None where that is the tensor itself.

    Raises:
        RuntimeError: for a world of several ranks without a group.
    """
    group = partition_group(settings) if settings.partition_activations else SINGLE_RANK
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or not is_activation(tensor, group.size):
        return None
    leaves = settings.checkpoint_in_cpu and tensor.device.type != "cpu"
    if group.size == 1 and settings.buffers is None and not leaves:
        return None
    where = layout(tensor)
    return None if where is None else StoredActivation(tensor, where, settings, group, position, hooks)
