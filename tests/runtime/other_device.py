"""Call every function that takes a device argument with both devices of a machine, while either is current, and print results.

The devices differ in all that a function can tell. For a function that acts, the result is what the act has changed.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

import accelerator as acc
from tests.runtime.device_arguments import FUNCTIONS, INDEX_IS_REQUIRED, MORE_FUNCTIONS

MACHINE: dict[str, Any] = {
    "gpus": 3,
    "memory": ["1GiB", "2GiB", "3GiB"],
    "name": ["A10", "L4", "T4"],
    "capability": ["7.5", "8.9", "9.0"],
    "numa": [0, 1, 2],
    "nvlink": [0, 1, 0],
}
DEVICES = (0, 1)
_MIB = 2**20


def _current_inside(device: Any) -> int:
    with acc.device_index(device):
        return torch.cuda.current_device()


def _current_after(name: str) -> Callable[[Any], int]:
    def call(device: Any) -> int:
        FUNCTIONS.get(name, MORE_FUNCTIONS.get(name))(device)  # type: ignore[misc]
        return torch.cuda.current_device()

    return call


def _restored_seeds(device: Any) -> list[bool]:
    """Return of which devices fork_rng() restores the generator."""
    before = [torch.cuda.get_rng_state(each) for each in DEVICES]
    with acc.fork_rng([device]):
        for each in DEVICES:
            torch.rand(1, device=f"cuda:{each}")
    same = [torch.equal(state, torch.cuda.get_rng_state(each)) for each, state in zip(DEVICES, before, strict=True)]
    for each, state in zip(DEVICES, before, strict=True):
        torch.cuda.set_rng_state(state, each)
    return same


def _pooled(device: Any) -> list[bool]:
    """Return on which devices use_mem_pool() takes memory from the pool."""
    with acc.device_index(device):
        pool = acc.create_mem_pool()
    with acc.use_mem_pool(pool, device):
        held = [torch.empty(3 * _MIB, device=f"cuda:{each}") for each in DEVICES]
    segments = [each for each in torch.cuda.memory_snapshot() if tuple(each["segment_pool_id"]) == tuple(pool.id)]
    del held  # before the pool
    return [any(segment["device"] == each for segment in segments) for each in DEVICES]


def _changes(act: Callable[[Any], object], observe: Callable[[int], Any]) -> Callable[[Any], list[Any]]:
    """Return a function that acts on a device, and returns for each device whether this has changed what is observed there."""

    def call(device: Any) -> list[bool]:
        _use_devices()
        before = [observe(each) for each in DEVICES]
        act(device)
        return [observe(each) != value for each, value in zip(DEVICES, before, strict=True)]

    return call


def _statistic(name: str) -> Callable[[int], Any]:
    return lambda device: torch.cuda.memory_stats(device)[name]


def _use_devices() -> None:
    """Allocate and free memory of each device, so that its peaks exceed what is held, and use its generator."""
    for device in DEVICES:
        torch.empty((5 + device) * _MIB, device=f"cuda:{device}")
        with torch.cuda.device(device):
            torch.cuda.empty_cache()
            torch.cuda.manual_seed(10 + device)
        torch.rand(3 + device, device=f"cuda:{device}")
        torch.cuda.set_per_process_memory_fraction(0.5 + device / 4, device)


_peak, _reserved_peak = _statistic("allocated_bytes.all.peak"), _statistic("reserved_bytes.all.peak")

# What the functions without a result change.
ACTIONS: dict[str, Callable[[Any], Any]] = {
    "device_index": _current_inside,
    "fork_rng": _restored_seeds,
    "reset_accumulated_memory_stats": _changes(acc.reset_accumulated_memory_stats, _statistic("allocated_bytes.all.allocated")),
    "reset_max_memory_allocated": _changes(lambda device: acc.reset_max_memory_allocated(device), _peak),
    "reset_max_memory_cached": _changes(lambda device: acc.reset_max_memory_cached(device), _reserved_peak),
    "reset_peak_memory_stats": _changes(acc.reset_peak_memory_stats, _peak),
    "set_device": _current_after("set_device"),
    "set_device_idx": _current_after("set_device_idx"),
    "set_device_index": _current_after("set_device_index"),
    "set_per_process_memory_fraction": _changes(
        lambda device: acc.set_per_process_memory_fraction(0.25, device), acc.get_per_process_memory_fraction
    ),
    "set_rng_state": _changes(
        lambda device: acc.set_rng_state(torch.cuda.get_rng_state(2), device),
        lambda device: torch.cuda.default_generators[device].initial_seed(),
    ),
    "use_mem_pool": _pooled,
}
# These wait: see `_waits`.
WAITING: dict[str, Callable[[Any], Any]] = {"synchronize": acc.synchronize}
# Device 2 is linked to device 0 alone.
_LINKS: dict[str, Callable[[Any], Any]] = {
    "is_nvlink_connected": lambda device: acc.is_nvlink_connected(device, 2),
    "is_nvlink_connected, the peer": lambda device: acc.is_nvlink_connected(2, device),
}
# torch 2.6 returns another stream for each call.
_EXTERNAL: dict[str, Callable[[Any], Any]] = {"external_stream": lambda device: acc.external_stream(0, device).device_index}
_ALL = {**FUNCTIONS, **MORE_FUNCTIONS, **ACTIONS, **_LINKS, **_EXTERNAL}
CALLS = {name: call for name, call in _ALL.items() if name not in WAITING}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, torch.Generator):
        return str(value.device), value.initial_seed()
    return str(value)


def _results(call: Callable[[Any], Any], needs_device: bool) -> list[list[Any]]:
    found: list[list[Any]] = []
    for current in DEVICES:
        row: list[Any] = []
        for device in DEVICES if needs_device else (*DEVICES, None):
            torch.cuda.set_device(current)
            row.append(_plain(call(device)))
        found.append(row)
    return found


def _waits(call: Callable[[Any], Any]) -> list[bool]:
    """Return which devices have ended their work after the wait for device 1, while device 0 is current."""
    torch.cuda.set_device(0)
    events: list[torch.cuda.Event] = []
    for device, seconds in enumerate((600, 0.02)):
        with torch.cuda.device(device):
            torch.cuda._sleep(int(seconds * 1e9))
            events.append(torch.cuda.current_stream().record_event())
    call(1)
    return [event.query() for event in events]


def main() -> None:
    """Print a JSON object: for each function, for each current device, its results for device 0, for device 1, and for none."""
    warnings.simplefilter("ignore")
    acc.init()
    kept = [torch.ones((1 + 8 * device) * _MIB, device=f"cuda:{device}") for device in DEVICES]
    for device in range(3):
        torch.cuda.set_stream(torch.cuda.Stream(device))
    _use_devices()
    found: dict[str, Any] = {name: _results(call, name in INDEX_IS_REQUIRED | ACTIONS.keys()) for name, call in CALLS.items()}
    assert len(kept) == 2
    found.update({name: _waits(call) for name, call in WAITING.items()})
    print(json.dumps(found), flush=True)
    os._exit(0)  # device 0 still works


if __name__ == "__main__":
    main()
