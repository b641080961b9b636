"""Functions that ``torch.compile`` traces in place of functions that would break the graph.

``torch.compile`` traces neither torch's private bindings nor the code that reads the runtime state. These replacements call
torch's public functions and treat the device type as a constant of the graph, as torch's own functions do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

from .._machine.dynamo import assume_constant
from . import bindings, cpu_streams, state

_P = ParamSpec("_P")
_R = TypeVar("_R")


def traced_as(replacement: Callable[..., Any]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Have ``torch.compile`` trace another function in place of the decorated one. This adds no cost to a call."""

    def mark(function: Callable[_P, _R]) -> Callable[_P, _R]:
        function._torchdynamo_inline = replacement  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return mark


@assume_constant
def device_type() -> str:
    """Return the device type that runtime functions act on, in a bad fork too."""
    return state.current(allow_bad_fork=True).device_type


@assume_constant
def _only_of_cuda() -> bool:
    """Whether torch.compile traces torch.cuda's functions but not those of torch.accelerator, as in torch 2.6 and 2.7."""
    return device_type() == "cuda" and not bindings.is_accelerator_traced()


def index_of(device: Any) -> Any:
    """Return the index of a device argument, or None. torch raises for other objects."""
    if isinstance(device, torch.Tensor):
        device = device.device
    elif isinstance(device, str):
        device = torch.device(device)
    return device.index if isinstance(device, torch.device) else device


def device_index(device: Any, /) -> AbstractContextManager[Any]:
    index = index_of(device)
    if index is None or index < 0 or device_type() == "cpu":
        return nullcontext()
    # Older releases of torch.compile trace torch.cuda's context manager only.
    return torch.cuda.device(index) if device_type() == "cuda" else torch.accelerator.device_index(index)


def device_of(obj: Any) -> AbstractContextManager[Any]:
    return device_index(obj.device if obj.device.type == device_type() else None)


def device(device_index: Any = None) -> torch.device:
    index = index_of(device_index)
    return torch.device(device_type()) if index is None or device_type() == "cpu" else torch.device(device_type(), index)


def current_device_index() -> int:
    if device_type() == "cpu":
        return 0
    return torch.cuda.current_device() if _only_of_cuda() else torch.accelerator.current_device_index()


def current_stream(device: Any = None, /) -> torch.Stream:
    if device_type() == "cpu":
        _create_cpu_stream()
        return cpu_streams.created[0]
    index = index_of(device)
    if _only_of_cuda():
        return torch.cuda.current_stream() if index is None else torch.cuda.current_stream(index)
    return torch.accelerator.current_stream() if index is None else torch.accelerator.current_stream(index)


@assume_constant
def _create_cpu_stream() -> None:
    cpu_streams.cpu_stream()


def set_stream(stream: Any) -> None:
    if _only_of_cuda():
        torch.cuda.set_stream(stream)
    elif device_type() != "cpu":
        torch.accelerator.set_stream(stream)


def stream(stream: Any) -> AbstractContextManager[Any]:
    if stream is None or device_type() == "cpu":
        return nullcontext()
    # Streams of other accelerators are context managers.
    return torch.cuda.stream(stream) if device_type() == "cuda" else stream


def synchronize(device: Any = None, /) -> None:
    if device_type() == "cpu":
        return
    index = index_of(device)
    if _only_of_cuda():
        torch.cuda.synchronize(None if index is None or index < 0 else index)
    else:
        # Without an index newer releases of torch.compile synchronize device 0, not the current one.
        index = torch.accelerator.current_device_index() if index is None or index < 0 else index
        torch.accelerator.synchronize(torch.device(device_type(), index))


def _call(name: str, *arguments: Any) -> None:
    """Call a function of the accelerator's module, else torch.accelerator's; do nothing under the CPU fallback."""
    if device_type() == "cpu":
        return
    function = getattr(getattr(torch, device_type()), name, None) or getattr(torch.accelerator, name, None)
    if function is not None:
        function(*arguments)


def empty_cache() -> None:
    _call("empty_cache")


def reset_peak_memory_stats(device: Any = None, /) -> None:
    _call("reset_peak_memory_stats", index_of(device))


def memory_snapshot(mempool_id: tuple[int, int] | None = None, include_traces: bool = True) -> list[dict[str, Any]]:
    if device_type() == "cpu":
        return []
    snapshot: list[dict[str, Any]] = getattr(torch, device_type()).memory_snapshot(mempool_id)
    return snapshot


def init() -> None:
    _call("init")


def ipc_collect() -> None:
    _call("ipc_collect")


def manual_seed(seed: int) -> None:
    torch.random.manual_seed(seed) if device_type() == "cpu" else getattr(torch, device_type()).manual_seed(seed)


def seed() -> None:
    torch.random.seed() if device_type() == "cpu" else getattr(torch, device_type()).seed()


def seed_all() -> None:
    torch.random.seed() if device_type() == "cpu" else getattr(torch, device_type()).seed_all()


def nothing(*args: Any, **kwargs: Any) -> None:
    """Replacement of functions that do nothing in compiled code."""
