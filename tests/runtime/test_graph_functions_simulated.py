"""Capture and replay of graphs on two simulated GPUs, with the functions of DeepSpeed's and of torch.cuda's interface."""

from __future__ import annotations

import ctypes
import gc
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import pytest
import torch

import accelerator as acc
from tests.support.simulation_driver import end_invalidated_capture, loaded_runtime, make_busy


@pytest.fixture(autouse=True)
def _first_device() -> Iterator[None]:
    torch.cuda.set_device(0)
    yield
    torch.cuda.set_device(0)


def _copy_from_host(tensor: torch.Tensor, values: list[float]) -> None:
    tensor.copy_(torch.tensor(values))


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("make", [acc.create_graph, acc.Graph, torch.cuda.CUDAGraph])
def test_replay_copies_current_values(make: Any, index: int) -> None:
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
    _copy_from_host(source, [3.0, 4.0])
    assert target.tolist() == [0.0, 0.0]
    assert acc.replay_graph(graph) is None
    assert target.tolist() == [3.0, 4.0]


def test_an_op_is_captured_by_the_stream_of_its_own_device() -> None:
    source, graph = torch.zeros(2, device="cuda:1"), acc.create_graph()
    torch.cuda.set_device(1)
    with acc.capture_to_graph(graph):
        torch.cuda.set_device(0)
        result = source + 1
        torch.cuda.set_device(1)
    _copy_from_host(source, [3.0, 4.0])
    acc.replay_graph(graph)
    assert result.tolist() == [4.0, 5.0]


def test_created_graph_is_an_instance_of_graph() -> None:
    class Named(acc.Graph):  # type: ignore[misc]
        name = "own"

    assert type(acc.Graph()) is type(acc.create_graph()) is acc.Graph
    assert issubclass(acc.Graph, torch.cuda.CUDAGraph)
    assert (acc.Graph.__name__, acc.Graph.__module__) == ("Graph", "accelerator.graphs")
    assert type(Named()) is Named
    assert isinstance(Named(), acc.Graph)


def test_each_device_reuses_its_own_capture_stream() -> None:
    streams = []
    for index in (0, 1, 0):
        torch.cuda.set_device(index)
        with acc.capture_to_graph(acc.create_graph()):
            torch.ones(1, device="cuda")
            streams.append(torch.cuda.current_stream())
    assert streams[0] == streams[2]
    assert [stream.device_index for stream in streams] == [0, 1, 0]


@pytest.mark.parametrize("make", [acc.create_graph, torch.cuda.CUDAGraph])
def test_capture_uses_given_stream_and_pool(make: Any) -> None:
    pool, stream = acc.graph_pool_handle(), torch.cuda.Stream()
    first, second = make(), make()
    with acc.capture_to_graph(first, pool, stream):
        assert torch.cuda.current_stream() == stream
        kept = torch.ones(1024, device="cuda")
    with acc.capture_to_graph(second, pool=first.pool(), stream=stream):
        other = torch.ones(1024, device="cuda")
    assert tuple(first.pool()) == tuple(second.pool()) == tuple(pool)
    assert kept.data_ptr() != other.data_ptr()


def test_capture_without_pool_uses_the_graphs_pool() -> None:
    pool = acc.graph_pool_handle()
    graph = acc.Graph(pool=pool)
    with acc.capture_to_graph(graph):
        kept = torch.ones(1024, device="cuda")
    assert tuple(graph.pool()) == tuple(pool)
    assert kept.is_cuda
    other = acc.graph_pool_handle()
    for capture in (acc.capture_to_graph, torch.cuda.graph):
        for argument, used in ((other, other), (None, pool)):
            graph.reset()
            with capture(graph, argument):
                kept = torch.ones(1024, device="cuda")
            assert tuple(graph.pool()) == tuple(used)


def test_exception_ends_the_capture() -> None:
    with pytest.raises(ZeroDivisionError), acc.capture_to_graph(acc.create_graph()):
        torch.ones(1, device="cuda")
        _ = 1 / 0
    assert not acc.is_current_stream_capturing()
    with acc.capture_to_graph(acc.create_graph()):
        torch.ones(1, device="cuda")


class Failing(acc.Graph):  # type: ignore[misc]
    """A graph whose capture fails in one step."""

    step = ""

    def capture_begin(self, *arguments: Any, **options: Any) -> None:
        if self.step == "begin":
            raise ZeroDivisionError
        super().capture_begin(*arguments, **options)

    def capture_end(self) -> None:
        super().capture_end()
        if self.step == "end":
            raise ZeroDivisionError


@pytest.mark.parametrize("step", ["synchronize", "stream", "begin", "body", "end"])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("borrowed", [True, False])
def test_failing_capture_restores_pool_and_stream(
    step: str, own: bool, borrowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise ZeroDivisionError

    pools = [acc.graph_pool_handle() if given else None for given in (own, borrowed)]
    graph, other = Failing(pool=pools[0]), acc.Graph()
    graph.step, before = step, acc.current_stream()
    with monkeypatch.context() as patch:
        if step in ("synchronize", "stream"):
            patch.setattr(acc.streams, step, fail)
        with pytest.raises(ZeroDivisionError), acc.capture_to_graph(graph, pools[1]):
            torch.ones(1, device="cuda")
            if step == "body":
                fail()
    assert graph.graph_pool == pools[0]
    assert acc.current_stream() == before
    assert not acc.is_current_stream_capturing()
    graph.step = ""
    graph.reset()
    for each in (graph, other):
        with acc.capture_to_graph(each):
            kept = torch.ones(1, device="cuda")
        each.replay()
        assert kept.tolist() == [1.0]
    assert pools[0] is None or tuple(graph.pool()) == tuple(pools[0])
    assert tuple(graph.pool()) not in [pools[1], tuple(other.pool())]


def test_capture_on_the_default_stream_restores_the_pool() -> None:
    graph, pool = acc.Graph(), acc.graph_pool_handle()
    with pytest.raises(RuntimeError), acc.capture_to_graph(graph, pool, acc.default_stream()):
        pass
    assert graph.graph_pool is None


def test_pool_handles_are_distinct_and_of_torchs_type() -> None:
    first, second = acc.graph_pool_handle(), acc.graph_pool_handle()
    assert first != second
    assert type(first) is type(torch.cuda.graph_pool_handle())


def test_replay_before_capture_raises() -> None:
    with pytest.raises(RuntimeError):
        acc.replay_graph(acc.create_graph())


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_graphed_callable_has_output_shape_and_gradients() -> None:
    module = torch.nn.LayerNorm(3, device="cuda")  # needs no cuBLAS, which simulated GPUs lack
    sample = torch.ones(4, 3, device="cuda", requires_grad=True)
    graphed = acc.make_graphed_callables(module, (sample,), num_warmup_iters=2)
    result = graphed(torch.ones(4, 3, device="cuda", requires_grad=True))
    assert result.shape == (4, 3)
    result.sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.shape == (3,)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("allow_unused_input", [False, True])
@pytest.mark.parametrize("num_warmup_iters", [1, 2, 5])
def test_options_of_graphed_callables(num_warmup_iters: int, allow_unused_input: bool) -> None:
    calls: list[None] = []

    def function(used: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        return used * 2

    samples = tuple(torch.ones(2, device="cuda", requires_grad=True) for _ in range(2))
    options: dict[str, Any] = {"num_warmup_iters": num_warmup_iters, "allow_unused_input": allow_unused_input}
    if allow_unused_input:
        pool = acc.graph_pool_handle()
        made = acc.make_graphed_callables(function, samples, **options, pool=pool)
        assert len(calls) == num_warmup_iters + 1, "the last call is captured"
        assert made(*samples).tolist() == [2.0, 2.0]
        assert tuple(pool) in {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}
    else:
        with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
            acc.make_graphed_callables(function, samples, **options)
        assert len(calls) == 1, "the first backward raises"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: acc.capture_to_graph(3), "capture_to_graph() takes a graph, not int"),
        (lambda: acc.replay_graph("x"), "replay_graph() takes a graph, not str"),
        (
            lambda: acc.make_graphed_callables(3, ()),  # type: ignore[arg-type]
            "make_graphed_callables() takes a callable or a tuple of them, not int",
        ),
        (
            lambda: acc.make_graphed_callables((len, 3), ((), ())),  # type: ignore[arg-type]
            "make_graphed_callables() takes a callable or a tuple of them, not int",
        ),
        (lambda: acc.make_graphed_callables(len, []), "sample_args must be a tuple, not list"),  # type: ignore[arg-type]
    ],
)
def test_wrong_types_word_by_word(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value) == message


def test_graphed_callables_keep_their_order() -> None:
    pool = acc.graph_pool_handle()
    made = acc.make_graphed_callables(
        (lambda x: x[:1].clone(), lambda x: x.clone()),
        ((torch.ones(2, device="cuda"),), (torch.ones(3, device="cuda"),)),
        pool=pool,
    )
    assert [function(torch.zeros(2 + place, device="cuda")).shape for place, function in enumerate(made)] == [(1,), (3,)]
    with pytest.raises(TypeError):
        acc.make_graphed_callables(lambda x: x, (torch.ones(2, device="cuda"),), no_such_option=1)


def capture_with_graph_context(graph: Any) -> AbstractContextManager[Any]:
    """Return a context that captures with the graph's own context manager, on a stream that can be captured."""
    stack = ExitStack()
    stack.enter_context(acc.stream(acc.Stream()))
    stack.enter_context(graph)
    return stack


CAPTURES: list[Callable[[Any], AbstractContextManager[Any]]] = [
    acc.capture_to_graph,
    torch.cuda.graph,
    capture_with_graph_context,
]


@pytest.mark.parametrize("capture", [acc.capture_to_graph, capture_with_graph_context])
def test_capture_frees_unused_memory_first(capture: Callable[[Any], AbstractContextManager[Any]]) -> None:
    torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    address = torch.empty(64 * 2**20, dtype=torch.uint8, pin_memory=True).data_ptr()
    before = torch.cuda.memory_reserved()
    with capture(acc.Graph()):
        torch.ones(1, device="cuda")
        assert torch.cuda.memory_reserved() <= before - 60 * 2**20
        assert kind_of_memory(address) == 0, "of the host"


def kind_of_memory(address: int) -> int:
    """Return the driver's number for pinned or device memory, 0 if there is none at an address."""
    attributes = (ctypes.c_int * 64)()
    assert loaded_runtime().cudaPointerGetAttributes(attributes, ctypes.c_void_p(address)) == 0
    return attributes[0]


@pytest.mark.skipif(
    not hasattr(getattr(torch.compiler, "config", None), "force_cudagraph_gc"), reason="torch without the setting"
)
@pytest.mark.parametrize("collects", [False, True])
def test_setting_of_torch_collects_garbage_first(collects: bool) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    gc.collect()
    gc.disable()
    try:
        left = weakref.ref(Cycle())
        with torch.compiler.config.patch(force_cudagraph_gc=collects), acc.capture_to_graph(acc.Graph()):
            torch.ones(1, device="cuda")
        assert (left() is None) is collects
    finally:
        gc.enable()


@pytest.mark.parametrize("capture", [acc.capture_to_graph, capture_with_graph_context])
def test_capture_waits_for_earlier_work(capture: Callable[[Any], AbstractContextManager[Any]]) -> None:
    def submit(cycles: int) -> torch.cuda.Event:
        torch.cuda._sleep(cycles)
        return torch.cuda.current_stream().record_event()

    before = make_busy(submit, 200)
    with capture(acc.Graph(capture_error_mode="relaxed")):
        assert before.query()
        torch.ones(1, device="cuda")


def unsafe_call_fails(capture: Callable[[Any], AbstractContextManager[Any]], mode: Any, *, in_another_thread: bool) -> bool:
    """Return whether a query of an event, which is unsafe during a capture, raises and invalidates the capture."""
    event, errors = torch.cuda.Event(), []
    event.record()
    torch.cuda.synchronize()

    def query() -> None:
        try:
            event.query()
        except RuntimeError as error:
            errors.append(error)

    pool = acc.graph_pool_handle()
    graph = acc.Graph(pool=pool, capture_error_mode=mode)
    spoiled = False
    try:
        with capture(graph):
            torch.ones(1, device="cuda")
            if in_another_thread:
                thread = threading.Thread(target=query)
                thread.start()
                thread.join()
            else:
                query()
    except RuntimeError:
        spoiled = True
        end_invalidated_capture(pool)
        torch.cuda.empty_cache()
    assert spoiled == bool(errors)
    return spoiled


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize(
    ("mode", "in_this_thread", "in_another"),
    [("default", True, True), ("global", True, True), ("thread_local", True, False), ("relaxed", False, False)],
)
def test_capture_error_mode_decides_which_calls_fail(capture: Any, mode: str, in_this_thread: bool, in_another: bool) -> None:
    assert unsafe_call_fails(capture, mode, in_another_thread=False) is in_this_thread
    assert unsafe_call_fails(capture, mode, in_another_thread=True) is in_another


@pytest.mark.parametrize(
    ("own", "given", "fails"), [("default", "relaxed", False), ("relaxed", "global", False), ("global", "relaxed", True)]
)
def test_mode_of_the_graph_precedes_that_of_the_call(own: Any, given: str, fails: bool) -> None:
    """torch.cuda.graph passes its mode by position, others by name."""
    for capture in (
        lambda graph: torch.cuda.graph(graph, capture_error_mode=given),
        lambda graph: captured_by_hand(graph, given),
    ):
        assert unsafe_call_fails(capture, own, in_another_thread=False) is fails


@contextmanager
def captured_by_hand(graph: Any, mode: str) -> Iterator[None]:
    with acc.stream(acc.Stream()):
        graph.capture_begin(capture_error_mode=mode)
        try:
            yield
        finally:
            graph.capture_end()


@pytest.mark.skipif(not hasattr(torch.cuda.CUDAGraph, "instantiate"), reason="torch 2.8 is the first with keep_graph")
@pytest.mark.parametrize("keep_graph", [False, True])
def test_kept_graph_can_be_read_after_a_replay(keep_graph: bool) -> None:
    tensor, graph = torch.zeros(2, device="cuda"), acc.Graph(keep_graph=keep_graph)
    with acc.capture_to_graph(graph):
        tensor.add_(1)
    for _ in range(2):
        graph.replay()
    assert tensor.tolist() == [2.0, 2.0]
    if keep_graph:
        assert graph.raw_cuda_graph()
    else:
        with pytest.raises(RuntimeError, match="keep_graph"):
            graph.raw_cuda_graph()


def test_wrong_mode_word_by_word() -> None:
    with pytest.raises(ValueError) as caught:
        acc.Graph(capture_error_mode="strict")  # type: ignore[arg-type]
    expected = "capture_error_mode must be 'default', 'global', 'thread_local' or 'relaxed', not 'strict'"
    assert str(caught.value) == expected


def test_graph_has_the_interface_of_torch_accelerator_graph() -> None:
    ours = acc.Graph()
    assert isinstance(ours, acc.Graph)
    assert isinstance(ours, torch.cuda.CUDAGraph)
    for wrong, error in ({"capture_error_mode": "strict"}, ValueError), ({"bogus": 1}, TypeError):
        with pytest.raises(error):
            acc.Graph(**wrong)
    with pytest.raises(TypeError):
        acc.Graph(False, (0, 1))  # type: ignore[misc]
    if not hasattr(torch.accelerator, "Graph"):
        return
    assert {name for name in dir(torch.accelerator.Graph) if not name.startswith("_")} <= set(dir(ours))
    assert inspect.signature(acc.Graph).parameters.keys() == inspect.signature(
        torch.accelerator.Graph.__new__
    ).parameters.keys() - {"cls"}
    # Once torch's own class works on CUDA, acc.Graph should derive from it.
    with pytest.raises(RuntimeError):
        torch.accelerator.Graph()
