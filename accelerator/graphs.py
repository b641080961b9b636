"""Capturing work once and replaying it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, Literal

import torch

from . import memory, streams
from ._machine.dynamo import assume_constant
from ._torch import state
from ._torch.bindings import get_index

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


class Graph:
    """Work of the accelerator, captured while this is entered as a context manager, and replayed as often as wanted.

    The same face as ``torch.accelerator.Graph``, which it is built on where that works, and on ``torch.cuda.CUDAGraph``
    on CUDA where it does not. Capture on a stream other than the default one.

    Args:
        keep_graph: keep the graph apart from its executable form, which then is made by ``instantiate`` or the first
            ``replay``; needs torch 2.8.
        pool: the memory pool to share with other graphs, from ``pool()`` of another graph or ``graph_pool_handle()``.
        capture_error_mode: what counts as unsafe during the capture: "global" (the default on CUDA), "thread_local", or
            "relaxed".

    On CUDA the object is a ``torch.cuda.CUDAGraph`` too, so that ``torch.cuda.graph(...)`` takes it.

    Raises:
        RuntimeError: when the CPU stands in, where a replay could only do nothing, and in a child forked from a process
            that had initialized the accelerator.
        ValueError: for another ``capture_error_mode``.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> tensor, graph = acc.FloatTensor([1.0, 2.0]), acc.Graph()
        >>> with acc.stream(acc.Stream()), graph:
        ...     double = 2 * tensor
        >>> graph.replay()
        >>> double.tolist()
        [2.0, 4.0]
    """

    # What torch's classes have, for type checkers; the object is one of them too.
    graph_pool: tuple[int, int] | None
    capture_error_mode: CaptureErrorMode
    capture_begin: Callable[[], None]
    capture_end: Callable[[], None]
    instantiate: Callable[[], None]
    replay: Callable[[], None]
    reset: Callable[[], None]
    pool: Callable[[], tuple[int, int]]
    enable_debug_mode: Callable[[], None]
    debug_dump: Callable[[str], None]

    def __new__(
        cls,
        keep_graph: bool = False,
        *,
        pool: tuple[int, int] | None = None,
        capture_error_mode: CaptureErrorMode = "default",
    ) -> Graph:
        if capture_error_mode not in ("default", "global", "thread_local", "relaxed"):
            raise ValueError(
                f"capture_error_mode is 'default', 'global', 'thread_local' or 'relaxed', not {capture_error_mode!r}"
            )
        refuse_on_cpu()
        face: Any = cls  # mypy takes the hash of a class for that of its instances
        made = _of_torch(face, state.initialize().device_type)
        new: Any = super(Graph, made).__new__
        graph: Graph = new(made, keep_graph, pool=pool, capture_error_mode=capture_error_mode)
        return graph

    def __enter__(self) -> None:
        _make_room()
        self.capture_begin()

    def __exit__(self, *exc_info: object) -> None:
        self.capture_end()


@cache
def _of_torch(face: type[Graph], kind: str) -> type[Graph]:
    """The class of the graphs of an accelerator: ours, and torch's, whose every user takes them."""
    if issubclass(face, torch.cuda.CUDAGraph) or kind == "cpu":
        return face
    of_torch: Any = _CUDAGraph if kind == "cuda" else getattr(torch.accelerator, "Graph", None)
    if of_torch is None:
        raise RuntimeError(f"torch {torch.__version__} has no graphs for {kind}")
    return type(face.__name__, (face, of_torch), {"__module__": face.__module__, "__doc__": face.__doc__})


class _CUDAGraph(torch.cuda.CUDAGraph):
    """torch.cuda's graph with the constructor of torch.accelerator's."""

    def __new__(cls, keep_graph: bool = False, *, pool: Any = None, capture_error_mode: str = "default") -> Any:
        try:
            return super().__new__(cls, *cls._given(keep_graph))
        except TypeError:
            raise RuntimeError(f"keep_graph needs torch 2.8 or newer, this is {torch.__version__}") from None

    def __init__(self, keep_graph: bool = False, *, pool: Any = None, capture_error_mode: str = "default") -> None:
        super().__init__(*self._given(keep_graph))
        self.graph_pool = pool
        # torch.cuda.graph() passes a mode of its own, "global" unless it was given another.
        self.capture_error_mode = capture_error_mode

    @staticmethod
    def _given(keep_graph: bool) -> tuple[bool, ...]:
        return (True,) if keep_graph else ()

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", *more: Any, **options: Any) -> None:
        mode = capture_error_mode if self.capture_error_mode == "default" else self.capture_error_mode
        super().capture_begin(self.graph_pool if pool is None else pool, mode, *more, **options)


def create_graph() -> Graph:
    """Return a new graph, empty as yet.

    Returns:
        ``Graph()``, for ``capture_to_graph`` and ``replay_graph``.

    Raises:
        RuntimeError: when the CPU stands in.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> acc.create_graph().capture_error_mode
        'default'
    """
    return Graph()


def capture_to_graph(
    graph: Any, pool: tuple[int, int] | None = None, stream: torch.Stream | None = None
) -> AbstractContextManager[None]:
    """Return a context manager in which work is captured into a graph instead of being done.

    Args:
        graph: the graph, from ``create_graph()`` or ``Graph()``; on CUDA a ``torch.cuda.CUDAGraph`` too.
        pool: the memory pool to share with other graphs; None for the one that the graph was created with.
        stream: the stream to capture on, which is the current one inside; None for a stream that is kept for this on each
            device. Graphs that share a pool are best captured on the same stream.

    Returns:
        The context manager. Outside of it the device's work is done before, and its caches are emptied. Mirrors
        ``torch.cuda.graph``.

    Raises:
        RuntimeError: when the CPU stands in.

    Fork: safe, initializes nothing that a graph has not.

    Example:
        >>> import accelerator as acc
        >>> graph, tensor = acc.create_graph(), acc.FloatTensor([1.0, 2.0])
        >>> with acc.capture_to_graph(graph):
        ...     double = 2 * tensor
        >>> acc.replay_graph(graph)
        >>> double.tolist()
        [2.0, 4.0]
    """
    refuse_on_cpu()
    _check_graph("capture_to_graph", graph)
    return _captured(graph, pool, stream)


def _check_graph(function: str, graph: Any) -> None:
    if not (hasattr(graph, "capture_begin") and hasattr(graph, "replay")):
        raise TypeError(f"{function}() takes a graph, not {type(graph).__name__}")


@contextmanager
def _captured(graph: Any, pool: tuple[int, int] | None, stream: torch.Stream | None) -> Generator[None, None, None]:
    _make_room()
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


# torch.cuda.graph keeps one stream for all devices, which captures nothing of another device's work.
_capture_streams: dict[int, torch.Stream] = {}


def _capture_stream() -> torch.Stream:
    index = get_index()
    if index not in _capture_streams:
        _capture_streams[index] = torch.Stream(torch.device(state.current().device_type, index))
    return _capture_streams[index]


def replay_graph(graph: Any) -> None:
    """Issue the work that was captured into a graph on the current stream.

    Args:
        graph: the graph, after a capture.

    Raises:
        RuntimeError: when the CPU stands in, if nothing was captured, and in a child forked from a process that had
            initialized the accelerator.

    Fork: safe, initializes nothing that a graph has not.

    Example:
        >>> import accelerator as acc
        >>> graph, total = acc.create_graph(), acc.FloatTensor([0.0])
        >>> with acc.capture_to_graph(graph):
        ...     total = total.add_(1)
        >>> for _ in range(3):
        ...     acc.replay_graph(graph)
        >>> total.item()
        3.0
    """
    refuse_on_cpu()
    _check_graph("replay_graph", graph)
    graph.replay()


@assume_constant
def graph_pool_handle() -> tuple[int, int]:
    """Return the handle of a new memory pool for graphs to share.

    Returns:
        The handle. Mirrors ``torch.cuda.graph_pool_handle``.

    Raises:
        RuntimeError: when the CPU stands in, on accelerators without pools, and in a child forked from a process that had
            initialized the accelerator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> pool = acc.graph_pool_handle()
        >>> acc.Graph(pool=pool).graph_pool == pool, acc.graph_pool_handle() == pool
        (True, False)
    """
    refuse_on_cpu()
    handle: tuple[int, int] = _of_device("graph_pool_handle")()
    return handle


def is_current_stream_capturing() -> bool:
    """Return whether work on the current stream is being captured.

    Returns:
        False while the accelerator is not initialized and when the CPU stands in. Mirrors
        ``torch.cuda.is_current_stream_capturing``.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.is_current_stream_capturing()
        False
    """
    runtime = state.current()
    if not runtime.is_initialized:
        return False
    ask = getattr(runtime.device_module, "is_current_stream_capturing", None)
    return bool(ask and ask())


def make_graphed_callables(
    callables: Callable[..., Any] | tuple[Callable[..., Any], ...],
    sample_args: tuple[Any, ...],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: tuple[int, int] | None = None,
    **options: Any,
) -> Any:
    """Return callables whose forward and backward work is captured now and replayed when they are called.

    Args:
        callables: a function or module, or a tuple of them in the order in which they will be called.
        sample_args: the tensors to call it with for the capture, or a tuple of such tuples.
        num_warmup_iters: how often to call it before the capture.
        allow_unused_input: whether inputs may have no influence on the outputs.
        pool: the memory pool to share with other graphs.
        options: what else this torch's function takes.

    Returns:
        A callable, or a tuple of them. Mirrors ``torch.cuda.make_graphed_callables``.

    Raises:
        RuntimeError: when the CPU stands in, on accelerators without it, and in a child forked from a process that had
            initialized the accelerator.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> double = acc.make_graphed_callables(lambda x: x + x, (acc.FloatTensor([1.0, 1.0]),))
        >>> double(acc.FloatTensor([3.0, 4.0])).tolist()
        [6.0, 8.0]
    """
    refuse_on_cpu()
    state.initialize()
    make = _of_device("make_graphed_callables")
    return make(callables, sample_args, num_warmup_iters, allow_unused_input, pool, **options)


def _of_device(name: str) -> Any:
    runtime = state.current()
    try:
        return getattr(runtime.device_module, name)
    except AttributeError:
        raise RuntimeError(f"torch {torch.__version__} has no {name} for {runtime.device_type}") from None


def refuse_on_cpu() -> None:
    """Raise the RuntimeError for graphs where the CPU stands in."""
    if state.current().device_type == "cpu":
        raise RuntimeError("Graphs need an accelerator: on the CPU there is nothing to capture, and a replay would do nothing")


def _make_room() -> None:
    """Have all work done and all unused memory given back before a capture begins."""
    streams.synchronize()
    # Older torches have no such setting.
    if getattr(getattr(torch.compiler, "config", None), "force_cudagraph_gc", False):
        gc.collect()
    memory.empty_cache()
    memory.empty_host_cache()
