"""Calls of ``torch.accelerator`` and of this package whose outcomes can be compared."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch

from tests.mirror.deviations import Indexable

ARGUMENTS: tuple[Any, ...] = (
    None, 0, 1, 2, 7, 127, 128, 10**6, 2**70, -1, -2, -128, -129, -(2**70),
    "cuda", "cuda:0", "cuda:1", "cuda:2", "cuda:99", "cpu", "cpu:0", "xpu:0", "mps", "meta",
    "bogus", "", "cuda:", "cuda:-1", "cuda:01", "cuda:x", "0", "CUDA:0",
    torch.device("cuda"), torch.device("cuda:0"), torch.device("cuda", 1), torch.device("cuda:5"), torch.device("cpu"),
    True, False, 0.0, 1.5, float("nan"), b"cuda:0", [0], Indexable(1), Indexable(5), Indexable(-1),
)  # fmt: skip


def _inside(api: Any, argument: Any) -> int:
    with api.device_index(argument):
        return torch.cuda.current_device()


# With the argument None where a call takes none.
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "device_count": lambda api, _: api.device_count(),
    "is_available": lambda api, _: api.is_available(),
    "current_accelerator": lambda api, _: api.current_accelerator(),
    "current_device_index": lambda api, _: api.current_device_index(),
    "current_device_idx": lambda api, _: api.current_device_idx(),
    "empty_cache": lambda api, _: api.empty_cache(),
    "empty_host_cache": lambda api, _: api.empty_host_cache(),
    "device_index": _inside,
    "set_stream": lambda api, stream: api.set_stream(stream),
    **{
        name: (lambda api, argument, name=name: operator.attrgetter(name)(api)(argument))
        for name in (
            "set_device_index", "set_device_idx", "current_stream", "synchronize", "get_device_capability",
            "get_memory_info", "memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved",
            "max_memory_reserved", "reset_peak_memory_stats", "reset_accumulated_memory_stats",
            "random.initial_seed", "random.get_rng_state",
        )
    },
    "random.get_rng_state_all": lambda api, _: api.random.get_rng_state_all(),
}  # fmt: skip


def known_to_torch() -> list[str]:
    """The calls that this torch has."""
    return [name for name in CALLS if _has(torch.accelerator, name)]


def _has(api: Any, name: str) -> bool:
    module, _, function = name.rpartition(".")
    return hasattr(getattr(api, module, None) if module else api, function)


def outcome(api: Any, call: str, argument: Any) -> tuple[str, Any]:
    """What a call gives: its value in a form to compare, or the type of its error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            value = CALLS[call](api, argument)
        except Exception as error:
            return "raises", type(error)
    if isinstance(value, torch.Stream):
        value = value.stream_id, value.device_index, value.device_type
    elif isinstance(value, torch.Tensor):
        value = value.tolist()
    elif isinstance(value, list):
        value = [state.tolist() for state in value]
    return "gives", value


def same(ours: tuple[str, Any], theirs: tuple[str, Any]) -> bool:
    """Whether outcomes agree; torch's own subclasses of RuntimeError count as RuntimeError."""
    if ours[0] == theirs[0] == "raises":
        return ours[1] is theirs[1] or (ours[1] is RuntimeError and issubclass(theirs[1], RuntimeError))
    return ours == theirs
