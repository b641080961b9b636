"""Activations that are stored as this rank's part (padded to a size that all ranks share), in host memory, or in a buffer."""

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
    """The memory layout of a tensor, to restore it from its elements in one dimension."""

    shape: torch.Size
    stride: tuple[int, ...]
    # The shape with each expanded dimension reduced to length 1: the elements that are stored.
    distinct: tuple[int, ...]
    # Whether those elements fill their memory without gaps.
    dense: bool


def layout_of(tensor: torch.Tensor) -> Layout | None:
    """Return the layout of a tensor, None if its elements overlap other than by expansion."""
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


def flatten(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the elements of a tensor in one dimension. Copies only if they do not fill their memory."""
    tensor = tensor.detach()
    if layout.dense:
        return tensor.as_strided((math.prod(layout.distinct),), (1,))
    return tensor.as_strided(layout.distinct, layout.stride).reshape(-1)


def unflatten(elements: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the tensor that ``flatten`` took, with its strides."""
    if layout.dense:
        return elements.as_strided(layout.shape, layout.stride)
    extent = 1 + sum((length - 1) * step for length, step in zip(layout.distinct, layout.stride, strict=True))
    memory = torch.empty(extent, dtype=elements.dtype, device=elements.device)
    memory.as_strided(layout.distinct, layout.stride).copy_(elements.view(layout.distinct))
    return memory.as_strided(layout.shape, layout.stride)


def is_activation(item: Any, size: int) -> bool:
    """Whether an argument can be partitioned over ``size`` ranks, or offloaded."""
    return (
        isinstance(item, torch.Tensor)
        and not isinstance(item, torch.nn.Parameter)
        and item.is_floating_point()
        and item.numel() >= size
        and not getattr(item, "no_checkpointing", False)
    )


def part_size(numel: int, size: int) -> int:
    """The number of elements in each rank's part, padding included."""
    return -(-numel // size)


def own_part(elements: torch.Tensor, group: Group) -> torch.Tensor:
    """Return this rank's elements without padding. The last ranks may have fewer than the others, or none."""
    size = part_size(elements.numel(), group.size)
    return elements[group.rank * size : (group.rank + 1) * size]


def _pad(part: torch.Tensor, size: int) -> torch.Tensor:
    padded = part.new_zeros(size)
    padded[: part.numel()].copy_(part)
    return padded


class Gathering:
    """A running all-gather of a one-dimensional tensor from the parts of all ranks."""

    __slots__ = ("_part", "_whole", "_work")

    def __init__(self, part: torch.Tensor, group: Group) -> None:
        from torch import distributed

        if not is_alive(group):
            raise RuntimeError(
                "the process group over which a checkpoint's arguments were partitioned was destroyed between forward and "
                "backward; keep it until backward has ended"
            )
        # As bytes, because not every backend supports every dtype.
        self._part = part.view(_BYTES)
        self._whole = torch.empty(part.numel() * group.size, dtype=part.dtype, device=part.device)
        name = "all_gather_single" if hasattr(distributed, "all_gather_single") else "all_gather_into_tensor"
        gather: Any = getattr(distributed, name)
        self._work = gather(self._whole.view(_BYTES), self._part, group=group.handle, async_op=True)

    def wait(self) -> torch.Tensor:
        """Return the tensor, padding included."""
        self._work.wait()
        return self._whole


def _leaves_device(tensor: torch.Tensor, settings: Settings) -> bool:
    """Return whether an activation is offloaded."""
    return settings.checkpoint_in_cpu and tensor.device.type != "cpu"


class StoredActivation:
    """One activation in its stored form."""

    __slots__ = (
        "_device",
        "_elements",
        "_gathering",
        "_group",
        "_layout",
        "_numel",
        "_offloaded",
        "_requires_grad",
        "_slot",
        "_unpack",
    )

    def __init__(
        self,
        tensor: torch.Tensor,
        layout: Layout,
        settings: Settings,
        group: Group,
        position: int,
        hooks: tuple[Any, Any] | None,
    ) -> None:
        self._layout = layout
        self._group = group
        self._requires_grad = tensor.requires_grad
        self._device = tensor.device
        self._gathering: Gathering | None = None
        self._offloaded: transfers.Offloaded | None = None
        self._slot: Slot | None = None
        self._unpack: Any = None
        elements = flatten(tensor, layout)
        self._numel = elements.numel()
        size = part_size(self._numel, group.size)
        part = own_part(elements, group)
        leaves_device = _leaves_device(tensor, settings)
        if settings.buffers is not None:
            self._slot = settings.buffers.take(position, size, tensor.dtype, self._device, settings.checkpoint_in_cpu)
            stored = self._slot.tensor
        else:
            # Hooks get memory of the device, because only the copies of this package need pinned memory.
            on_host = settings.checkpoint_in_cpu and (leaves_device or hooks is None)
            stored = transfers.allocate(size, tensor.dtype, self._device, on_host)
        if leaves_device:
            # A rank with a short part pads and offloads it too: prefetch() must do the same on all ranks, either copy or
            # gather.
            self._offloaded = transfers.Offloaded(part if part.numel() == size else _pad(part, size), stored)
        else:
            stored[: part.numel()].copy_(part)
            # The padding is never read, but undefined memory would make runs differ.
            stored[part.numel() :].zero_()
        if hooks is not None and self._offloaded is None:
            # The caller's hooks get the part, as they get every tensor that an operation saves.
            stored = hooks[0](stored)
            self._unpack = hooks[1]
        self._elements: Any = stored

    def forward_ended(self) -> None:
        """Free the device memory that only the forward needed."""
        if self._offloaded is not None:
            self._offloaded.forward_ended()

    def prefetch(self) -> None:
        """Start to fetch the activation before a recomputation needs it."""
        if self._offloaded is not None:
            self._offloaded.prefetch()
        else:
            self.start_gathering()

    def start_gathering(self) -> None:
        """Start to gather the parts, if there are several."""
        if self._gathering is None and self._group.size > 1:
            self._gathering = Gathering(self._part(), self._group)

    def restore(self, name: str) -> torch.Tensor:
        """Return the activation as a leaf, in new memory each time."""
        if self._group.size > 1:
            self.start_gathering()
            assert self._gathering is not None
            elements = self._gathering.wait()
            self._gathering = None
        else:
            elements = self._part()
            if self._slot is not None and self._offloaded is None:
                # Another checkpoint may take the slot while the recomputed graph still refers to it.
                elements = elements.clone()
        if self._offloaded is not None and self._offloaded.was_edited:
            raise RuntimeError(edited_in_place(name))
        return unflatten(elements[: self._numel], self._layout).requires_grad_(self._requires_grad)

    def _part(self) -> torch.Tensor:
        if self._offloaded is not None:
            return self._offloaded.fetch()
        part: torch.Tensor = self._elements if self._unpack is None else self._unpack(self._elements)
        return part.to(self._device)


def edited_in_place(name: str) -> str:
    """The text of the error for a tensor that was edited in place between forward and backward."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{name} of a checkpointed function"
    )


def store_activation(
    tensor: torch.Tensor, settings: Settings, position: int, hooks: tuple[Any, Any] | None
) -> StoredActivation | None:
    """Store an activation as the settings say. Return None if the tensor itself is to be kept.

    Raises:
        RuntimeError: if a world of several ranks has no group.
    """
    group = partition_group(settings) if settings.partition_activations else SINGLE_RANK
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or not is_activation(tensor, group.size):
        return None
    if tensor.is_nested:
        return None
    if group.size == 1 and settings.buffers is None and not _leaves_device(tensor, settings):
        return None
    layout = layout_of(tensor)
    return None if layout is None else StoredActivation(tensor, layout, settings, group, position, hooks)
