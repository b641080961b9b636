"""Differential: the same calls to ``torch.accelerator`` and to this package, on the same initialized state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import accelerator as acc
from tests.mirror.deviations import Raises, Works, expected
from tests.mirror.mirroring import ARGUMENTS, CALLS, known_to_torch, outcome, same


@pytest.fixture(autouse=True, scope="module")
def initialized() -> None:
    torch.cuda.init()


def state() -> tuple[Any, ...]:
    """All that these calls can change: the current device and each device's current stream."""
    streams = [torch.cuda.current_stream(device) for device in range(2)]
    return torch.cuda.current_device(), streams


def restore(saved: tuple[Any, ...]) -> None:
    device, streams = saved
    for stream in streams:
        torch.cuda.set_stream(stream)
    torch.cuda.set_device(device)


def compare(call: str, argument: Any) -> None:
    before = state()
    deviation = expected(call, argument, initialized=True)
    where = f"{call}({argument!r}), {deviation}"
    if isinstance(deviation, Raises):
        assert outcome(acc, call, argument) == ("raises", deviation.error), where
        assert state() == before, f"{where}: an error changed the state"
        return
    if isinstance(deviation, Works):
        assert outcome(acc, call, argument)[0] == "gives", where
        return
    theirs = outcome(torch.accelerator, call, deviation.argument if deviation else argument)
    their_state = state()
    restore(before)
    ours = outcome(acc, call, argument)
    assert same(ours, theirs), f"{where}: {ours}, torch {theirs}"
    assert state() == their_state, where


@pytest.mark.parametrize("call", [name for name in known_to_torch() if name != "set_stream"])
def test_every_argument(call: str) -> None:
    for device in (0, 1):
        torch.cuda.set_device(device)
        for argument in ARGUMENTS:
            compare(call, argument)
    torch.cuda.set_device(0)


_STREAMS: list[torch.Stream] = []


def streams() -> list[torch.Stream]:
    if not _STREAMS:
        _STREAMS.extend(torch.Stream(device=f"cuda:{device}") for device in (0, 0, 1, 1))
        _STREAMS.extend(torch.accelerator.current_stream(device) for device in (0, 1))
    return _STREAMS


STEPS = st.one_of(
    st.tuples(st.sampled_from([name for name in known_to_torch() if name != "set_stream"]), st.sampled_from(ARGUMENTS)),
    st.tuples(st.just("set_stream"), st.integers(0, 5)),
    st.tuples(st.just("allocate"), st.tuples(st.integers(0, 1), st.integers(0, 3 * 2**20))),
    st.tuples(st.just("free"), st.integers(0, 7)),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEPS, min_size=5, max_size=25))
def test_random_sequences(steps: list[tuple[str, Any]]) -> None:
    before = state()
    held: list[torch.Tensor] = []
    try:
        for step, argument in steps:
            if step == "allocate":
                device, size = argument
                held.append(torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}"))
            elif step == "free" and held:
                held.pop(argument % len(held))
            elif step in CALLS:
                compare(step, streams()[argument] if step == "set_stream" else argument)
    finally:
        restore(before)


def test_every_name_of_torch_accelerator_is_here() -> None:
    assert set(torch.accelerator.__all__) <= set(acc.__all__)
