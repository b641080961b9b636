"""Tests of the tracker of random states and of seeding, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from accelerator import checkpointing


@pytest.fixture
def tracker() -> Iterator[checkpointing.CudaRNGStatesTracker]:
    checkpointing.configure()
    tracker = checkpointing.get_cuda_rng_tracker()
    tracker.reset()
    torch.manual_seed(0)
    yield tracker
    tracker.reset()


def stream(seed: int) -> Callable[[], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda: torch.rand(3, generator=generator)


Tracker = checkpointing.CudaRNGStatesTracker


def test_forks_draw_like_separate_generators(tracker: Tracker) -> None:
    tracker.add("a", 1)
    tracker.add("b", 2)
    a, b, default = stream(1), stream(2), stream(0)
    for _ in range(3):
        with tracker.fork("a"):
            assert torch.equal(torch.rand(3), a())
        assert torch.equal(torch.rand(3), default())
        with tracker.fork("b"):
            assert torch.equal(torch.rand(3), b())


def test_nested_forks_continue_their_streams(tracker: Tracker) -> None:
    tracker.add("a", 1)
    tracker.add("b", 2)
    a, b, default = stream(1), stream(2), stream(0)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(3), a())
        with tracker.fork("a"):
            assert torch.equal(torch.rand(3), a())
            with tracker.fork("b"):
                assert torch.equal(torch.rand(3), b())
                with tracker.fork("a"):
                    assert torch.equal(torch.rand(3), a())
                assert torch.equal(torch.rand(3), b())
            assert torch.equal(torch.rand(3), a())
        assert torch.equal(torch.rand(3), a())
    assert torch.equal(torch.rand(3), default())
    with tracker.fork("a"):
        assert torch.equal(torch.rand(3), a())


def test_fork_restores_after_an_exception(tracker: Tracker) -> None:
    tracker.add("a", 1)
    a, default = stream(1), stream(0)
    with pytest.raises(KeyError), tracker.fork("a"), tracker.fork("a"):
        assert torch.equal(torch.rand(3), a())
        raise KeyError
    assert torch.equal(torch.rand(3), default())
    with tracker.fork("a"):
        assert torch.equal(torch.rand(3), a())


def test_get_and_set_states(tracker: Tracker) -> None:
    tracker.add("a", 1)
    with tracker.fork("a"):
        torch.rand(5)
        inside = tracker.get_states()
        here = torch.rand(3)
    states = tracker.get_states()
    with tracker.fork("a"):
        expected = torch.rand(3)
    tracker.set_states(states)
    states["a"].zero_()
    with tracker.fork("a"):
        assert torch.equal(torch.rand(3), expected)
    # Inside a fork, get_states() returns the position of the active stream.
    tracker.set_states(inside)
    with tracker.fork("a"):
        assert torch.equal(torch.rand(3), here)


BAD: dict[str, tuple[type[Exception], str, Callable[[Tracker], Any]]] = {
    "duplicate name": (ValueError, "state a already exists", lambda t: t.add("a", 5)),
    "duplicate seed": (ValueError, "seed 1 already exists", lambda t: t.add("c", 1)),
    "seed of the wrong kind": (TypeError, "integer", lambda t: t.add("c", "5")),
    "name of the wrong kind": (TypeError, "string", lambda t: t.add(3, 5)),
    "unknown name": (ValueError, "zap is not added; the streams are: a, b", lambda t: t.fork("zap").__enter__()),
    "states of the wrong kind": (TypeError, "get_states", lambda t: t.set_states([1])),
    "state of the wrong kind": (TypeError, "'a' is int", lambda t: t.set_states({"a": 1})),
    "state of the wrong size": (RuntimeError, "state", lambda t: t.set_states({"a": torch.zeros(3, dtype=torch.uint8)})),
    "seeding with a string": (TypeError, "integer", lambda t: checkpointing.model_parallel_cuda_manual_seed("x")),
    "graph on the CPU": (RuntimeError, "captures no graphs", lambda t: t.register_graph(None)),
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_arguments_change_nothing(name: str, tracker: Tracker) -> None:
    tracker.add("a", 1)
    tracker.add("b", 2)
    before = [torch.get_rng_state(), *tracker.get_states().values()]
    error_type, text, act = BAD[name]
    with pytest.raises(error_type, match=text):
        act(tracker)
    assert all(
        torch.equal(one, other)
        for one, other in zip(before, [torch.get_rng_state(), *tracker.get_states().values()], strict=True)
    )
    tracker.add("c", 5)


@pytest.mark.parametrize(
    "act", [Tracker.reset, lambda t: t.set_states({}), lambda t: checkpointing.model_parallel_cuda_manual_seed(1)]
)
def test_reset_inside_fork_raises(act: Callable[[Tracker], Any], tracker: Tracker) -> None:
    tracker.add("a", 1)
    a, default = stream(1), stream(0)
    with tracker.fork("a"):
        with pytest.raises(RuntimeError, match="inside fork"):
            act(tracker)
        assert torch.equal(torch.rand(3), a())
    assert torch.equal(torch.rand(3), default())


def test_seeds(tracker: Tracker) -> None:
    checkpointing.model_parallel_cuda_manual_seed(10)
    default, parallel = stream(10), stream(10 + 2718)
    assert torch.equal(torch.rand(3), default())
    with tracker.fork():
        assert torch.equal(torch.rand(3), parallel())
    checkpointing.model_parallel_reconfigure_tp_seed(20)
    parallel = stream(20 + 2718)
    assert torch.equal(torch.rand(3), default())
    with tracker.fork("model-parallel-rng"):
        assert torch.equal(torch.rand(3), parallel())
    tracker.reset()
    with pytest.raises(ValueError, match="model-parallel-rng is not added; the streams are: none"):
        checkpointing.model_parallel_reconfigure_tp_seed(20)


@pytest.mark.parametrize("forked", ["", "forward", "backward", "both"])
def test_checkpoints_in_and_around_forks(forked: str, tracker: Tracker) -> None:
    def function(h: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.dropout(h, 0.3).sigmoid()
        with tracker.fork("a"):
            h = torch.nn.functional.dropout(h, 0.3).sigmoid()
            with tracker.fork("b"):
                h = h * torch.rand_like(h).sigmoid()
            h = torch.nn.functional.dropout(h, 0.3).sigmoid()
        return torch.nn.functional.dropout(h, 0.3).sigmoid()

    def run(ckpt: Callable[..., Any]) -> list[torch.Tensor]:
        tracker.reset()
        tracker.add("a", 1)
        tracker.add("b", 2)
        torch.manual_seed(0)
        x = torch.linspace(0, 1, 40, requires_grad=True)
        if forked in ("forward", "both"):
            with tracker.fork("a"):
                out = ckpt(function, x)
        else:
            out = ckpt(function, x)
        if forked in ("backward", "both"):
            with tracker.fork("a"):
                torch.rand(1)
                out.sum().backward()
                inside = torch.rand(3)
        else:
            out.sum().backward()
            inside = torch.rand(3)
        return [out, x.grad, inside, torch.rand(3), *tracker.get_states().values()]

    expected = run(lambda function, *args: function(*args))
    for ckpt in (checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint):
        assert all(torch.equal(one, other) for one, other in zip(expected, run(ckpt), strict=True))


def test_reset_between_forward_and_backward(tracker: Tracker) -> None:
    tracker.add("a", 1)

    def function(h: torch.Tensor) -> torch.Tensor:
        with tracker.fork("a"):
            return torch.nn.functional.dropout(h, 0.5).exp()

    x = torch.ones(30, requires_grad=True)
    out = checkpointing.checkpoint(function, x)
    tracker.reset()
    out.sum().backward()
    # Dropout doubles the elements that it keeps. Their gradient is 2 * exp(2), that of the others is 0.
    assert torch.equal(x.grad, torch.where(out > 1, 2 * out, torch.zeros(30)))
    assert not tracker.get_states()


def test_separate_tracker_instance(tracker: Tracker) -> None:
    mine = Tracker()
    mine.add("model-parallel-rng", 1)
    tracker.add("model-parallel-rng", 1)
    with mine.fork():
        first = torch.rand(2)
    with tracker.fork():
        assert torch.equal(first, torch.rand(2))
