"""Seeds, states and generators under the CPU fallback: the functions use the CPU's generator."""

from __future__ import annotations

import pytest
import torch

import accelerator as acc


def test_seeded_draws_equal_torchs() -> None:
    for seed in (acc.manual_seed, acc.manual_seed_all):
        torch.manual_seed(5)
        theirs = torch.rand(4)
        assert seed(5) is None
        assert torch.equal(torch.rand(4), theirs)
        assert acc.initial_seed() == acc.initial_seed(0) == 5


def test_random_seeds_differ() -> None:
    seeds = set()
    for seed in (acc.seed, acc.seed_all, acc.seed, acc.seed_all):
        assert seed() is None
        seeds.add(torch.initial_seed())
    assert len(seeds) == 4


def test_out_of_range_seeds_raise() -> None:
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises((RuntimeError, ValueError)) as theirs:
            torch.Generator().manual_seed(seed)
        for function in (acc.manual_seed, acc.manual_seed_all):
            with pytest.raises(theirs.type):
                function(seed)


@pytest.mark.parametrize("device", [None, 0, "cpu", "cpu:0", torch.device("cpu")])
def test_rng_state_round_trip(device: object) -> None:
    state = acc.get_rng_state(device)
    assert torch.equal(state, torch.get_rng_state())
    drawn = torch.rand(3)
    acc.set_rng_state(state, device)
    assert torch.equal(torch.rand(3), drawn)
    assert acc.default_generator(device) is torch.default_generator


def test_rng_state_all_is_one_state() -> None:
    states = acc.get_rng_state_all()
    assert len(states) == 1
    drawn = torch.rand(3)
    acc.set_rng_state_all(states)
    assert torch.equal(torch.rand(3), drawn)
    with pytest.raises(ValueError, match="2 states"):
        acc.set_rng_state_all(states * 2)


@pytest.mark.parametrize("device", [-1, "cuda", "cuda:0"])
def test_other_devices_raise(device: object) -> None:
    state = torch.get_rng_state()
    for call in (
        lambda: acc.initial_seed(device),
        lambda: acc.get_rng_state(device),
        lambda: acc.default_generator(device),
        lambda: acc.set_rng_state(state, device),
        lambda: acc.fork_rng([device]),
    ):
        with pytest.raises(ValueError, match=r"out of range|doesn't match"):
            call()


def test_wrong_rng_states_raise() -> None:
    for wrong in (torch.zeros(5056), None, b""):
        with pytest.raises(TypeError, match="ByteTensor"):
            acc.set_rng_state(wrong)
    with pytest.raises(RuntimeError):
        acc.set_rng_state(torch.zeros(16, dtype=torch.uint8))


@pytest.mark.parametrize("devices", [None, [], [0], ["cpu"]])
def test_fork_rng_restores_the_cpu_state(devices: list[object] | None) -> None:
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), acc.fork_rng(devices):
        acc.seed_all()
        assert not torch.equal(torch.get_rng_state(), before)
        _ = 1 / 0
    assert torch.equal(torch.get_rng_state(), before)


def test_calling_the_module_returns_torch_random() -> None:
    assert acc.random() is torch.random  # type: ignore[operator]
