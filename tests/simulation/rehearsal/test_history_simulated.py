"""The curves of a rehearsal's plot, from torch's history of allocations."""

from __future__ import annotations

import gc
import importlib
import types
import warnings
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")  # which loads the simulation
history: Any = importlib.import_module("_accelerator_simulation._rehearsal.history")
peaks: Any = importlib.import_module("_accelerator_simulation._rehearsal.peaks")


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
