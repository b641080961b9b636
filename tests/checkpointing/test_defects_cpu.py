"""Tests of defects of DeepSpeed's checkpoints that ours must not have. Tests of one defect share a number."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accelerator import checkpointing
from accelerator.checkpointing import configuration, partition
from accelerator.checkpointing.groups import Group

CKPTS = [checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint]
MODES: list[dict[str, Any]] = [
    {},
    {"partition_activations": True},
    {"checkpoint_in_cpu": True},
    {"partition_activations": True, "checkpoint_in_cpu": True},
    {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 4},
    {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 4, "checkpoint_in_cpu": True},
]

both = pytest.mark.parametrize("ckpt", CKPTS, ids=["checkpoint", "non_reentrant"])
modes = pytest.mark.parametrize("mode", MODES, ids=["plain", "partition", "cpu", "partition+cpu", "contiguous", "all"])


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()


def sin_exp(h: torch.Tensor) -> torch.Tensor:
    return h.sin().exp()


@both
@modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_1_input_tensors_are_unchanged(ckpt: Callable[..., Any], mode: dict[str, Any], dtype: torch.dtype) -> None:
    checkpointing.configure(**mode)
    x = leaf(3, 5, dtype=dtype)
    h = x * 1
    copy, pointer = h.detach().clone(), h.data_ptr()
    out = h + ckpt(sin_exp, h)
    assert torch.equal(out, copy + sin_exp(copy))
    with torch.no_grad():
        ckpt(sin_exp, h)
    out.sum().backward()
    assert h.shape == (3, 5)
    assert (h.dtype, h.data_ptr()) == (dtype, pointer)
    assert torch.equal(h, copy)
    assert torch.equal(x.grad, torch.autograd.grad((x + sin_exp(x)).sum(), x)[0])


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_2_parts_cover_tensors_of_any_size(size: int) -> None:
    for numel in range(size, 3 * size + 2):
        elements = torch.arange(numel)
        parts = [partition.own_part(elements, Group(None, rank, size)) for rank in range(size)]
        assert all(len(part) <= partition.part_size(numel, size) for part in parts)
        assert torch.equal(torch.cat(parts), elements)


def test_3_small_tensor_is_gathered() -> None:
    # The part of a small tensor may have fewer elements than there are ranks. DeepSpeed then does not gather it.
    checkpointing.configure()
    x = torch.arange(3.0)
    assert partition.is_activation(x, 2)
    assert not partition.is_activation(x[:1], 2)
    pairs = checkpointing.get_partitioned_activations_for_backward([x], [x.clone()])
    assert torch.equal(checkpointing.gather_partitioned_activations(pairs)[0], x)


@both
def test_4_recomputation_restores_autocast(ckpt: Callable[..., Any]) -> None:
    layer, received = nn.Linear(4, 4), []

    def function(h: torch.Tensor) -> torch.Tensor:
        h = layer(h)
        received.append(h.dtype)
        return sin_exp(h)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ckpt(function, leaf(2, 4))
    out.sum().backward()
    assert received == [torch.bfloat16, torch.bfloat16]


@both
def test_4_random_states_are_restored_after_an_exception(ckpt: Callable[..., Any]) -> None:
    tracker = checkpointing.get_cuda_rng_tracker()
    tracker.add("a", 1)
    runs: list[int] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        h = torch.nn.functional.dropout(h)
        with tracker.fork("a"):
            h = torch.nn.functional.dropout(h)
            if len(runs) == 2:
                raise KeyError("mine")
        return sin_exp(h)

    out = ckpt(function, leaf(8))
    # Without these draws, the states would be equal even if nothing restored them.
    torch.rand(3)
    with tracker.fork("a"):
        torch.rand(3)
    before = [torch.get_rng_state(), tracker.get_states()["a"]]
    with pytest.raises(KeyError, match="mine"):
        out.sum().backward()
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], tracker.get_states()["a"])


def test_4_preserve_rng_state_can_be_disabled() -> None:
    checkpointing.configure(preserve_rng_state=False)
    out = checkpointing.checkpoint(lambda h: sin_exp(torch.nn.functional.dropout(h)), leaf(8))
    before = torch.get_rng_state()
    out.sum().backward()
    assert not torch.equal(before, torch.get_rng_state())


@both
def test_5_backward_uses_the_settings_of_forward(ckpt: Callable[..., Any]) -> None:
    for first in MODES:
        for second in MODES:
            checkpointing.configure(**first)
            x = leaf(6)
            out = ckpt(sin_exp, ckpt(sin_exp, x))
            checkpointing.configure(**second)
            out.sum().backward()
            assert torch.equal(x.grad, torch.autograd.grad(sin_exp(sin_exp(x)).sum(), x)[0])


def test_6_invalid_settings_change_nothing() -> None:
    checkpointing.configure(profile=True)
    before = configuration.current
    with pytest.raises(ValueError, match="needs partition_activations"):
        checkpointing.configure(contiguous_checkpointing=True, num_checkpoints=1)
    assert configuration.current is before


@both
@modes
def test_7_arguments_of_any_type_and_nesting(ckpt: Callable[..., Any], mode: dict[str, Any]) -> None:
    checkpointing.configure(**mode)
    a, b, c, d = leaf(3), leaf(3) * 2, leaf(3) * 3, leaf(3) * 4

    def function(a: Any, flag: bool, none: None, text: str, pack: Any, *, named: Any, scale: float) -> torch.Tensor:
        assert flag is True
        assert none is None
        assert text == "text"
        return a.sin() * pack[0]["b"].exp() + pack[1][0].cos() * named[0].tanh() * scale

    def run(ckpt: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        out = ckpt(function, a, True, None, "text", ({"b": b}, [c]), named=[d, None], scale=2.0)
        return torch.autograd.grad(out.sum(), (a, b, c, d))

    expected = run(lambda function, *args, **kwargs: function(*args, **kwargs))
    assert all(torch.equal(one, other) for one, other in zip(expected, run(ckpt), strict=True))


@both
def test_8_in_place_edit_is_detected(ckpt: Callable[..., Any]) -> None:
    h = leaf(3) * 1
    out = ckpt(sin_exp, h)
    h.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@both
def test_8_a_different_recomputation_is_detected(ckpt: Callable[..., Any]) -> None:
    runs: list[int] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return sin_exp(h) if len(runs) == 1 else h.sin()

    with pytest.raises(torch.utils.checkpoint.CheckpointError, match="saved 2 tensors in forward, but 1"):
        ckpt(function, leaf(3)).sum().backward()


@modes
def test_9_nothing_is_logged_or_printed(mode: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    with unittest.TestCase().assertNoLogs(level="DEBUG"):
        checkpointing.configure(**mode, profile=True, synchronize=True)
        checkpointing.checkpoint(sin_exp, leaf(3)).sum().backward()
    assert capfd.readouterr() == ("", "")
    checkpointing.region_times(clear=True)


@both
@modes
def test_10_works_on_the_cpu_without_a_process_group(ckpt: Callable[..., Any], mode: dict[str, Any]) -> None:
    checkpointing.configure(**mode)
    x = leaf(4, 4)
    ckpt(sin_exp, x).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(sin_exp(x).sum(), x)[0])


def test_11_one_buffer_is_reused_between_steps() -> None:
    checkpointing.configure(**MODES[4])
    buffers = configuration.current.buffers
    assert buffers is not None
    memory = set()
    for _ in range(3):
        h = leaf(6)
        for _ in range(4):
            h = checkpointing.checkpoint(sin_exp, h)
        assert len(buffers._buffers) == 1
        memory.update((b.memory.untyped_storage().data_ptr(), b.memory.numel()) for b in buffers._buffers.values())
        h.sum().backward()
    assert len(memory) == 1
    assert memory.pop()[1] == 4 * 6


def test_11_inputs_beyond_the_buffer_get_separate_memory() -> None:
    checkpointing.configure(**MODES[4])
    inputs = [leaf(6) for _ in range(5)] + [leaf(7), leaf(6, dtype=torch.bfloat16)]
    waiting = [checkpointing.checkpoint(sin_exp, x) for x in inputs]
    with pytest.raises(RuntimeError, match="4 checkpoint"):
        checkpointing.reset()
    while waiting:
        waiting.pop().sum().backward()
    for x in inputs:
        assert torch.equal(x.grad, torch.autograd.grad(sin_exp(x).sum(), x)[0])
    checkpointing.reset()
    checkpointing.checkpoint(sin_exp, leaf(7)).sum().backward()


def test_11_forwards_without_grad_use_no_slots() -> None:
    checkpointing.configure(**MODES[4])
    with torch.no_grad():
        for _ in range(10):
            checkpointing.checkpoint(sin_exp, leaf(6))
    assert configuration.current.buffers is not None
    assert not configuration.current.buffers._buffers


def test_12_nested_forks_continue_the_stream() -> None:
    tracker = checkpointing.get_cuda_rng_tracker()
    tracker.add("a", 1)
    with tracker.fork("a"):
        first = torch.rand(3)
        with tracker.fork("a"):
            second = torch.rand(3)
        third = torch.rand(3)
    expected = torch.rand(9, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.cat([first, second, third]), expected)


def test_12_failed_add_changes_nothing() -> None:
    tracker = checkpointing.get_cuda_rng_tracker()
    tracker.add("a", 1)
    with pytest.raises(ValueError, match="already exists"):
        tracker.add("a", 2)
    tracker.add("b", 2)


def test_13_results_have_the_right_type() -> None:
    x = torch.ones(4)
    assert checkpointing.is_configured() is True
    assert checkpointing.is_activation_to_checkpoint(x) is True
    assert checkpointing.is_activation_to_checkpoint(None) is False
    assert type(checkpointing.get_partition_size(x)) is int
    assert type(checkpointing.get_partition_start(x)) is int
    assert checkpointing.reset() is None
    assert isinstance(checkpointing.get_cuda_rng_tracker(), checkpointing.CudaRNGStatesTracker)


@modes
def test_recomputation_keeps_strides(mode: dict[str, Any]) -> None:
    checkpointing.configure(**mode)
    base, received = leaf(4, 8), []

    def function(h: torch.Tensor) -> torch.Tensor:
        received.append(h.stride())
        return sin_exp(h)

    for view in (base.t(), base[:, ::2], base[0].expand(3, 8)):
        received.clear()
        checkpointing.checkpoint(function, view).sum().backward()
        assert received[0] == received[1] == view.stride()
        # All slots of a buffer have one size, and the next view may have another one.
        if mode.get("contiguous_checkpointing"):
            checkpointing.reset()


@both
@modes
def test_tensor_passed_twice_returned_and_nested(ckpt: Callable[..., Any], mode: dict[str, Any]) -> None:
    checkpointing.configure(**mode)

    def run(ckpt: Callable[..., Any]) -> list[torch.Tensor]:
        x = leaf(5)
        through, out = ckpt(lambda a, b: (a, ckpt(lambda p, q: p.sin() * q, a, b).exp()), x, x)
        (through * out).sum().backward()
        return [through, out, x.grad]  # type: ignore[list-item]

    expected = run(lambda function, *args: function(*args))
    assert all(torch.equal(one, other) for one, other in zip(expected, run(ckpt), strict=True))


@both
@modes
def test_repeated_autograd_grad(ckpt: Callable[..., Any], mode: dict[str, Any]) -> None:
    checkpointing.configure(**mode)
    x = leaf(5)
    out = ckpt(sin_exp, ckpt(sin_exp, x)).sum()
    expected = torch.autograd.grad(sin_exp(sin_exp(x)).sum(), x)[0]
    for _ in range(3):
        assert torch.equal(torch.autograd.grad(out, x, retain_graph=True)[0], expected)


@both
@modes
def test_reset_between_forward_and_backward(ckpt: Callable[..., Any], mode: dict[str, Any]) -> None:
    checkpointing.configure(**mode)
    x = leaf(5)
    out = ckpt(sin_exp, x)
    if mode.get("contiguous_checkpointing"):
        with pytest.raises(RuntimeError, match="still wait"):
            checkpointing.reset()
    else:
        checkpointing.reset()
    out.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(sin_exp(x).sum(), x)[0])
    checkpointing.reset()


def test_parameter_arguments_are_not_copied() -> None:
    checkpointing.configure(**MODES[4])
    weight, received = nn.Parameter(torch.ones(4)), []

    def function(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        received.append(weight)
        return sin_exp(h * weight)

    checkpointing.checkpoint(function, leaf(4), weight).sum().backward()
    assert all(item is weight for item in received)
    assert weight.grad is not None


def test_no_checkpointing_attribute_keeps_the_argument() -> None:
    checkpointing.configure(**MODES[4])
    x, received = leaf(4), []
    x.no_checkpointing = True  # type: ignore[attr-defined]
    checkpointing.checkpoint(lambda h: (received.append(h), sin_exp(h))[1], x).sum().backward()
    assert all(item is x for item in received)
