"""The functions that take a device argument, and wrong arguments, for the tests of device arguments."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

import accelerator as acc


def _enter(context: Any) -> None:
    with context:
        pass


# A call for every public function of the modules of devices, streams and memory that takes a device argument.
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "available_memory": lambda device: acc.available_memory(device),
    "can_device_access_peer": lambda device: acc.can_device_access_peer(device, 0),
    "can_device_access_peer, the peer": lambda device: acc.can_device_access_peer(0, device),
    "current_stream": lambda device: acc.current_stream(device),
    "default_stream": lambda device: acc.default_stream(device),
    "device": lambda device: acc.device(device),
    "device_index": lambda device: _enter(acc.device_index(device)),
    "device_name": lambda device: acc.device_name(device),
    "get_device_capability": lambda device: acc.get_device_capability(device),
    "get_device_properties": lambda device: acc.get_device_properties(device),
    "get_memory_info": lambda device: acc.get_memory_info(device),
    "get_per_process_memory_fraction": lambda device: acc.get_per_process_memory_fraction(device),
    "max_memory_allocated": lambda device: acc.max_memory_allocated(device),
    "max_memory_reserved": lambda device: acc.max_memory_reserved(device),
    "mem_get_info": lambda device: acc.mem_get_info(device),
    "memory_allocated": lambda device: acc.memory_allocated(device),
    "memory_reserved": lambda device: acc.memory_reserved(device),
    "memory_stats": lambda device: acc.memory_stats(device),
    "memory_stats_as_nested_dict": lambda device: acc.memory_stats_as_nested_dict(device),
    "memory_summary": lambda device: acc.memory_summary(device),
    "reset_accumulated_memory_stats": lambda device: acc.reset_accumulated_memory_stats(device),
    "reset_peak_memory_stats": lambda device: acc.reset_peak_memory_stats(device),
    "set_device": lambda device: acc.set_device(device),
    "set_device_index": lambda device: acc.set_device_index(device),
    "set_per_process_memory_fraction": lambda device: acc.set_per_process_memory_fraction(1.0, device),
    "synchronize": lambda device: acc.synchronize(device),
    "total_memory": lambda device: acc.total_memory(device),
}

# The same for functions of other modules. Some of them do not work on every accelerator.
MORE_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "clock_rate": lambda device: acc.clock_rate(device),
    "compute_capability": lambda device: acc.compute_capability(device),
    "default_generator": lambda device: acc.default_generator(device),
    "device_memory_used": lambda device: acc.device_memory_used(device),
    "external_stream": lambda device: acc.external_stream(0, device),
    "fork_rng": lambda device: _enter(acc.fork_rng([device])),
    "get_device_index": lambda device: acc.get_device_index(device),
    "get_device_name": lambda device: acc.get_device_name(device),
    "get_rng_state": lambda device: acc.get_rng_state(device),
    "initial_seed": lambda device: acc.initial_seed(device),
    "is_nvlink_connected": lambda device: acc.is_nvlink_connected(device, 0),
    "is_nvlink_connected, the peer": lambda device: acc.is_nvlink_connected(0, device),
    "list_gpu_processes": lambda device: acc.list_gpu_processes(device),
    "memory_usage": lambda device: acc.memory_usage(device),
    "numa_node": lambda device: acc.numa_node(device),
    "power_draw": lambda device: acc.power_draw(device),
    "processes": lambda device: acc.processes(device),
    "set_rng_state": lambda device: acc.set_rng_state(torch.zeros(0, dtype=torch.uint8), device),
    "telemetry": lambda device: acc.telemetry(device),
    "temperature": lambda device: acc.temperature(device),
    "use_mem_pool": lambda device: _enter(acc.use_mem_pool(None, device)),
    "utilization": lambda device: acc.utilization(device),
    # Deprecated functions, which warn.
    "max_memory_cached": lambda device: acc.max_memory_cached(device),
    "memory_cached": lambda device: acc.memory_cached(device),
    "reset_max_memory_allocated": lambda device: acc.reset_max_memory_allocated(device),
    "reset_max_memory_cached": lambda device: acc.reset_max_memory_cached(device),
    "set_device_idx": lambda device: acc.set_device_idx(device),
}

# For these functions a negative index is the current device, or they do nothing. For all others it is out of range.
NEGATIVE_IS_FINE = frozenset(
    "current_stream device_index get_memory_info mem_get_info set_device set_device_idx set_device_index synchronize".split()
)
# DeepSpeed passes the value of a rank's environment variable, a string.
DIGITS_ARE_FINE = frozenset({"device_name"})
INDEX_IS_REQUIRED = frozenset({"set_device", "set_device_idx", "set_device_index"})

# Arguments that are wrong on every accelerator.
WRONG: list[tuple[Any, type[Exception]]] = [
    (1.5, TypeError),
    (float("nan"), TypeError),
    (True, TypeError),
    (False, TypeError),
    (b"cuda:0", TypeError),
    ([0], TypeError),
    ((0,), TypeError),
    ({}, TypeError),
    (int, TypeError),
    (Ellipsis, TypeError),
    (1j, TypeError),
    ("", RuntimeError),
    ("bogus", RuntimeError),
    ("0", RuntimeError),
    (" cuda", RuntimeError),
    ("cuda:", RuntimeError),
    ("cuda:-1", RuntimeError),
    ("cuda:01", RuntimeError),
    ("cuda:1.5", RuntimeError),
    ("CUDA:0", RuntimeError),
    ("cuda:0\n", RuntimeError),
    ("mps:0", ValueError),
    ("meta", ValueError),
    ("xpu:0", ValueError),
    (torch.device("meta"), ValueError),
    (torch.device("xpu", 0), ValueError),
]
HUGE = (127, 128, 255, 256, 2**31 - 1, 2**31, 2**63, 2**70)
NEGATIVE = (-1, -2, -128, -129, -(2**31), -(2**70))


class Index:
    """An integer of another library, such as NumPy."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self._value

    def __repr__(self) -> str:
        return f"Index({self._value})"


def raised(name: str, device: Any) -> tuple[type[Exception] | None, str]:
    """Return the type and the message of the error that a function raises for a device; (None, "") without an error."""
    outcome: tuple[type[Exception] | None, str] = None, ""
    try:
        FUNCTIONS[name](device)
    except Exception as error:
        outcome = type(error), str(error)
    assert "\n" not in outcome[1], (name, device)
    return outcome


def check_wrong(name: str, device: Any, error: type[Exception]) -> None:
    """Check that a function raises for a device of ``WRONG``, unless it takes the digits of an index."""
    if device == "0" and name in DIGITS_ARE_FINE:
        assert FUNCTIONS[name](device) == FUNCTIONS[name](0)
    else:
        assert raised(name, device)[0] is error, (name, device)


def check_negative(name: str, device: Any) -> None:
    """Check that a function raises for a device of ``NEGATIVE``, unless it takes one."""
    if name in NEGATIVE_IS_FINE:
        FUNCTIONS[name](device)
    else:
        error, message = raised(name, device)
        assert error is ValueError, (name, device)
        assert message.startswith(f"Device index {device} is out of range"), (name, device)


def find_takers() -> list[str]:
    """Return each function whose first parameter is no device, and that returns a result if it is called with one.

    ``torch.cuda``'s functions of some names take a device there, so a caller may pass one.
    """
    takers: list[str] = []
    for name in acc.__all__:
        function = getattr(acc, name)
        first = next(iter(inspect.signature(function).parameters.values()), None) if inspect.isfunction(function) else None
        if first is None or "Device" in str(first.annotation) or first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
            continue
        # Names, paths and data may be texts. The name of a range is checked when the range begins.
        is_text = "str" in str(first.annotation) or first.annotation == "Any"
        for device in (torch.device("cuda", 1), torch.device("cpu"), *(() if is_text else ("cuda:1",))):
            if name in ("annotate", "dump_memory_snapshot", "unpin_memory"):
                continue
            with contextlib.suppress(TypeError, ValueError, RuntimeError):
                function(device)
                takers.append(f"{name}({device!r})")
    return takers
