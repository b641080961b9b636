"""What ``torch.compile`` traces in place of functions that it could not trace, and would break the graph at.

The bindings that make calls fast, and the look at what is there, are opaque to it. It knows torch's own functions, so it is
given those to trace, or an answer that it may take for constant in the graph, as torch's own are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch

from .._machine.dynamo import assume_constant
from . import state

_P = ParamSpec("_P")
_R = TypeVar("_R")


def traced_as(replacement: Callable[..., Any]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Have ``torch.compile`` trace another function in place of the decorated one, which costs that nothing."""

    def mark(function: Callable[_P, _R]) -> Callable[_P, _R]:
        function._torchdynamo_inline = replacement  # type: ignore[attr-defined]  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return mark


@assume_constant
def device_type() -> str:
    """The type of the device that functions act on, in a child that cannot use the accelerator too."""
    return state.current(allow_bad_fork=True).device_type


@assume_constant
def _only_of_cuda() -> bool:
    """Whether torch.compile knows torch.cuda's functions but not those of torch.accelerator, as that of torch 2.6."""
    return device_type() == "cuda" and torch.__version__.startswith("2.6.")


def number_of(device: Any) -> Any:
    """The index that a device argument has, if any; what is no device is left to torch to refuse."""
    if isinstance(device, torch.Tensor):
        device = device.device
    elif isinstance(device, str):
        device = torch.device(device)
    return device.index if isinstance(device, torch.device) else device


def device_index(device: Any, /) -> AbstractContextManager[Any]:
    number = number_of(device)
    if number is None or number < 0 or device_type() == "cpu":
        return nullcontext()
    # torch.compile has known torch.cuda's for longest.
    return torch.cuda.device(number) if device_type() == "cuda" else torch.accelerator.device_index(number)


def device_of(obj: Any) -> AbstractContextManager[Any]:
    place = obj.device
    return device_index(place if place.type == device_type() else None)


def device(device_index: Any = None) -> torch.device:
    number = number_of(device_index)
    return torch.device(device_type()) if number is None or device_type() == "cpu" else torch.device(device_type(), number)


def current_device_index() -> int:
    if device_type() == "cpu":
        return 0
    return torch.cuda.current_device() if _only_of_cuda() else torch.accelerator.current_device_index()


def current_stream(device: Any = None, /) -> torch.Stream:
    if device_type() == "cpu":
        return _cpu_stream()
    number = number_of(device)
    if _only_of_cuda():
        return torch.cuda.current_stream() if number is None else torch.cuda.current_stream(number)
    return torch.accelerator.current_stream() if number is None else torch.accelerator.current_stream(number)


@assume_constant
def _cpu_stream() -> torch.Stream:
    from .cpu_streams import cpu_stream

    return cpu_stream()


def set_stream(stream: Any) -> None:
    if _only_of_cuda():
        torch.cuda.set_stream(stream)
    elif device_type() != "cpu":
        torch.accelerator.set_stream(stream)


def stream(stream: Any) -> AbstractContextManager[Any]:
    if stream is None or device_type() == "cpu":
        return nullcontext()
    # Others' streams are context managers themselves.
    return torch.cuda.stream(stream) if device_type() == "cuda" else stream


def synchronize(device: Any = None, /) -> None:
    if device_type() == "cpu":
        return
    number = number_of(device)
    if _only_of_cuda():
        torch.cuda.synchronize(None if number is None or number < 0 else number)
    elif number is None or number < 0:
        torch.accelerator.synchronize()
    else:
        torch.accelerator.synchronize(torch.device(device_type(), number))


def is_synchronized_device() -> bool:
    return device_type() == "cpu"


def empty_cache() -> None:
    if device_type() != "cpu":
        getattr(torch, device_type()).empty_cache()


def reset_peak_memory_stats(device: Any = None, /) -> None:
    if device_type() != "cpu":
        getattr(torch, device_type()).reset_peak_memory_stats(number_of(device))


def init() -> None:
    if device_type() != "cpu":
        getattr(torch, device_type()).init()


def ipc_collect() -> None:
    if device_type() != "cpu":
        getattr(torch, device_type()).ipc_collect()


def manual_seed(seed: int) -> None:
    torch.random.manual_seed(seed) if device_type() == "cpu" else getattr(torch, device_type()).manual_seed(seed)


def seed() -> None:
    torch.random.seed() if device_type() == "cpu" else getattr(torch, device_type()).seed()


def seed_all() -> None:
    torch.random.seed() if device_type() == "cpu" else getattr(torch, device_type()).seed_all()


def nothing(*args: Any, **kwargs: Any) -> None:
    """For functions that do nothing where code is compiled."""
