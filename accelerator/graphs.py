"""Capturing work once and replaying it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch

from . import memory, streams
from ._torch import runtime

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

    Raises:
        RuntimeError: when the CPU stands in, where a replay could only do nothing, and in a child forked from a process
            that had initialized the accelerator.
        ValueError: for another ``capture_error_mode``.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc, torch
        >>> if acc.is_available():
        ...     tensor = torch.zeros(4, device=acc.current_accelerator())
        ...     graph = acc.Graph()
        ...     with acc.stream(acc.Stream()), graph:
        ...         copy = tensor.clone()
        ...     graph.replay()
    """

    def __init__(
        self,
        keep_graph: bool = False,
        *,
        pool: tuple[int, int] | None = None,
        capture_error_mode: CaptureErrorMode = "default",
    ) -> None:
        if capture_error_mode not in ("default", "global", "thread_local", "relaxed"):
            raise ValueError(
                f"capture_error_mode is 'default', 'global', 'thread_local' or 'relaxed', not {capture_error_mode!r}"
            )
        self.graph_pool = pool
        self.capture_error_mode: CaptureErrorMode = capture_error_mode
        self._graph = _new_graph(keep_graph)

    def capture_begin(self) -> None:
        """Begin to capture what is issued on the current stream."""
        mode = "global" if self.capture_error_mode == "default" else self.capture_error_mode
        self._graph.capture_begin(pool=self.graph_pool, capture_error_mode=mode)

    def capture_end(self) -> None:
        """End the capture; the graph can be replayed from now on."""
        self._graph.capture_end()

    def instantiate(self) -> None:
        """Make the executable form of a graph that was created with ``keep_graph``."""
        self._graph.instantiate()

    def replay(self) -> None:
        """Issue the captured work on the current stream."""
        self._graph.replay()

    def reset(self) -> None:
        """Drop the captured work, so that the graph can capture anew."""
        self._graph.reset()

    def pool(self) -> tuple[int, int]:
        """Return the handle of the graph's memory pool, for graphs that are to share it."""
        handle: tuple[int, int] = self._graph.pool()
        return handle

    def enable_debug_mode(self) -> None:
        """Keep what ``debug_dump`` needs; to be called before the capture."""
        self._graph.enable_debug_mode()

    def debug_dump(self, path: str) -> None:
        """Write the captured work to a file in the format of Graphviz.

        Args:
            path: the file to write.
        """
        self._graph.debug_dump(path)

    def __enter__(self) -> None:
        streams.synchronize()
        if getattr(getattr(torch.compiler, "config", None), "force_cudagraph_gc", False):
            gc.collect()
        memory.empty_cache()
        memory.empty_host_cache()
        self.capture_begin()

    def __exit__(self, *exc_info: object) -> None:
        self.capture_end()


def create_graph() -> Graph:
    """Return a new graph, empty as yet.

    Returns:
        ``Graph()``, for ``capture_to_graph`` and ``replay_graph``.

    Raises:
        RuntimeError: when the CPU stands in, and in a child forked from a process that had initialized the accelerator.

    Fork: initializes the accelerator; forked children cannot use it.

    Example:
        >>> import accelerator as acc
        >>> if acc.is_available():
        ...     graph = acc.create_graph()
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
        RuntimeError: when the CPU stands in, and in a child forked from a process that had initialized the accelerator.

    Fork: safe, initializes nothing that a graph has not.

    Example:
        >>> import accelerator as acc, torch
        >>> if acc.is_available():
        ...     graph = acc.create_graph()
        ...     tensor = torch.zeros(4, device=acc.current_accelerator())
        ...     with acc.capture_to_graph(graph):
        ...         copy = tensor.clone()
        ...     acc.replay_graph(graph)
    """
    refuse_on_cpu()
    return _captured(graph, pool, stream)


@contextmanager
def _captured(graph: Any, pool: tuple[int, int] | None, stream: torch.Stream | None) -> Generator[None, None, None]:
    streams.synchronize()
    _empty_caches()
    with streams.stream(_capture_stream() if stream is None else stream):
        if isinstance(graph, Graph):
            graph.graph_pool = graph.graph_pool if pool is None else pool
            graph.capture_begin()
        else:
            graph.capture_begin(pool=pool)
        try:
            yield
        finally:
            graph.capture_end()


# torch.cuda.graph keeps one stream for all devices, which captures nothing of another device's work.
_capture_streams: dict[int, torch.Stream] = {}


def _capture_stream() -> torch.Stream:
    number = runtime.get_index()
    if number not in _capture_streams:
        _capture_streams[number] = torch.Stream(torch.device(runtime.kind, number))
    return _capture_streams[number]


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
        >>> if acc.is_available():
        ...     graph, tensor = acc.create_graph(), acc.FloatTensor([1.0])
        ...     with acc.capture_to_graph(graph):
        ...         copy = tensor.clone()
        ...     acc.replay_graph(graph)
    """
    refuse_on_cpu()
    graph.replay()


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
        >>> if acc.is_available():
        ...     graph = acc.Graph(pool=acc.graph_pool_handle())
    """
    refuse_on_cpu()
    handle: tuple[int, int] = _of_device("graph_pool_handle")()
    return handle


def is_current_stream_capturing() -> bool:
    """Return whether work on the current stream is being captured.

    Returns:
        False while the accelerator is not initialized and when the CPU stands in. Mirrors
        ``torch.cuda.is_current_stream_capturing``.

    Raises:
        RuntimeError: in a child forked from a process that had initialized the accelerator.

    Fork: safe, initializes nothing.

    Example:
        >>> import accelerator as acc
        >>> acc.is_current_stream_capturing()
        False
    """
    if runtime.absent() or not runtime.initialized():
        return False
    ask = getattr(runtime.device_module(), "is_current_stream_capturing", None)
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
        >>> import accelerator as acc, torch
        >>> if acc.is_available():
        ...     double = acc.make_graphed_callables(lambda x: x + x, (torch.ones(2, device=acc.current_accelerator()),))
    """
    refuse_on_cpu()
    runtime.initialize()
    make = _of_device("make_graphed_callables")
    return make(callables, sample_args, num_warmup_iters, allow_unused_input, pool, **options)


def _of_device(name: str) -> Any:
    try:
        return getattr(runtime.device_module(), name)
    except AttributeError:
        raise RuntimeError(f"torch {torch.__version__} has no {name} for {runtime.kind}") from None


def refuse_on_cpu() -> None:
    """Raise the RuntimeError for graphs where the CPU stands in."""
    if runtime.absent():
        raise RuntimeError("Graphs need an accelerator: on the CPU there is nothing to capture, and a replay would do nothing")


def _empty_caches() -> None:
    # Older torches have no such setting.
    if getattr(getattr(torch.compiler, "config", None), "force_cudagraph_gc", False):
        gc.collect()
    memory.empty_cache()
    memory.empty_host_cache()


def _new_graph(keep_graph: bool) -> Any:
    refuse_on_cpu()
    runtime.initialize()
    if runtime.kind != "cuda":
        return torch.accelerator.Graph(keep_graph)
    if not keep_graph:
        return torch.cuda.CUDAGraph()
    try:
        return torch.cuda.CUDAGraph(keep_graph=True)
    except TypeError:
        raise RuntimeError(f"keep_graph needs torch 2.8 or newer, this is {torch.__version__}") from None
