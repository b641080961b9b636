"""Tests of contiguous buffers: threads that take slots at the same time, and freeing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from accelerator.checkpointing import transfers
from accelerator.checkpointing.buffers import Buffers, Slot

CPU = torch.device("cpu")


def take(buffers: Buffers, position: int = 0) -> Slot:
    return buffers.take(position, 4, torch.float32, CPU, False)


def test_two_threads_share_one_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread takes a slot while another thread allocates the buffer."""
    buffers, slots, sizes = Buffers(2), [], []
    other_allocates = threading.Event()
    other = threading.Thread(target=lambda: slots.append(take(buffers)))
    allocate = transfers.allocate

    def slow(numel: int, *rest: Any) -> torch.Tensor:
        sizes.append(numel)
        if threading.current_thread() is other:
            other_allocates.set()
        else:
            other.start()
            other_allocates.wait(0.5)
        return allocate(numel, *rest)

    monkeypatch.setattr(transfers, "allocate", slow)
    slots.append(take(buffers))
    other.join()
    assert sizes == [2 * 4]
    one, two = (slot.tensor for slot in slots)
    assert one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr()
    assert one.data_ptr() != two.data_ptr()


def test_clear_raises_while_a_slot_is_in_use() -> None:
    buffers = Buffers(2)
    in_use, free = take(buffers, 0), take(buffers, 1)
    del free
    with pytest.raises(RuntimeError, match="1 checkpoint"):
        buffers.clear()
    assert len(buffers._buffers) == 2
    del in_use
    buffers.clear()
    assert not buffers._buffers
