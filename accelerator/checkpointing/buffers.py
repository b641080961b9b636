"""Contiguous checkpointing: one buffer per argument position, with a slot for each checkpoint that waits for its backward."""

from __future__ import annotations

import threading

import torch

from . import transfers


class Slot:
    """The memory of one activation: a part of a buffer, or memory of its own. Deleting the slot frees the part."""

    __slots__ = ("_buffer", "_index", "tensor")

    def __init__(self, tensor: torch.Tensor, buffer: _Buffer | None = None, index: int = 0) -> None:
        self.tensor = tensor
        self._buffer = buffer
        self._index = index

    def __del__(self) -> None:
        if self._buffer is not None:
            self._buffer.free.append(self._index)


class _Buffer:
    """The memory for one argument position, and the indices of its free slots."""

    __slots__ = ("count", "free", "memory", "numel")

    def __init__(self, memory: torch.Tensor, count: int, numel: int) -> None:
        self.memory = memory
        self.count = count
        self.numel = numel
        # Slots are taken from the end, so that the first checkpoint gets the first slot.
        self.free = list(range(count - 1, -1, -1))


class Buffers:
    """The buffers of one configuration, allocated at first use and kept between iterations.

    A checkpoint gets memory of its own if no slot is free or slots have another size. This happens if more checkpoints wait
    than ``num_checkpoints`` says, for example because a loss of an earlier iteration is alive. If no checkpoint waits, the
    buffer is allocated again in the new size.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._buffers: dict[tuple[int, torch.device], _Buffer] = {}
        self._lock = threading.Lock()

    def take(self, position: int, numel: int, dtype: torch.dtype, device: torch.device, on_host: bool) -> Slot:
        """Return a free slot, or memory of its own.

        Args:
            position: the index of the argument among those in buffers.
            numel: the elements of the slot, padding included.
            dtype: their dtype.
            device: the device of the argument. Threads that drive different devices do not share buffers.
            on_host: whether the slot is in host memory.
        """
        key = (position, device)
        with self._lock:
            buffer = self._buffers.get(key)
            fits = buffer is not None and buffer.numel == numel and buffer.memory.dtype == dtype
            if buffer is None or (not fits and len(buffer.free) == buffer.count):
                # The old memory is freed before the new memory is allocated.
                self._buffers.pop(key, None)
                buffer = None
                memory = transfers.allocate(self.count * numel, dtype, device, on_host)
                buffer = self._buffers[key] = _Buffer(memory, self.count, numel)
            elif not fits or not buffer.free:
                return Slot(transfers.allocate(numel, dtype, device, on_host))
            index = buffer.free.pop()
        return Slot(buffer.memory.narrow(0, index * numel, numel), buffer, index)

    def clear(self) -> None:
        """Free all buffers.

        Raises:
            RuntimeError: if slots are in use; nothing changes.
        """
        with self._lock:
            waiting = max((buffer.count - len(buffer.free) for buffer in self._buffers.values()), default=0)
            if waiting:
                raise RuntimeError(
                    f"reset() was called while {waiting} checkpoint(s) still wait for their backward:"
                    " run it, or drop their outputs"
                )
            self._buffers.clear()
