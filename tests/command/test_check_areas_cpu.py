"""Each area of ``check`` notices a result that is wrong, and says which. A process without an accelerator is enough."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import accelerator as acc
from accelerator._command import all_reduce, check_areas


def results(*values: Any) -> Callable[..., Any]:
    """Return a function that returns these, one after the other."""
    left = iter(values)
    return lambda *arguments, **options: next(left)


def always(value: Any) -> Callable[..., Any]:
    return lambda *arguments, **options: value


class Event:
    """An event that is reached, and before which no time has passed."""

    elapsed, is_reached = 0.0, True

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: object) -> None:
        pass

    def elapsed_time(self, other: object) -> float:
        return self.elapsed

    def query(self) -> bool:
        return self.is_reached


class Backward(Event):
    elapsed = -1.0


class NotReached(Event):
    is_reached = False


DEVICE = acc.VisibleDevice(*[None] * len(acc.VisibleDevice._fields))  # type: ignore[arg-type]
TELEMETRY = acc.Telemetry(*[None] * len(acc.Telemetry._fields))  # type: ignore[arg-type]
IN_TURN = (5, 1, 1, 1, 0, 1, 0, 5)  # what current_device_index() returns while devices 1 and 0 are made current


def in_turn(place: int) -> dict[str, Any]:
    """Return names with which one answer of current_device_index() is wrong."""
    answers = [*IN_TURN[:place], 9, *IN_TURN[place + 1 :]]
    return {"current_device_index": results(*answers), "device_index": always(contextlib.nullcontext())}


def checkpoint_of(result: Callable[[Any], Any]) -> dict[str, Any]:
    return {"checkpointing.checkpoint": lambda function, x: result(x)}


# An area, its arguments, what is wrong, and what the area says.
WRONG: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("discovery", (), {"is_available": always(True)}, "is_available() and unavailable_reason() disagree"),
    ("discovery", (), {"device_count": always(1)}, "0 visible devices, but device_count() is 1"),
    (
        "discovery",
        (),
        {"visible_devices": always((DEVICE._replace(index=1),)), "device_count": always(1)},
        "visible devices are not numbered in order",
    ),
    ("launching", (), {"set_visible_devices_envs": lambda given, ids: given}, "device 1 of '3,5' became '3,5'"),
    ("fork", (), {"is_fork_safe": always(False)}, "fork is not safe after the queries of this check"),
    (
        "fork",
        (),
        {"is_in_bad_fork": always(True)},
        "a child cannot use the accelerator if it is forked after the queries of this check",
    ),
    (
        "monitoring",
        (0,),
        {"telemetry": always(TELEMETRY._replace(device_memory_used=-1))},
        "telemetry() has device_memory_used -1",
    ),
    ("devices_in_turn", ([1, 0],), in_turn(1), "device_index(1) did not make it the current device"),
    ("devices_in_turn", ([1, 0],), in_turn(2), "nested device_index() did not change the device"),
    ("devices_in_turn", ([1, 0],), in_turn(3), "nested device_index() did not restore the device"),
    ("devices_in_turn", ([1, 0],), in_turn(4), "device_index(0) did not make it the current device"),
    ("devices_in_turn", ([1, 0],), in_turn(5), "nested device_index() did not change the device"),
    ("devices_in_turn", ([1, 0],), in_turn(6), "nested device_index() did not restore the device"),
    ("devices_in_turn", ([1, 0],), in_turn(7), "device_index() did not restore the current device"),
    ("streams", (0,), {"current_stream": always("a stream")}, "the current stream is not an acc.Stream"),
    ("streams", (0,), {"current_stream": results(acc.Stream(), None)}, "set_stream() did not make the stream the current one"),
    ("streams", (0,), {"Event": Backward}, "after synchronize(), the events are not reached or out of order"),
    ("streams", (0,), {"Event": NotReached}, "after synchronize(), the events are not reached or out of order"),
    ("memory", (0,), {"memory_allocated": results(0, 5)}, "a tensor of 1 MiB changed memory_allocated() by 5"),
    ("memory", (0,), {"get_memory_info": always((5, 3))}, "get_memory_info() returned 5 free of 3 bytes"),
    ("memory", (0,), {"get_memory_info": always((-1, 3))}, "get_memory_info() returned -1 free of 3 bytes"),
    (
        "memory",
        (0,),
        {"memory_allocated": results(0, 0, 5)},
        "memory_allocated() did not return to its value before the tensor",
    ),
    ("random", (0,), {"initial_seed": always(8)}, "after manual_seed_all(7) initial_seed() is 8"),
    ("random", (0,), {"manual_seed": always(None)}, "manual_seed(8) left the state of seed 7"),
    ("random", (0,), {"fork_rng": contextlib.nullcontext}, "fork_rng() did not restore the state"),
    ("random", (0,), {"set_rng_state": always(None)}, "set_rng_state() did not restore the state"),
    (
        "dtypes",
        (0,),
        {"get_device_capability": always({"supported_dtypes": set()})},
        "get_device_capability() has no supported dtype",
    ),
    ("dtypes", (0,), {"supported_dtypes": always([])}, "supported_dtypes() is empty"),
    ("tensors", (0,), {"on_accelerator": always(False)}, "FloatTensor() is not on the device"),
    (
        "tensors",
        (0,),
        {"FloatTensor": always(torch.tensor([1.0, 3.0]))},
        "FloatTensor([1.0, 2.0]) has the values [1.0, 3.0]",
    ),
    ("tensors", (0,), {"is_pinned": always(True)}, "is_pinned() is True for a tensor of pin_memory()"),
    ("extensions", (), {"get_op_builder": always(object)}, "get_op_builder() returned a builder for an unknown name"),
    ("checkpointing", (0,), checkpoint_of(lambda x: torch.ones(1, requires_grad=True)), "backward() computed no gradient"),
    ("checkpointing", (0,), checkpoint_of(lambda x: x.sin()), "gradients differ: "),
]


def run(area: str, arguments: Iterable[Any]) -> str:
    said: str = getattr(check_areas, area)(*arguments)
    return said


@pytest.mark.parametrize(("area", "arguments", "wrong", "problem"), WRONG)
def test_a_wrong_result_is_noticed(
    area: str, arguments: tuple[Any, ...], wrong: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in wrong.items():
        monkeypatch.setattr(f"accelerator.{name}" if "." in name else acc, *([value] if "." in name else [name, value]))
    with acc.fork_rng(), pytest.raises(check_areas.Wrong) as caught:
        run(area, arguments)
    said = str(caught.value)
    assert said == problem or (said.startswith(problem) and problem.endswith(": "))


def test_a_product_that_differs_from_the_cpus_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_areas.arithmetic(0) == "a matrix product equals the CPU's"
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: self + 1)
    with pytest.raises(check_areas.Wrong, match="a matrix product differs from the CPU's"):
        check_areas.arithmetic(0)


def test_what_the_areas_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check restores what it changes."""
    stream, state = acc.current_stream(), acc.get_rng_state()
    monkeypatch.setattr(acc, "Event", Event)
    monkeypatch.setattr(acc, "get_memory_info", always((2**30, 3 * 2**30)))
    monkeypatch.setattr(acc, "telemetry", always(TELEMETRY._replace(temperature=0, device_memory_used=0)))
    monkeypatch.setattr(acc, "supported_dtypes", always([torch.float32, torch.bfloat16]))
    found = {area: run(area, (0,)) for area in "streams memory random dtypes tensors graphs checkpointing monitoring".split()}
    assert found == {
        "streams": "two events 0.000 ms apart",
        "memory": "1.0 of 3.0 GiB free",
        "random": "seeded and restored",
        "dtypes": "float32, bfloat16",
        "tensors": "typed and pinned",
        "graphs": "not on the CPU",
        "checkpointing": "a gradient equal to the one without checkpointing",
        "monitoring": f"2 of {len(TELEMETRY)} fields",
    }
    assert acc.current_stream() == stream
    assert torch.equal(acc.get_rng_state(), state)
    monkeypatch.setattr(acc, "current_device_index", results(*IN_TURN))
    monkeypatch.setattr(acc, "device_index", always(contextlib.nullcontext()))
    assert check_areas.devices_in_turn([1, 0]) == "2 made current in turn"
    monkeypatch.setattr(acc, "driver_version", results("580.1", None))
    assert [check_areas.discovery() for _ in range(2)] == ["0 visible, driver 580.1", "0 visible, driver none"]
    monkeypatch.setattr(acc, "communication_backend_name", always("nccl"))
    monkeypatch.setattr(acc, "communication_backend_version", results((2, 30, 4), None))
    assert [check_areas.launching() for _ in range(2)] == ["nccl 2.30.4", "nccl"]


# ---- The all-reduce. ----


@pytest.mark.parametrize(("added", "problem"), [(0, None), (1, "the sum is 2, not 1"), (-1, "the sum is 0, not 1")])
def test_a_wrong_sum_is_noticed(added: int, problem: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.add_(added))
    store = dist.FileStore(str(tmp_path / "store"), 1)
    assert all_reduce.reduce("gloo", store, 0, 0, 1, 60) == problem
    assert not dist.is_initialized()


def test_an_error_is_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(tensor: object) -> None:
        raise ValueError("no peer. More\nlines")

    monkeypatch.setattr(dist, "all_reduce", fail)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    assert all_reduce.reduce("gloo", store, 0, 0, 1, 60) == "ValueError: no peer"
    assert not dist.is_initialized()


def test_problems_of_ranks_are_those_of_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    problems: dict[int, str] = {}
    monkeypatch.setattr(all_reduce, "_fork", lambda backend, path, *rank: started.append(rank) or (0, 0))
    monkeypatch.setattr(all_reduce, "_wait", lambda ranks: problems)
    assert all_reduce.across([0, 2, 3]) == "3 processes over gloo"
    assert started == [(0, 0, 3), (1, 2, 3), (2, 3, 3)]
    problems |= {2: "late", 1: "wrong"}
    with pytest.raises(all_reduce.Failed) as caught:
        all_reduce.across([0, 2, 3])
    assert caught.value.problems == [(2, "wrong"), (3, "late")]
