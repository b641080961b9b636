"""Tests that checkpoints free their memory, even if functions keep intermediates, and that long series have correct values."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from accelerator import checkpointing
from accelerator.checkpointing import configuration
from tests.support.checkpointing_cases import torch_non_reentrant
from tests.support.checkpointing_memory import KEEPERS, MANY, MODES, SOME_MODES, compare, many, survivors


@pytest.mark.parametrize("mode", SOME_MODES)
@pytest.mark.parametrize("keeper", KEEPERS)
def test_intermediates_kept_by_the_function_are_freed(keeper: str, mode: str) -> None:
    checkpointing.configure(**MODES[mode])
    x = torch.ones(8, requires_grad=True)
    assert survivors(keeper, x) == survivors(keeper, x, torch_non_reentrant) == 0


@pytest.mark.parametrize("stop", [True, False])
def test_intermediates_are_freed_regardless_of_early_stop(stop: bool) -> None:
    with torch.utils.checkpoint.set_checkpoint_early_stop(stop):
        assert survivors("closure", torch.ones(8, requires_grad=True)) == 0


def resident() -> int:
    """Return the resident memory of this process in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@pytest.mark.parametrize("mode", SOME_MODES)
def test_many_checkpoints_leak_no_memory(mode: str) -> None:
    checkpointing.configure(**MODES[mode])
    # gc.get_objects() allocates a large list. The first result is dropped, so that all others include that memory.
    _, *results = many(torch.ones(256, requires_grad=True), MANY, lambda: (len(gc.get_objects()), resident()))
    # 360 checkpoints lie between the first and the last result. A leak below 3 KiB each shows only in the number of objects.
    assert max(count for count, _ in results) - results[0][0] <= 20, results
    assert max(kib for _, kib in results) - results[0][1] <= 1024, results


@pytest.mark.parametrize("mode", SOME_MODES)
def test_many_checkpoints_equal_no_checkpointing(mode: str) -> None:
    checkpointing.configure(**MODES[mode])
    compare("cpu", 2000)


def test_skipped_backward_returns_buffer_slots() -> None:
    checkpointing.configure(**MODES["contiguous"])
    x = torch.ones(8, requires_grad=True)

    def chain() -> torch.Tensor:
        return checkpointing.checkpoint(torch.exp, checkpointing.checkpoint(torch.sin, x)).sum()

    loss = chain()
    for step in range(3):
        # The previous loss occupies the slots until it is replaced.
        loss = chain()
        if step:
            loss.backward()
            assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])
            x.grad = None
    del loss
    buffers = configuration.current.buffers
    assert buffers is not None
    assert [len(each.free) for each in buffers._buffers.values()] == [2]


def test_checkpoints_work_after_failed_backwards() -> None:
    checkpointing.configure(**MODES["contiguous"])
    x = torch.ones(8, requires_grad=True)
    fail = [True]

    def function(h: torch.Tensor) -> torch.Tensor:
        h = h.sin()
        h.register_hook(lambda gradient: exec("raise MemoryError") if fail[0] else None)
        return h.exp()

    for _ in range(3):
        loss = checkpointing.checkpoint(function, checkpointing.checkpoint(function, x)).sum()
        with pytest.raises(MemoryError):
            loss.backward()
    fail[0] = False
    loss = checkpointing.checkpoint(function, x).sum()
    loss.backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


def test_buffer_is_replaced_if_size_or_dtype_changes() -> None:
    checkpointing.configure(**MODES["contiguous"])
    buffers = configuration.current.buffers
    assert buffers is not None
    for shape, dtype in [((6,), torch.float32), ((3,), torch.float32), ((9,), torch.float32), ((9,), torch.bfloat16)]:
        x = torch.linspace(0, 1, shape[0]).to(dtype).requires_grad_()
        h = checkpointing.checkpoint(torch.sin, checkpointing.checkpoint(torch.exp, x))
        (buffer,) = buffers._buffers.values()
        assert (buffer.numel, buffer.memory.dtype, buffer.free) == (shape[0], dtype, [])
        h.sum().backward()
        assert torch.equal(x.grad, torch.autograd.grad(x.exp().sin().sum(), x)[0])


def test_inputs_of_other_sizes_get_separate_memory() -> None:
    checkpointing.configure(**MODES["contiguous"])
    buffers = configuration.current.buffers
    assert buffers is not None
    inputs = [torch.linspace(0, 1, size, requires_grad=True) for size in (6, 9, 3, 6, 6)]
    outputs = [checkpointing.checkpoint(lambda h: h.sin().exp(), x) for x in inputs]
    (buffer,) = buffers._buffers.values()
    # The first and the fourth input are in the buffer. The others have separate memory.
    assert (buffer.numel, buffer.free) == (6, [])
    for x, out in reversed(list(zip(inputs, outputs, strict=True))):
        out.sum().backward()
        assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])
    del out
    outputs.clear()
    assert len(buffer.free) == 2


def test_function_gets_a_copy_of_the_slot() -> None:
    checkpointing.configure(**{**MODES["contiguous"], "num_checkpoints": 1})
    kept: list[torch.Tensor] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        kept.append(h)
        return h.sin().exp()

    first = torch.ones(8, requires_grad=True)
    checkpointing.checkpoint(function, first).sum().backward()
    waiting = checkpointing.checkpoint(function, torch.zeros(8, requires_grad=True))
    # Another checkpoint uses the slot now. The argument that the function kept in the first recomputation is unchanged.
    assert torch.equal(kept[1], first)
    waiting.sum().backward()
