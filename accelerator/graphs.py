"""Graphs: work that is captured once and replayed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import torch

from . import memory, streams
from ._machine.discovery_result import NotSupported
from ._machine.dynamo import assume_constant
from ._torch import state
from ._torch.bindings import get_index
from ._torch.signatures import takes

__all__ = [
    "Graph",
    "capture_to_graph",
    "create_graph",
    "graph_pool_handle",
    "is_current_stream_capturing",
    "make_graphed_callables",
    "replay_graph",
]

CaptureErrorMode = Literal["default", "global", "thread_local", "relaxed"]


# For type checkers a graph is a torch.cuda.CUDAGraph, as it is on CUDA.
if TYPE_CHECKING:
    _Base = torch.cuda.CUDAGraph
else:
    _Base = object


class Graph(_Base):
    """A graph: work of the accelerator that is captured once and replayed.

    As a context manager it captures the work inside. Use a stream other than the default one for the capture. The interface is
    that of ``torch.accelerator.Graph``. On CUDA the object is a ``torch.cuda.CUDAGraph`` too, so ``torch.cuda.graph(...)``
    takes it.

    Args:
        keep_graph: keep the graph after ``instantiate`` or the first ``replay`` made it executable. Needs torch 2.8.
        pool: the memory pool to share with other graphs, from another graph's ``pool()`` or from ``graph_pool_handle()``.
        capture_error_mode: the calls that are errors during the capture: "global" (the default on CUDA), "thread_local" or
            "relaxed".

    Raises:
        RuntimeError: if torch has no graphs for this accelerator, under the CPU fallback, and in a bad fork.
        ValueError: for any other ``capture_error_mode``.

    Initializes: the accelerator.

    Example:
        >>> tensor, graph = acc.FloatTensor([1.0, 2.0]), acc.Graph()
        >>> with acc.stream(acc.Stream()), graph:
        ...     double = 2 * tensor
        >>> graph.replay()
        >>> double.tolist()
        [2.0, 4.0]
    """

    graph_pool: tuple[int, int] | None
    capture_error_mode: CaptureErrorMode

    def __new__(
        cls, keep_graph: bool = False, *, pool: tuple[int, int] | None = None, capture_error_mode: CaptureErrorMode = "default"
    ) -> Graph:
        if capture_error_mode not in ("default", "global", "thread_local", "relaxed"):
            raise ValueError(
                f"capture_error_mode must be 'default', 'global', 'thread_local' or 'relaxed', not {capture_error_mode!r}"
            )
        raise_on_cpu()
        base: Any = cls  # mypy takes the hash of a class for that of its instances
        runtime = state.initialize()
        torch_graph = _torch_graph(runtime.device_type, runtime.vendor.graph_class)
        if torch_graph is None:
            raise NotSupported(f"torch {torch.__version__} has no graphs for {runtime.device_type}")
        subclass = _with_torch_graph(base, torch_graph)
        new: Any = super(Graph, subclass).__new__
        if new is object.__new__:  # torch's class defines only __init__
            return new(subclass)
        return new(subclass, keep_graph, pool=pool, capture_error_mode=capture_error_mode)

    def __enter__(self) -> None:
        _prepare_capture()
        self.capture_begin()

    def __exit__(self, *exc_info: object) -> None:
        self.capture_end()


def class_reader(name: str) -> Callable[..., type[Graph]]:
    """Return a function that returns the class that ``Graph`` is now."""
    return _current_class


def _current_class(*_: object) -> type[Graph]:
    """Return ``Graph``, with torch's class for the accelerator among its bases if torch has one."""
    runtime = state.current(allow_bad_fork=True)
    torch_graph = _torch_graph(runtime.device_type, runtime.vendor.graph_class)
    return Graph if torch_graph is None else _with_torch_graph(Graph, torch_graph)


@cache
def _torch_graph(device_type: str, class_name: str | None) -> Any:
    """Return torch's class of graphs for an accelerator, with the constructor of torch.accelerator.Graph; None without one."""
    if device_type == "cpu":
        return None
    module = getattr(torch, device_type)
    own = getattr(module, class_name, None) if class_name else None
    generic = getattr(torch.accelerator, "Graph", None)
    # torch.accelerator.Graph exists for all accelerators, but a plug-in that brings a class of its own does not support it.
    is_plugin = getattr(module, "__name__", None) != f"torch.{device_type}"
    torch_graph: Any = _CUDAGraph if class_name == "CUDAGraph" else (own or generic) if is_plugin else (generic or own)
    if torch_graph in (None, _CUDAGraph) or takes(torch_graph, "capture_error_mode"):
        return torch_graph
    return _with_options(torch_graph)


@cache
def _with_torch_graph(base: type[Graph], torch_graph: Any) -> type[Graph]:
    """Return a subclass of both a class of graphs and torch's class for the accelerator."""
    if issubclass(base, torch_graph):
        return base
    return type(base.__name__, (base, torch_graph), {"__module__": base.__module__, "__doc__": base.__doc__})


def _with_options(torch_graph: Any) -> Any:
    """Return a subclass of a vendor's class of graphs that takes the arguments of torch.accelerator.Graph."""

    class VendorGraph(torch_graph):  # type: ignore[misc]
        def __new__(cls, keep_graph: bool = False, *, pool: Any = None, capture_error_mode: str = "default") -> Any:
            if keep_graph:
                raise RuntimeError(f"{torch_graph.__name__} does not take keep_graph")
            return super().__new__(cls)

        def __init__(self, keep_graph: bool = False, *, pool: Any = None, capture_error_mode: str = "default") -> None:
            super().__init__()
            self.graph_pool = pool
            self.capture_error_mode = capture_error_mode

        def capture_begin(self, *arguments: Any, **options: Any) -> None:
            begin = super().capture_begin
            if self.graph_pool is not None and not arguments:
                options.setdefault("pool", self.graph_pool)
            if self.capture_error_mode != "default" and takes(begin, "capture_error_mode"):
                options.setdefault("capture_error_mode", self.capture_error_mode)
            begin(*arguments, **options)

    return VendorGraph


class _CUDAGraph(torch.cuda.CUDAGraph):  # pyright: ignore[reportUnusedClass]
    """torch.cuda.CUDAGraph with the constructor of torch.accelerator.Graph."""

    def __new__(cls, keep_graph: bool = False, *, pool: Any = None, capture_error_mode: str = "default") -> Any:
        try:
            return super().__new__(cls, *cls._arguments(keep_graph))
        except TypeError:
            raise RuntimeError(f"keep_graph needs torch 2.8 or newer, this is {torch.__version__}") from None

    def __init__(self, keep_graph: bool = False, *, pool: Any = None, capture_error_mode: str = "default") -> None:
        super().__init__(*self._arguments(keep_graph))
        self.graph_pool = pool
        # torch.cuda.graph() passes a mode to capture_begin(), "global" by default.
        self.capture_error_mode = capture_error_mode

    @staticmethod
    def _arguments(keep_graph: bool) -> tuple[bool, ...]:
        return (True,) if keep_graph else ()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", *more: Any, **options: Any) -> None:
        mode = capture_error_mode if self.capture_error_mode == "default" else self.capture_error_mode
        super().capture_begin(self.graph_pool if pool is None else pool, mode, *more, **options)


def create_graph() -> Graph:
    """Return a new, empty graph for ``capture_to_graph`` and ``replay_graph``.

    Returns:
        ``Graph()``.

    Raises:
        RuntimeError: as ``Graph``.

    Initializes: the accelerator.

    Example:
        >>> acc.create_graph().capture_error_mode
        'default'
    """
    return Graph()


def capture_to_graph(
    graph: Any, pool: tuple[int, int] | None = None, stream: torch.Stream | None = None
) -> AbstractContextManager[None]:
    """Return a context manager that captures work into a graph instead of running it.

    Args:
        graph: a graph from ``create_graph()`` or ``Graph()``, or a ``torch.cuda.CUDAGraph``.
        pool: the memory pool to share with other graphs; None for the pool of the graph.
        stream: the stream to capture on, which is current inside; None for one stream of each device that all captures share.
            Capture graphs that share a pool on the same stream.

    Returns:
        The context manager. It synchronizes the device and empties its caches before the capture. Mirrors
        ``torch.cuda.graph``.

    Raises:
        RuntimeError: under the CPU fallback and in a bad fork.

    Example:
        >>> graph, tensor = acc.create_graph(), acc.FloatTensor([1.0, 2.0])
        >>> with acc.capture_to_graph(graph):
        ...     double = 2 * tensor
        >>> acc.replay_graph(graph)
        >>> double.tolist()
        [2.0, 4.0]
    """
    raise_on_cpu()
    _check_graph("capture_to_graph", graph)
    return _captured(graph, pool, stream)


def _check_graph(function: str, graph: Any) -> None:
    if not (hasattr(graph, "capture_begin") and hasattr(graph, "replay")):
        raise TypeError(f"{function}() takes a graph, not {type(graph).__name__}")


@contextmanager
def _captured(graph: Any, pool: tuple[int, int] | None, stream: torch.Stream | None) -> Generator[None, None, None]:
    _prepare_capture()
    with streams.stream(_capture_stream() if stream is None else stream):
        if isinstance(graph, Graph):
            own = graph.graph_pool
            graph.graph_pool = own if pool is None else pool
            try:
                graph.capture_begin()
            finally:
                graph.graph_pool = own
        else:
            graph.capture_begin(pool=pool)
        try:
            yield
        finally:
            graph.capture_end()


# By device index. torch.cuda.graph has one stream for all devices, which cannot capture another device's work.
_capture_streams: dict[int, torch.Stream] = {}


def _capture_stream() -> torch.Stream:
    index = get_index()
    if index not in _capture_streams:
        _capture_streams[index] = torch.Stream(torch.device(state.current().device_type, index))
    return _capture_streams[index]


def replay_graph(graph: Any) -> None:
    """Run the captured work of a graph on the current stream.

    Args:
        graph: the graph, after a capture.

    Raises:
        RuntimeError: if nothing was captured, under the CPU fallback, and in a bad fork.

    Example:
        >>> graph, total = acc.create_graph(), acc.FloatTensor([0.0])
        >>> with acc.capture_to_graph(graph):
        ...     total = total.add_(1)
        >>> for _ in range(3):
        ...     acc.replay_graph(graph)
        >>> total.item()
        3.0
    """
    raise_on_cpu()
    _check_graph("replay_graph", graph)
    graph.replay()


@assume_constant
def graph_pool_handle() -> tuple[int, int]:
    """Return the handle of a new memory pool that graphs can share.

    Returns:
        The handle. Mirrors ``torch.cuda.graph_pool_handle``.

    Raises:
        RuntimeError: if torch has no pools for this accelerator, under the CPU fallback, and in a bad fork.

    Example:
        >>> pool = acc.graph_pool_handle()
        >>> acc.Graph(pool=pool).graph_pool == pool, acc.graph_pool_handle() == pool
        (True, False)
    """
    raise_on_cpu()
    handle: tuple[int, int] = state.current().function("graph_pool_handle")()
    return handle


def is_current_stream_capturing() -> bool:
    """Return whether the current stream is capturing a graph.

    Returns:
        False before initialization and under the CPU fallback. Mirrors
        ``torch.cuda.is_current_stream_capturing``.

    Example:
        >>> acc.is_current_stream_capturing()
        False
    """
    runtime = state.current()
    if not runtime.is_initialized:
        return False
    is_capturing = runtime.find_function("is_current_stream_capturing")
    return bool(is_capturing and is_capturing())


def make_graphed_callables(
    callables: Callable[..., Any] | tuple[Callable[..., Any], ...],
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: tuple[int, int] | None = None,
    **options: Any,
) -> Any:
    """Return callables that replay graphs of the forward and backward work of other callables.

    Args:
        callables: a function or module, or a tuple of them in the order in which they will be called.
        sample_args: a tuple of the arguments for the capture, or for several callables a tuple of such tuples.
        num_warmup_iters: the number of calls before the capture.
        allow_unused_input: whether the outputs may be independent of some inputs.
        pool: the memory pool to share with other graphs.
        options: further arguments of this torch's function.

    Returns:
        A callable, or a tuple of them. Mirrors ``torch.cuda.make_graphed_callables``.

    Raises:
        TypeError: if an argument is not callable, or ``sample_args`` is not a tuple.
        RuntimeError: if torch has no such function for this accelerator, under the CPU fallback, and in a bad fork.

    Initializes: the accelerator.

    Example:
        >>> double = acc.make_graphed_callables(lambda x: x + x, (acc.FloatTensor([1.0, 1.0]),))
        >>> double(acc.FloatTensor([3.0, 4.0])).tolist()
        [6.0, 8.0]
    """
    raise_on_cpu()
    # Check first: wrong arguments must not initialize the accelerator.
    for each in callables if isinstance(callables, tuple) else (callables,):
        if not callable(each):
            raise TypeError(f"make_graphed_callables() takes a callable or a tuple of them, not {type(each).__name__}")
    if not isinstance(sample_args, tuple):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"sample_args must be a tuple, not {type(sample_args).__name__}")
    make = state.current().function("make_graphed_callables")
    state.initialize()
    return make(callables, sample_args, num_warmup_iters, allow_unused_input, pool, **options)


def raise_on_cpu() -> None:
    """Raise the RuntimeError for graphs under the CPU fallback."""
    if state.current().device_type == "cpu":
        raise RuntimeError("Graphs need an accelerator: the CPU cannot capture work")


def _prepare_capture() -> None:
    """Synchronize the device and release unused memory before a capture."""
    streams.synchronize()
    # Older releases of torch do not have this setting.
    if getattr(getattr(torch.compiler, "config", None), "force_cudagraph_gc", False):
        gc.collect()
    memory.empty_cache()
    memory.empty_host_cache()
