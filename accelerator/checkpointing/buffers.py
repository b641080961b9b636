"""Contiguous checkpointing: one buffer per argument position, with a slot per checkpoint that waits for its backward."""

from __future__ import annotations

import threading

import torch

from . import transfers


class Slot:
    """One checkpoint's place in a buffer, free again when nothing refers to it anymore."""

    __slots__ = ("_buffer", "_number", "tensor")

    def __init__(self, buffer: _Buffer, number: int, tensor: torch.Tensor) -> None:
        self._buffer = buffer
        self._number = number
        self.tensor = tensor

    def __del__(self) -> None:
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
    """The buffers of one configuration, allocated when a position is first used and kept between iterations."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._buffers: dict[tuple[int, torch.device], _Buffer] = {}
        self._lock = threading.Lock()

    def take(self, position: int, numel: int, dtype: torch.dtype, device: torch.device, host: bool) -> Slot:
        """A free slot.

        Args:
            position: of the argument, among those of the checkpoint that are kept in buffers.
            numel: elements it needs, padding included.
            dtype: of the elements.
            device: where the argument is; threads that drive different devices do not share buffers.
            host: whether the slot is in the host's memory.

        Raises:
            RuntimeError: if the size differs from that of the position's buffer, or all slots are taken.
        """
        key = (position, device)
        with self._lock:
            buffer = self._buffers.get(key)
            if buffer is None:
                memory = transfers.allocate(self.count * numel, dtype, device, host)
                buffer = self._buffers[key] = _Buffer(memory, self.count, numel)
            if buffer.numel != numel or buffer.memory.dtype != dtype:
                raise RuntimeError(
                    f"Contiguous checkpointing: argument {position} needs {numel} elements of {dtype}, but its buffer has "
                    f"slots of {buffer.numel} elements of {buffer.memory.dtype}. All checkpoints and iterations need "
                    "arguments of the same sizes; reset() between iterations makes room for others."
                )
            if not buffer.free:
                raise RuntimeError(
                    f"Contiguous checkpointing: more checkpoints wait for their backward than the {self.count} announced; "
                    "configure(num_checkpoints=...) with a larger number, or set_num_layers()."
                )
            number = buffer.free.pop()
        return Slot(buffer, number, buffer.memory.narrow(0, number * numel, numel))

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
