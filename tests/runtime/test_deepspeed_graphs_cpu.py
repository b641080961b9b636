"""Graphs through DeepSpeed's accelerator object under the CPU fallback: as its object for the CPU, which captures nothing."""

from __future__ import annotations

import abc
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import accelerator as acc


class AbstractAccelerator(abc.ABC):
    """The methods of DeepSpeed's abstract class that this test calls."""

    @abc.abstractmethod
    def create_graph(self) -> Any: ...

    @abc.abstractmethod
    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any: ...

    @abc.abstractmethod
    def replay_graph(self, graph: Any) -> None: ...


def test_graphs_run_their_work_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("deepspeed.accelerator")
    used: list[Any] = []
    module.DeepSpeedAccelerator, module.set_accelerator = AbstractAccelerator, used.append
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.accelerator", module)
    acc.use_in_deepspeed()
    graph = used[0].create_graph()
    assert graph is None
    total = torch.zeros(1)
    with used[0].capture_to_graph(graph, pool=None, stream=None):
        total += 1
    used[0].replay_graph(graph)
    assert total.tolist() == [1]
    with pytest.raises(RuntimeError, match="Graphs need an accelerator"):
        acc.create_graph()
