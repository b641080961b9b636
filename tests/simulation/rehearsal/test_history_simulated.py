"""The curves of a rehearsal's plot, from torch's history of allocations."""

from __future__ import annotations

import gc
import importlib
import json
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")  # which loads the simulation
history: Any = importlib.import_module("_accelerator_simulation._inside.rehearsal.history")
peaks: Any = importlib.import_module("_accelerator_simulation._inside.rehearsal.peaks")


def event(action: str, address: int, size: int, time: int = 0) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "time_us": time}


def test_a_point_is_the_peak_of_allocated_memory_in_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_marks", [])
    monkeypatch.setattr(history, "_MOST_POINTS", 1)
    events = [
        event("segment_alloc", 0, 100),
        event("alloc", 1, 60),
        event("free_requested", 1, 60),
        event("segment_alloc", 100, 100),
        event("alloc", 2, 20),
    ]
    [point] = history._points(events)
    allocated, reserved = sum(point[:-1]), point[-1]
    assert (allocated, reserved) == (60, 100)  # at the end, less is allocated and more is reserved


def test_each_interval_has_a_point_and_so_has_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_marks", [])
    monkeypatch.setattr(history, "_MOST_POINTS", 2)
    events = [event("alloc", 1, 4), event("free_requested", 1, 4), *(event("alloc", address, 1) for address in (2, 3, 4))]
    assert [sum(point[:-1]) for point in history._points(events)] == [4, 2, 3]


def test_each_device_that_was_used_has_its_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.cuda.init()
    monkeypatch.setattr(history, "_marks", [])
    monkeypatch.setattr(history, "_has_plot", True)
    monkeypatch.setattr(history, "_has_snapshot", False)
    of_snapshot = {"action": "snapshot", "size": 0}
    traces = [[of_snapshot], [event("segment_alloc", 0, 8), event("alloc", 0, 6), of_snapshot], [event("segment_alloc", 0, 9)]]
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": traces})
    history.end(str(tmp_path))
    curves = sorted(json.loads(file.read_text())["points"] for file in tmp_path.iterdir())
    devices = sorted(json.loads(file.read_text())["device"] for file in tmp_path.iterdir())
    assert curves == [[[0, 0, 0, 0, 0, 8], [0, 0, 0, 6, 0, 8]], [[0, 0, 0, 0, 0, 9]]]
    assert devices == [1, 2]


def test_the_newest_mark_decides_and_else_who_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_marks", [(15, {1: "parameters"}), (25, {2: "gradients", 3: "gradients"})])
    step = [{"filename": torch.optim.__file__, "line": 1, "name": "step"}]
    program = [{"filename": "/train.py", "line": 1, "name": "main"}]
    events = [
        event("alloc", 1, 8, 10),
        {**event("alloc", 2, 4, 11), "frames": program},
        event("alloc", 3, 8, 20),
        event("free_requested", 2, 4, 21),
        {**event("alloc", 4, 4, 30), "frames": step},
        event("alloc", 2, 1, 40),
    ]
    categories = history._categories(events)
    assert [*categories] == [0, 1, 2, 4, 5]
    assert [*categories.values()] == ["parameters", "other", "gradients", "optimizer state", "activations"]


class Proxy:
    """An object that warns when its class is asked for, as deprecated names of torch.distributed do."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        warnings.warn("deprecated", FutureWarning, stacklevel=2)
        return int


def test_looking_for_parameters_asks_no_other_object(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[Any] = []
    monkeypatch.setattr(peaks, "addresses_of", lambda parameters, *_: marked.extend(parameters))
    parameter, tensor, proxy = torch.nn.Parameter(torch.ones(2)), torch.ones(2), [Proxy()]
    buffer = torch.nn.Buffer(torch.ones(2))
    assert gc.is_tracked(proxy[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        peaks.known_addresses()
    assert any(each is parameter for each in marked)
    assert not any(each is other for each in marked for other in (tensor, buffer))


class Sharded(torch.Tensor):  # type: ignore[misc]
    """Holds its memory as a DTensor does: in a local tensor."""

    def __new__(cls, local: Any) -> Any:
        tensor = torch.Tensor._make_subclass(cls, torch.empty(local.shape))
        tensor._local_tensor = local
        return tensor


@pytest.mark.parametrize("is_sharded", [False, True])
def test_memory_of_two_parameters_is_known_after_a_step(is_sharded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_marks", [])
    monkeypatch.setattr(history, "_has_stepped", True)
    monkeypatch.setattr(history, "_has_plot", True)
    memory = {
        name: [torch.ones(4, device="cuda") for _ in range(2)]
        for name in ("parameters", "gradients", "optimizer state", "more optimizer state")
    }
    wrap: Any = Sharded if is_sharded else torch.Tensor.detach
    parameters: list[Any] = []
    for local, grad in zip(memory["parameters"], memory["gradients"], strict=True):
        parameter = wrap(local)
        parameter.grad = wrap(grad)
        parameters.append(parameter)
    states = zip(memory["optimizer state"], memory["more optimizer state"], strict=True)
    optimizer = types.SimpleNamespace(
        param_groups=[{"params": [parameter]} for parameter in parameters],
        state={
            parameter: {"step": torch.tensor(1.0), "exp_avg": wrap(one), "exp_avg_sq": wrap(other)}
            for parameter, (one, other) in zip(parameters, states, strict=True)
        },
    )
    expected = {tensor.data_ptr(): name.removeprefix("more ") for name, tensors in memory.items() for tensor in tensors}
    history._mark_step(optimizer)
    [(_, by_address)] = history._marks
    assert by_address == expected

    # Out of memory in the middle of the next step: the parameters and the optimizer are those that live.
    monkeypatch.setattr(gc, "get_objects", lambda: [*parameters, optimizer])
    monkeypatch.setattr(torch.nn, "Parameter", type(parameters[0]))
    monkeypatch.setattr(torch.optim, "Optimizer", type(optimizer))
    history.note_out_of_memory()
    assert history._marks[1][1] == expected


def test_what_holds_the_memory_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def frames(*places: tuple[str, int, str]) -> list[dict[str, Any]]:
        return [{"filename": filename, "line": line, "name": name} for filename, line, name in places]

    folder = torch.__path__[0]
    of_torch, of_module = (f"{folder}/functional.py", 1, "split"), (f"{folder}/nn/modules/module.py", 2, "call")
    inner, outer = ("/model.py", 3, "forward"), ("/train.py", 4, "main")
    blocks = [
        (0, 50, "active_allocated", frames(of_torch, inner, of_module, outer)),
        (1, 30, "active_allocated", frames(of_torch, outer)),  # parameters
        (2, 70, "active_allocated", frames(inner)),  # gradients
        (3, 1000, "inactive", frames(inner)),
        (4, 2000, "active_pending_free", frames(inner)),
        (5, 60, "active_allocated", frames(of_torch)),
        (6, 5, "active_allocated", []),
        *((10 + line, 10 + line, "active_allocated", frames(("/data.py", line, "load"))) for line in range(3)),
    ]
    names = "address", "size", "state", "frames"
    segments = [
        {"device": 0, "blocks": [dict(zip(names, (0, 9999, "active_allocated", frames(outer)), strict=True))]},
        *({"device": 1, "blocks": [dict(zip(names, each, strict=True)) for each in part]} for part in (blocks[:5], blocks[5:])),
    ]
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": segments})
    found = peaks.held_memory(1, "/train.py:5 in main", {1: "parameters", 2: "gradients", 3: "parameters"})
    assert found == peaks.Peak(
        where="/train.py:5 in main",
        allocated=50 + 30 + 70 + 60 + 5 + 10 + 11 + 12,
        held=[30, 70, 0, 50 + 60 + 5, 10 + 11 + 12],
        lines=[
            ["/model.py:3 in forward", 120],
            ["a backward", 60],
            ["/train.py:4 in main", 30],
            ["/data.py:2 in load", 12],
            ["/data.py:1 in load", 11],
        ],
    )


def test_memory_of_parameters_that_consist_of_others_or_have_none() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.two_tensor import TwoTensor

    with FakeTensorMode():
        fake = torch.nn.Parameter(torch.empty(4, device="cuda"))
    parts = [torch.ones(4, device="cuda") for _ in range(2)]
    whole = torch.nn.Parameter(TwoTensor(*parts))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as torch warns about the address of a fake tensor
        found = peaks.addresses_of([fake, whole])
    assert found == dict.fromkeys((part.data_ptr() for part in parts), "parameters")


@pytest.mark.parametrize(("grow", "shrink"), [("segment_alloc", "segment_free"), ("segment_map", "segment_unmap")])
def test_reserved_memory_falls_as_it_has_risen(grow: str, shrink: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_marks", [])
    events = [event(grow, 0, 100), event(grow, 100, 20), event(shrink, 0, 100), event(shrink, 100, 20)]
    assert [point[-1] for point in history._points(events)] == [100, 120, 20, 0]
