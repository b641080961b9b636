"""The curves of a rehearsal's plot, from torch's history of allocations."""

from __future__ import annotations

import gc
import importlib
import warnings
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")  # which loads the simulation
history: Any = importlib.import_module("_accelerator_simulation._rehearsal.history")


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


def test_a_parameter_stays_one_in_later_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    step = {1: "parameters", 3: "gradients"}
    monkeypatch.setattr(history, "_marks", [(15, None), (25, step), (35, None)])
    events = [
        event("alloc", 1, 8, 10),
        event("alloc", 2, 4, 11),
        event("alloc", 3, 8, 20),
        event("free_requested", 2, 4, 21),
        event("alloc", 4, 4, 30),
        event("alloc", 5, 1, 40),
    ]
    assert history._categories(events) == {0: "parameters", 1: "activations", 2: "gradients", 4: "activations"}


class Proxy:
    """An object that warns when its class is asked for, as deprecated names of torch.distributed do."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        warnings.warn("deprecated", FutureWarning, stacklevel=2)
        return int


def test_looking_for_parameters_asks_no_other_object(monkeypatch: pytest.MonkeyPatch) -> None:
    marked: list[Any] = []
    monkeypatch.setattr(history, "_has_plot", True)
    monkeypatch.setattr(history, "_mark", lambda parameters, *_: marked.extend(parameters))
    parameter, tensor, proxy = torch.nn.Parameter(torch.ones(2)), torch.ones(2), [Proxy()]
    buffer = torch.nn.Buffer(torch.ones(2))
    assert gc.is_tracked(proxy[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history.note_out_of_memory()
    assert any(each is parameter for each in marked)
    assert not any(each is other for each in marked for other in (tensor, buffer))
