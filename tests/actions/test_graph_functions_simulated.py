"""Capturing and replaying on two simulated GPUs, through the functions that DeepSpeed and torch.cuda have for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import accelerator as acc


@pytest.fixture(autouse=True)
def _first_device() -> Iterator[None]:
    torch.cuda.set_device(0)
    yield
    torch.cuda.set_device(0)


def _host_to(tensor: torch.Tensor, values: list[float]) -> None:
    tensor.copy_(torch.tensor(values))


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("make", [acc.create_graph, acc.Graph, torch.cuda.CUDAGraph])
def test_a_replay_copies_what_is_there_by_then(make: Any, index: int) -> None:
    torch.cuda.set_device(index)
    graph = make()
    source, target = torch.zeros(2, device="cuda"), torch.zeros(2, device="cuda")
    before = torch.cuda.current_stream()
    with acc.capture_to_graph(graph):
        assert torch.cuda.current_device() == index
        assert torch.cuda.current_stream() != before
        assert acc.is_current_stream_capturing() is torch.cuda.is_current_stream_capturing() is True
        target.copy_(source)
    assert torch.cuda.current_stream() == before
    assert acc.is_current_stream_capturing() is torch.cuda.is_current_stream_capturing() is False
    _host_to(source, [3.0, 4.0])
    assert target.tolist() == [0.0, 0.0]
    assert acc.replay_graph(graph) is None
    assert target.tolist() == [3.0, 4.0]


def test_each_device_has_a_capture_stream_of_its_own_and_keeps_it() -> None:
    streams = []
    for index in (0, 1, 0):
        torch.cuda.set_device(index)
        with acc.capture_to_graph(acc.create_graph()):
            torch.ones(1, device="cuda")
            streams.append(torch.cuda.current_stream())
    assert streams[0] == streams[2]
    assert [stream.device_index for stream in streams] == [0, 1, 0]


def test_capture_on_a_given_stream_and_in_a_given_pool() -> None:
    pool, stream = acc.graph_pool_handle(), torch.cuda.Stream()
    first, second = acc.create_graph(), acc.create_graph()
    with acc.capture_to_graph(first, pool, stream):
        assert torch.cuda.current_stream() == stream
        kept = torch.ones(1024, device="cuda")
    with acc.capture_to_graph(second, pool=first.pool(), stream=stream):
        other = torch.ones(1024, device="cuda")
    assert tuple(first.pool()) == tuple(second.pool()) == tuple(pool)
    assert kept.data_ptr() != other.data_ptr()


def test_the_pool_of_the_graph_is_used_when_none_is_given() -> None:
    pool = acc.graph_pool_handle()
    graph = acc.Graph(pool=pool)
    with acc.capture_to_graph(graph):
        kept = torch.ones(1024, device="cuda")
    assert tuple(graph.pool()) == tuple(pool)
    assert kept.is_cuda


def test_an_exception_ends_the_capture() -> None:
    with pytest.raises(ZeroDivisionError), acc.capture_to_graph(acc.create_graph()):
        torch.ones(1, device="cuda")
        _ = 1 / 0
    assert not acc.is_current_stream_capturing()
    with acc.capture_to_graph(acc.create_graph()):
        torch.ones(1, device="cuda")


def test_pool_handles_differ_and_are_torchs() -> None:
    first, second = acc.graph_pool_handle(), acc.graph_pool_handle()
    assert first != second
    assert type(first) is type(torch.cuda.graph_pool_handle())


def test_replaying_before_a_capture_is_an_error() -> None:
    with pytest.raises(RuntimeError):
        acc.replay_graph(acc.create_graph())


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_graphed_callables_have_the_results_shape_and_gradients() -> None:
    module = torch.nn.LayerNorm(3, device="cuda")  # a layer that needs no cuBLAS, which simulated GPUs have not
    sample = torch.ones(4, 3, device="cuda", requires_grad=True)
    graphed = acc.make_graphed_callables(module, (sample,), num_warmup_iters=2)
    result = graphed(torch.ones(4, 3, device="cuda", requires_grad=True))
    assert result.shape == (4, 3)
    result.sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.shape == (3,)


def test_several_callables_come_back_in_order() -> None:
    pool = acc.graph_pool_handle()
    made = acc.make_graphed_callables(
        (lambda x: x[:1].clone(), lambda x: x.clone()),
        ((torch.ones(2, device="cuda"),), (torch.ones(3, device="cuda"),)),
        pool=pool,
    )
    assert [function(torch.zeros(2 + place, device="cuda")).shape for place, function in enumerate(made)] == [(1,), (3,)]
    with pytest.raises(TypeError):
        acc.make_graphed_callables(lambda x: x, (torch.ones(2, device="cuda"),), no_such_option=1)
