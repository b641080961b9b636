"""Contiguous checkpointing: one buffer per argument position, with a slot per checkpoint that waits for its backward."""

from __future__ import annotations

import threading

import torch

from . import transfers


class Slot:
    """One checkpoint's place in a buffer, free again when nothing refers to it anymore, or memory of its own."""

    __slots__ = ("_buffer", "_number", "tensor")

    def __init__(self, tensor: torch.Tensor, buffer: _Buffer | None = None, number: int = 0) -> None:
        self.tensor = tensor
        self._buffer = buffer
        self._number = number

    def __del__(self) -> None:
        if self._buffer is not None:
            self._buffer.free.append(self._number)


class _Buffer:
    """The memory for one argument position, and which of its slots are free."""

    __slots__ = ("count", "free", "memory", "numel")

    def __init__(self, memory: torch.Tensor, count: int, numel: int) -> None:
        self.memory = memory
        self.count = count
        self.numel = numel
        # Taken from the end, so that the first checkpoint gets the first slot.
        self.free = list(range(count - 1, -1, -1))


class Buffers:
    """The buffers of one configuration, allocated when a position is first used and kept between iterations.

    A checkpoint that finds no slot, or none of its size, gets memory of its own: more wait than were announced, as when a
    loss of an earlier iteration is kept. Once none waits, the next one's size is that of the buffer.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._buffers: dict[tuple[int, torch.device], _Buffer] = {}
        self._lock = threading.Lock()

    def take(self, position: int, numel: int, dtype: torch.dtype, device: torch.device, host: bool) -> Slot:
        """A free slot, or memory of its own.

        Args:
            position: of the argument, among those of the checkpoint that are kept in buffers.
            numel: elements it needs, padding included.
            dtype: of the elements.
            device: where the argument is; threads that drive different devices do not share buffers.
            host: whether the slot is in the host's memory.
        """
        key = (position, device)
        with self._lock:
            buffer = self._buffers.get(key)
            fits = buffer is not None and buffer.numel == numel and buffer.memory.dtype == dtype
            if buffer is None or (not fits and len(buffer.free) == buffer.count):
                # The old one goes before the new one comes.
                self._buffers.pop(key, None)
                buffer = None
                memory = transfers.allocate(self.count * numel, dtype, device, host)
                buffer = self._buffers[key] = _Buffer(memory, self.count, numel)
            elif not fits or not buffer.free:
                return Slot(transfers.allocate(numel, dtype, device, host))
            number = buffer.free.pop()
        return Slot(buffer.memory.narrow(0, number * numel, numel), buffer, number)

    def clear(self) -> None:
        """Let go of all buffers.

        Raises:
            RuntimeError: while slots are taken; nothing changes.
        """
        with self._lock:
            waiting = max((buffer.count - len(buffer.free) for buffer in self._buffers.values()), default=0)
            if waiting:
                raise RuntimeError(
                    f"reset() while {waiting} checkpoint(s) still wait for their backward: run it, or drop their outputs."
                )
            self._buffers.clear()
