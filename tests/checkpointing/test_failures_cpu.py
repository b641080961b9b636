"""What a checkpoint leaves behind when a function fails in its forward or in its recomputation: no memory, no state."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from accelerator import checkpointing
from accelerator.checkpointing import bindings, waiting
from tests.support.checkpointing_cases import OURS, Checkpoint, x

both = pytest.mark.parametrize("ckpt", OURS, ids=["checkpoint", "non_reentrant"])


class Chain:
    """Three operations that each save a tensor. A chosen run raises an error after a chosen number of them."""

    def __init__(self, failing_run: int, after: int) -> None:
        self.failing_run = failing_run
        self.after = after
        self.runs = 0
        self.states: list[Any] = []
        # What the operations of the last run saved.
        self.saved: list[StorageWeakRef] = []
        # A part of the graph, which keeps its saved tensors alive.
        self.kept: list[torch.Tensor] = []

    def __call__(self, h: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        self.states.append(current_state())
        self.saved.clear()
        for count in range(4):
            if self.runs == self.failing_run and count == self.after:
                raise ArithmeticError(f"after {count} operations")
            if count < 3:
                h = torch.nn.functional.dropout(h, 0.1).exp()
                self.saved.append(StorageWeakRef(h.untyped_storage()))
                if self.runs == self.failing_run == 1:
                    self.kept.append(h)
        return h

    def alive(self) -> int:
        """Return how many of the saved tensors occupy memory."""
        return sum(not each.expired() for each in self.saved)


@both
@pytest.mark.parametrize("after", [1, 2, 3])
def test_failed_forward_releases_arguments(ckpt: Checkpoint, after: int) -> None:
    chain = Chain(1, after)
    leaf = x()
    argument = leaf * 2
    reference = weakref.ref(argument)
    with pytest.raises(ArithmeticError):
        ckpt(chain, argument)
    assert len(chain.kept) == after
    del argument
    assert reference() is None


@both
@pytest.mark.parametrize("early_stop", [None, False])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_failed_recomputation_releases_what_it_recomputed(ckpt: Checkpoint, after: int, early_stop: bool | None) -> None:
    chain = Chain(2, after)
    a = x()
    with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):  # type: ignore[arg-type]
        out = ckpt(chain, a)
    with pytest.raises(ArithmeticError):
        out.sum().backward()
    assert chain.runs == 2
    assert chain.alive() == 0
    # The graph is as it was: another backward recomputes again.
    out.sum().backward()
    assert chain.runs == 3
    assert a.grad is not None


@both
def test_mismatch_releases_what_was_recomputed(ckpt: Checkpoint) -> None:
    saved: list[StorageWeakRef] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        h = h.exp()
        saved.append(StorageWeakRef(h.untyped_storage()))
        return torch.cat([h, h]).exp() if len(saved) > 1 else h.exp().exp()

    out = ckpt(function, x())
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        out.sum().backward()
    assert saved[1].expired()


@both
def test_reading_a_saved_tensor_outside_of_backward_releases_the_others(ckpt: Checkpoint) -> None:
    chain = Chain(0, 0)
    out = ckpt(chain, x())
    node: Any = out.grad_fn
    value = node._saved_result
    assert chain.runs == 2
    assert chain.alive() == 1
    del value
    assert chain.alive() == 0


def current_state() -> dict[str, Any]:
    """Return all that a checkpoint sets for a recomputation, as the caller sees it."""
    tracker = checkpointing.get_cuda_rng_tracker()
    return {
        "random state": tuple(torch.get_rng_state().tolist()),
        "streams": {name: tuple(state.tolist()) for name, state in tracker.get_states().items()},
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()),
        "grad mode": torch.is_grad_enabled(),
    }


@pytest.fixture
def defaults() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


# What the caller changes between the forward and the backward, each restored after a recomputation that fails.
CHANGES: dict[str, Callable[[ExitStack], Any]] = {
    "random state": lambda stack: torch.manual_seed(5),
    "streams": lambda stack: stack.enter_context(checkpointing.get_cuda_rng_tracker().fork("stream")),
    "default dtype": lambda stack: torch.set_default_dtype(torch.float64),
    "default device": lambda stack: stack.enter_context(torch.device("meta")),
    "deterministic": lambda stack: torch.use_deterministic_algorithms(True, warn_only=True),
    "autocast": lambda stack: stack.enter_context(torch.autocast("cpu", torch.float16, cache_enabled=False)),
    "grad mode": lambda stack: stack.enter_context(torch.no_grad()),
}


@pytest.mark.usefixtures("defaults")
@pytest.mark.parametrize("after", [0, 2, 3])
@pytest.mark.parametrize("changed", [*CHANGES, "all"])
def test_failed_recomputation_restores_state(changed: str, after: int) -> None:
    checkpointing.get_cuda_rng_tracker().add("stream", 7)
    chain = Chain(2, after)
    with torch.autocast("cpu", torch.bfloat16):
        result = checkpointing.checkpoint(chain, x())
    out, node = result.float().sum(), result.grad_fn
    # The graph's first gradient is made here, because a default device of the caller concerns it too.
    gradient = torch.ones(())
    with ExitStack() as stack:
        for name, change in CHANGES.items():
            if changed in (name, "all"):
                change(stack)
        before = current_state()
        for recompute in (
            lambda: torch.autograd.backward(out, gradient, retain_graph=True),
            lambda: torch.autograd.backward(out, gradient, retain_graph=True),
            lambda: node._saved_result,
        ):
            chain.runs = 1
            with pytest.raises(ArithmeticError):
                recompute()
            assert current_state() == before
        assert bindings.innermost_hooks is None or bindings.innermost_hooks(False) is None
    # Each recomputation saw the forward's state.
    assert chain.states[1:] == [chain.states[0]] * 3


@pytest.mark.parametrize("group", [False, True], ids=["alone", "in a group"])
def test_every_rank_stops_early_regardless_of_size(group: bool) -> None:
    # Ranks whose tensors lie on either side of 64 KiB must run the same collectives in a recomputation.
    ends: list[int] = []

    def function(h: torch.Tensor) -> torch.Tensor:
        out = h.exp()
        ends.append(h.numel())
        return out

    if group:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for size in (4, 2**14, 2**14 + 1):
            checkpointing.checkpoint(function, x(size)).sum().backward()
    finally:
        if group:
            dist.destroy_process_group()
    recomputed_to_the_end = [size for size in (4, 2**14, 2**14 + 1) if ends.count(size) == 2]
    assert recomputed_to_the_end == ([] if group else [4])


class Running:
    def __init__(self, thread: int) -> None:
        self.thread = thread


def test_threads_that_wait_for_one_another_continue() -> None:
    # Each of three threads recomputes one checkpoint, and inside of it needs the checkpoint of the next thread.
    checkpoints: list[list[Running]] = [[], [], []]
    started = threading.Barrier(3)
    given_up = threading.Event()

    def recompute(number: int) -> None:
        own, following = checkpoints[number], checkpoints[(number + 1) % 3]
        outer, inner = Running(threading.get_ident()), Running(threading.get_ident())
        own.append(outer)
        started.wait(60)
        following.append(inner)
        waiting.wait_for_turn(inner, following, given_up.is_set)
        following.remove(inner)
        own.remove(outer)

    threads = [threading.Thread(target=recompute, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    waits = [thread.is_alive() for thread in threads]
    given_up.set()
    assert not any(waits)
