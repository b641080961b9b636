"""Tests of configure(): which arguments it accepts, that a rejected call changes nothing, and the times of regions."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerator import checkpointing, streams
from accelerator.checkpointing import configuration, groups, timing
from accelerator.checkpointing.configuration import Settings
from tests.programs import in_child


@pytest.fixture(autouse=True)
def _reset_configuration(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(configuration, "current", Settings())
    monkeypatch.setattr(configuration, "_configured", False)
    return


def section(**keys: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, "activation_checkpointing": keys}


class Mpu:
    def __init__(self, rank: Any = 0, size: Any = 1) -> None:
        self.result = (rank, size)

    def get_model_parallel_rank(self) -> Any:
        return self.result[0]

    def get_model_parallel_world_size(self) -> Any:
        return self.result[1]

    def get_model_parallel_group(self) -> Any:
        return None


def test_is_configured_is_false_before_configure() -> None:
    assert not checkpointing.is_configured()
    x = torch.ones(2, requires_grad=True)
    checkpointing.checkpoint(torch.exp, x).sum().backward()
    checkpointing.reset()
    assert not checkpointing.is_configured()


def test_defaults() -> None:
    checkpointing.configure()
    assert checkpointing.is_configured()
    assert configuration.current == Settings()


KEYS = {
    "partition_activations": True,
    "contiguous_memory_optimization": True,
    "number_checkpoints": 7,
    "cpu_checkpointing": True,
    "synchronize_checkpoint_boundary": True,
    "profile": True,
}


@pytest.mark.parametrize("from_file", [False, True])
def test_every_key_of_the_deepspeed_config(from_file: bool, tmp_path: Path) -> None:
    content: Any = section(**KEYS)
    if from_file:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(content))
        content = path
    checkpointing.configure(deepspeed_config=content)
    now = configuration.current
    assert now.partition_activations
    assert now.contiguous_checkpointing
    assert now.num_checkpoints == 7
    assert now.checkpoint_in_cpu
    assert now.synchronize
    assert now.profile


def test_arguments_override_the_deepspeed_config() -> None:
    checkpointing.configure(
        None, section(partition_activations=True, number_checkpoints=2, profile=True), num_checkpoints=5, profile=False
    )
    now = configuration.current
    assert now.partition_activations
    assert now.num_checkpoints == 5
    assert not now.profile


def test_configure_resets_to_the_defaults() -> None:
    checkpointing.configure(deepspeed_config=section(**KEYS), preserve_rng_state=False, determinism_check="none")
    checkpointing.configure(profile=True)
    assert configuration.current == Settings(profile=True)


def test_number_checkpoints_accepts_null() -> None:
    checkpointing.configure(deepspeed_config=section(number_checkpoints=None))
    assert configuration.current.num_checkpoints is None


WRONG: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "unknown keys": (ValueError, "partitioned, zap", {"deepspeed_config": section(zap=1, partitioned=True)}),
    "keys outside of the section": (ValueError, "belong in the section", {"deepspeed_config": {"cpu_checkpointing": True}}),
    "section of the wrong kind": (TypeError, "must be a dict", {"deepspeed_config": {"activation_checkpointing": 3}}),
    "value of the wrong kind": (TypeError, "profile must be of type bool", {"deepspeed_config": section(profile="yes")}),
    "number of the wrong kind": (TypeError, "number_checkpoints", {"deepspeed_config": section(number_checkpoints=True)}),
    "configuration of the wrong kind": (TypeError, "a dict or the path", {"deepspeed_config": 3}),
    "missing file": (FileNotFoundError, "missing.json", {"deepspeed_config": "/nowhere/missing.json"}),
    "contiguous alone": (ValueError, "needs partition_activations", {"contiguous_checkpointing": True, "num_checkpoints": 1}),
    "contiguous without a number": (
        ValueError,
        "needs num_checkpoints",
        {"contiguous_checkpointing": True, "partition_activations": True},
    ),
    "no checkpoints": (ValueError, "at least 1", {"num_checkpoints": 0}),
    "checkpoints of the wrong kind": (TypeError, "num_checkpoints", {"num_checkpoints": "three"}),
    "flag of the wrong kind": (TypeError, "partition_activations must be True or False", {"partition_activations": 1}),
    "rng of the wrong kind": (TypeError, "preserve_rng_state", {"preserve_rng_state": None}),
    "unknown check": (ValueError, "default, none, debug", {"determinism_check": "always"}),
    "mpu without methods": (TypeError, "get_<prefix>_parallel_rank", {"mpu_": object()}),
    "mpu with strings": (TypeError, "must return an integer", {"mpu_": Mpu("0", 1)}),
    "mpu out of range": (ValueError, "rank 2 of 2", {"mpu_": Mpu(2, 2)}),
    "mpu without a group": (TypeError, "ProcessGroup", {"mpu_": Mpu(1, 2)}),
    "group of the wrong kind": (TypeError, "ProcessGroup", {"group": "world"}),
    "mpu and group": (ValueError, "both", {"mpu_": Mpu(), "group": "world"}),
}


@pytest.mark.parametrize("configured", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_invalid_arguments_change_nothing(name: str, configured: bool) -> None:
    error_type, text, arguments = WRONG[name]
    if configured:
        checkpointing.configure(profile=True, num_checkpoints=3)
    before = configuration.current
    with pytest.raises(error_type, match=text):
        checkpointing.configure(**arguments)
    assert configuration.current is before
    assert checkpointing.is_configured() is configured


@pytest.mark.parametrize("content", ["{", "", "[1, 2", '{"activation_checkpointing": }'])
def test_a_file_that_is_not_json(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="not JSON"):
        checkpointing.configure(deepspeed_config=str(path))
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not JSON"):
        checkpointing.configure(deepspeed_config=path)


def test_a_file_that_holds_no_dict(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[]")
    with pytest.raises(TypeError, match="a dict or the path"):
        checkpointing.configure(deepspeed_config=path)


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 3)])
def test_an_mpu_that_contradicts_its_group_is_refused(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    monkeypatch.setattr(groups, "from_group", lambda handle: groups.Group(handle, 1, 2))
    with pytest.raises(ValueError, match=f"rank {rank} of {size}, but its .* as rank 1 of 2"):
        checkpointing.configure(Mpu(rank, size))


def test_an_mpu_of_size_one_needs_no_process_group() -> None:
    checkpointing.configure(Mpu(), partition_activations=True)
    x = torch.ones(3, requires_grad=True)
    checkpointing.checkpoint(lambda h: h.sin().exp(), x).sum().backward()
    assert checkpointing.get_partition_size(x) == 3


@pytest.mark.parametrize(("first", "second"), [("tensor_model", "slice"), ("slice", "model"), ("tensor_model", "model")])
def test_mpu_with_several_groups_uses_the_preferred_prefix(first: str, second: str) -> None:
    """configure() uses the preferred prefix: its single rank needs no process group. The other prefix would be an error."""
    mpu: Any = type("SeveralGroups", (), {})()
    for prefix, size in ((first, 1), (second, 2)):
        for suffix, value in (("rank", 0), ("world_size", size), ("group", None)):
            setattr(mpu, f"get_{prefix}_parallel_{suffix}", lambda value=value: value)
    checkpointing.configure(mpu)
    assert checkpointing.mp_size == 1


def test_setters() -> None:
    checkpointing.set_num_layers(4)
    checkpointing.partition_activations_in_checkpoint(True)
    assert configuration.current.num_checkpoints == 4
    assert configuration.current.partition_activations
    before = configuration.current
    setters: list[tuple[type[Exception], Callable[[Any], None], Any]] = [
        (ValueError, checkpointing.set_num_layers, 0),
        (TypeError, checkpointing.set_num_layers, "4"),
        (TypeError, checkpointing.partition_activations_in_checkpoint, None),
    ]
    for error_type, setter, value in setters:
        with pytest.raises(error_type):
            setter(value)
    assert configuration.current is before
    checkpointing.configure(partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2)
    with pytest.raises(ValueError, match="needs partition_activations"):
        checkpointing.partition_activations_in_checkpoint(False)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_region_times_in_a_child_that_was_forked_while_a_region_ended() -> None:
    def read() -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        checkpointing.region_times()

    with timing._lock:
        in_child(read)


def test_region_times_of_nested_checkpoints() -> None:
    checkpointing.configure(synchronize=True, profile=True)
    checkpointing.region_times(clear=True)
    layer = torch.nn.Linear(3, 3)

    def outer(h: torch.Tensor) -> torch.Tensor:
        return checkpointing.non_reentrant_checkpoint(layer, h).exp()

    x = torch.ones(1, 3, requires_grad=True)
    h = x
    for _ in range(3):
        h = checkpointing.checkpoint(outer, h)
    h.sum().backward()
    times = checkpointing.region_times()
    assert set(times) == {"Linear", outer.__qualname__}
    assert times[outer.__qualname__].calls == 3
    assert times[outer.__qualname__].recomputations == 3
    # The inner checkpoint runs in each forward, and again in each recomputation of the outer function.
    assert times["Linear"].calls == 6
    assert times["Linear"].recomputations == 3
    assert times[outer.__qualname__].forward_seconds > 0
    assert times[outer.__qualname__].recompute_seconds > 0
    assert checkpointing.region_times(clear=True) == times
    assert not checkpointing.region_times()


def test_synchronize_before_and_after_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(streams, "synchronize", lambda: events.append("synchronize"))

    def function(h: torch.Tensor) -> torch.Tensor:
        events.append("function")
        return h.sin().exp()

    checkpointing.configure(synchronize=True)
    out = checkpointing.checkpoint(function, torch.ones(1, requires_grad=True))
    assert events == ["synchronize", "function", "synchronize"]
    events.clear()
    out.sum().backward()
    assert events == ["synchronize", "function", "synchronize"]


def test_profile_counts_regions_that_raise() -> None:
    checkpointing.configure(profile=True)
    checkpointing.region_times(clear=True)

    def failing(h: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        checkpointing.checkpoint(failing, torch.ones(1, requires_grad=True))
    assert checkpointing.region_times(clear=True)[failing.__qualname__].calls == 1


def test_public_names() -> None:
    assert sorted(checkpointing.__all__) == checkpointing.__all__
    assert dir(checkpointing) == checkpointing.__all__
    for name in checkpointing.__all__:
        assert getattr(checkpointing, name).__doc__
    with pytest.raises(AttributeError):
        getattr(checkpointing, "get_" + "accelerator")
