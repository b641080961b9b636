"""Seeds, states and generators on two simulated GPUs, compared with torch.cuda if it has the function."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import accelerator as acc


@pytest.fixture(autouse=True)
def _first_device() -> Iterator[None]:
    torch.cuda.init()
    torch.cuda.set_device(0)
    yield
    torch.cuda.set_device(0)


def _seeds() -> list[int]:
    return [generator.initial_seed() for generator in torch.cuda.default_generators]


def test_manual_seed_seeds_only_the_current_device() -> None:
    torch.cuda.manual_seed_all(1)
    torch.manual_seed(2)
    torch.cuda.set_device(1)
    acc.manual_seed(7)
    assert _seeds() == [2, 7]
    assert torch.initial_seed() == 2


def test_manual_seed_all_seeds_every_device() -> None:
    torch.manual_seed(2)
    assert acc.manual_seed_all(8) is None
    ours = [torch.cuda.get_rng_state(index) for index in range(2)]
    torch.cuda.manual_seed_all(8)
    assert _seeds() == [8, 8]
    assert all(map(torch.equal, ours, torch.cuda.get_rng_state_all()))
    assert torch.initial_seed() == 2


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**64 - 1, True, 3.0])
def test_manual_seed_accepts_torchs_seeds(seed: int) -> None:
    acc.manual_seed(seed)
    ours = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(seed)
    assert torch.equal(ours, torch.cuda.get_rng_state())


@pytest.mark.parametrize("name", ["manual_seed", "manual_seed_all"])
@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, "x", None])
def test_impossible_seeds_raise_torchs_errors(name: str, seed: object) -> None:
    with pytest.raises(Exception) as theirs:
        getattr(torch.cuda, name)(seed)
    with pytest.raises(type(theirs.value)):
        getattr(acc, name)(seed)


def test_seed_changes_the_current_device() -> None:
    acc.manual_seed_all(1)
    assert acc.seed() is None
    first = _seeds()
    acc.seed()
    second = _seeds()
    assert first[1] == second[1] == 1
    assert len({1, first[0], second[0]}) == 3


def test_seed_all_gives_every_device_the_same_new_seed() -> None:
    acc.manual_seed_all(1)
    assert acc.seed_all() is None
    first, second = _seeds()
    assert first == second != 1


@pytest.mark.parametrize("device", [None, 1, "cuda", "cuda:1", torch.device("cuda", 1)])
def test_initial_seed_and_rng_state_equal_torchs(device: object) -> None:
    acc.set_rng_state(_state(5), 0)
    acc.set_rng_state(_state(6), 1)
    where = "cuda" if device is None else device
    index = torch.device(where).index or 0 if isinstance(where, str) else getattr(where, "index", where)
    assert acc.initial_seed(device) == [5, 6][index]
    assert torch.equal(acc.get_rng_state(device), torch.cuda.get_rng_state(where))


def _state(seed: int) -> torch.Tensor:
    return torch.Generator("cuda").manual_seed(seed).get_state()


def test_round_trip_of_all_states_on_two_devices() -> None:
    acc.manual_seed_all(3)
    acc.set_rng_state(_state(4), 1)
    states = acc.get_rng_state_all()
    assert len(states) == 2
    assert all(map(torch.equal, states, torch.cuda.get_rng_state_all()))
    acc.manual_seed_all(99)
    torch.rand(8, device="cuda:0")
    torch.rand(8, device="cuda:1")
    acc.set_rng_state_all(states)
    assert _seeds() == [3, 4]
    assert all(map(torch.equal, states, acc.get_rng_state_all()))


def test_states_are_copies() -> None:
    acc.manual_seed(3)
    state = acc.get_rng_state()
    kept = state.clone()
    acc.manual_seed(4)
    assert torch.equal(state, kept)


@pytest.mark.parametrize("device", [None, 0, 1, "cuda:1", torch.device("cuda", 1), torch.device("cuda")])
def test_set_rng_state_equals_torchs(device: object) -> None:
    acc.manual_seed_all(0)
    acc.set_rng_state(_state(11), device)
    ours = torch.cuda.get_rng_state_all()
    acc.manual_seed_all(0)
    torch.cuda.set_rng_state(_state(11), "cuda" if device is None else device)
    assert all(map(torch.equal, ours, torch.cuda.get_rng_state_all()))


def test_wrong_rng_states_raise_and_change_nothing() -> None:
    acc.manual_seed_all(3)
    good = acc.get_rng_state()
    for wrong in (torch.zeros(16), [0] * 16, None, good.to("cuda")):
        with pytest.raises(TypeError, match="ByteTensor"):
            acc.set_rng_state(wrong)
        with pytest.raises(TypeError, match="ByteTensor"):
            acc.set_rng_state_all([_state(5), wrong])
    with pytest.raises(ValueError, match="3 states"):
        acc.set_rng_state_all([_state(5)] * 3)
    with pytest.raises(RuntimeError):
        acc.set_rng_state(torch.zeros(3, dtype=torch.uint8))
    assert _seeds() == [3, 3]


def test_fewer_states_than_devices_keep_the_last_state() -> None:
    acc.manual_seed_all(3)
    acc.set_rng_state_all([_state(5)])
    assert _seeds() == [5, 3]


@pytest.mark.parametrize("function", [acc.initial_seed, acc.get_rng_state, acc.default_generator])
def test_devices_out_of_range_raise_value_error(function: object) -> None:
    for device in (2, -1, "cuda:2", "cpu"):
        with pytest.raises(ValueError, match=r"out of range|doesn't match"):
            function(device)  # type: ignore[operator]
        with pytest.raises(ValueError, match=r"out of range|doesn't match"):
            acc.set_rng_state(_state(1), device)
        with pytest.raises(ValueError, match=r"out of range|doesn't match"):
            acc.fork_rng([device])


def test_default_generator_is_torchs() -> None:
    torch.cuda.set_device(1)
    assert acc.default_generator() is torch.cuda.default_generators[1]
    assert acc.default_generator(0) is torch.cuda.default_generators[0]
    assert acc.default_generator("cuda:0") is torch.cuda.default_generators[0]


def test_fork_rng_restores_every_generator_after_exception() -> None:
    torch.manual_seed(1)
    acc.manual_seed_all(1)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), acc.fork_rng():
        torch.manual_seed(2)
        acc.set_rng_state(_state(3), 1)
        torch.rand(4, device="cuda")
        assert _seeds() == [2, 3]
        _ = 1 / 0
    assert _seeds() == [1, 1]
    assert torch.equal(before, torch.get_rng_state())


def test_fork_rng_restores_only_given_devices() -> None:
    torch.manual_seed(1)
    with acc.fork_rng(index for index in ["cuda:1"]):
        acc.manual_seed_all(2)
    assert _seeds() == [2, 1]
    with acc.fork_rng([]):
        torch.manual_seed(3)
    assert _seeds() == [3, 3]
    assert torch.initial_seed() == 1


def test_fork_rng_nests() -> None:
    acc.manual_seed_all(1)
    with acc.fork_rng():
        acc.manual_seed_all(2)
        with acc.fork_rng([1]):
            acc.manual_seed_all(3)
        assert _seeds() == [3, 2]
    assert _seeds() == [1, 1]


def test_calling_the_module_returns_torch_random() -> None:
    assert acc.random() is torch.random  # type: ignore[operator]
    assert acc.random.manual_seed is acc.manual_seed


def test_state_on_the_device_is_refused_with_the_cure() -> None:
    with pytest.raises(TypeError, match=r"on the CPU, not one on cuda:0: pass its \.cpu\(\)"):
        acc.set_rng_state(acc.get_rng_state(0).to("cuda:0"), 0)
