"""Profiler ranges: each is popped from the stack that it was pushed on. No test needs an accelerator."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import accelerator as acc
from accelerator import profiling
from accelerator._torch import bindings


class Stack(list[str]):
    """A stand-in for NVTX or one of its domains: the list of ranges that are pushed and not popped."""


@pytest.fixture
def default(monkeypatch: pytest.MonkeyPatch) -> Stack:
    stack = Stack()
    monkeypatch.setattr(bindings, "nvtx", SimpleNamespace(rangePushA=stack.append, rangePop=stack.pop))
    return stack


@pytest.fixture
def domains(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Stack]]:
    """The domains of a stand-in for the package nvtx, which has only what its oldest versions have."""
    domains: dict[str, Stack] = {}

    def push_range(message: str, color: str = "blue", domain: str = "NVTX", category: str | None = None) -> None:
        domains.setdefault(domain, Stack()).append(message if category is None else f"{message} ({category})")

    def pop_range(domain: str = "NVTX") -> None:
        domains[domain].pop()

    module: Any = ModuleType("nvtx")
    module.push_range, module.pop_range = push_range, pop_range
    monkeypatch.setitem(sys.modules, "nvtx", module)
    profiling._nvtx.cache_clear()
    yield domains
    profiling._nvtx.cache_clear()


@pytest.fixture
def no_domains(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "nvtx", None)
    profiling._nvtx.cache_clear()
    yield
    profiling._nvtx.cache_clear()


def test_ranges_without_domain_use_torchs_nvtx(default: Stack, domains: dict[str, Stack]) -> None:
    acc.range_push("outer")
    acc.range_push("inner", category="ignored")
    assert default == ["outer", "inner"]
    acc.range_pop()
    assert default == ["outer"]
    acc.range_pop()
    assert default == []
    assert domains == {}


def test_each_domain_has_its_own_stack(default: Stack, domains: dict[str, Stack]) -> None:
    acc.range_push("one", "A", "category")
    acc.range_push("two", domain="B")
    assert domains == {"A": ["one (category)"], "B": ["two"]}
    acc.range_pop("A")
    assert domains == {"A": [], "B": ["two"]}
    acc.range_pop(domain="B")
    assert domains == {"A": [], "B": []}
    assert default == []


@pytest.mark.usefixtures("no_domains")
def test_domains_without_nvtx_package_use_torchs_ranges(default: Stack) -> None:
    acc.range_push("one", "A", "category")
    assert default == ["one"]
    acc.range_pop("A")
    assert default == []


@pytest.mark.usefixtures("no_domains")
def test_ranges_without_nvtx_have_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bindings, "nvtx", None)
    acc.range_push("one")
    acc.range_push("two", "A")
    acc.range_pop("A")
    acc.range_pop()


def test_ranges_with_torchs_real_nvtx() -> None:
    assert (bindings.nvtx is not None) == (torch.version.cuda is not None)
    acc.range_push("one")
    acc.range_pop()


def test_annotations_pop_on_exceptions_and_nest(default: Stack, domains: dict[str, Stack]) -> None:
    annotation = acc.annotate("step", domain="A")
    with pytest.raises(ZeroDivisionError), annotation, annotation, acc.annotate("inside"):
        assert domains["A"] == ["step", "step"]
        assert default == ["inside"]
        _ = 1 / 0
    assert domains["A"] == default == []


def test_annotations_decorate(default: Stack) -> None:
    @acc.annotate("count down")
    def count_down(depth: int) -> list[str]:
        """Count down to 0."""
        return count_down(depth - 1) if depth else list(default)

    assert count_down.__name__ == "count_down"
    assert count_down(2) == ["count down"] * 3
    assert default == []
    with pytest.raises(TypeError):
        count_down("x")  # type: ignore[arg-type]
    assert default == []


def test_compiled_code_has_no_ranges_and_no_graph_breaks(default: Stack) -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        acc.range_push("double")
        x = x * 2
        acc.range_pop()
        return x

    compiled = torch.compile(double, backend="eager", fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert default == []


def test_supports_nvtx_domain(default: Stack, domains: dict[str, Stack]) -> None:
    assert acc.supports_nvtx_domain is True
    acc.range_push("step", domain="DeepSpeed")
    assert (default, domains) == ([], {"DeepSpeed": ["step"]})
    acc.range_pop(domain="DeepSpeed")
    assert domains == {"DeepSpeed": []}
