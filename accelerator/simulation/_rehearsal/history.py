"""torch's history of allocations: a snapshot for torch's viewer, and the curves of a plot by what holds the memory."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from .. import _settings
from .._rehearsal_record import CATEGORIES, Curve, snapshot_file, write_curve
from .peaks import addresses_of, parameters

__all__ = ["end", "note_out_of_memory", "start"]

_MAXIMUM_EVENTS = 2_000_000
_MOST_POINTS = 600
_has_snapshot = _settings.read("snapshot") is not None
_has_plot = _settings.read("plot") is not None
# What was at which address of device memory at a time in microseconds: the category by address, or None for the start of a
# backward, when all that is alive and has no other category is an activation.
_marks: list[tuple[int, dict[int, str] | None]] = []
_stepping: list[Any] = []  # the optimizer whose step runs


def start() -> None:
    """Record the stacks of what is allocated, and the history of allocations if a snapshot or a plot is asked for."""
    record: Any = torch.cuda.memory._record_memory_history
    if not _has_snapshot and not _has_plot:
        record("state", context="state", stacks="python", max_entries=1)
        return
    record("all", context="all" if _has_snapshot else "state", stacks="python", max_entries=_MAXIMUM_EVENTS)
    if _has_plot:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(_note_step)
        register_optimizer_step_post_hook(_mark_step)
        backward: Any = torch.autograd.backward

        def mark_and_run(*arguments: Any, **options: Any) -> Any:
            _marks.append((_now(), None))
            return backward(*arguments, **options)

        torch.autograd.backward = mark_and_run


def end(folder: str) -> None:
    """Write what was asked for to the folder of the records."""
    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return
    if _has_snapshot:
        cuda.memory._dump_snapshot(snapshot_file(folder))
    if _has_plot:
        for device, events in enumerate(cuda.memory._snapshot()["device_traces"]):
            points = _points([event for event in events if "addr" in event])
            if any(map(any, points)):
                write_curve(folder, Curve(device, points))


def _now() -> int:
    return time.time_ns() // 1000


def _note_step(optimizer: Any, *arguments: Any) -> None:
    _stepping[:] = [optimizer]


def _mark_step(optimizer: Any, *arguments: Any) -> None:
    """Note the addresses of parameters, gradients and optimizer state after the first steps."""
    _stepping.clear()
    if len(_marks) <= 2 * _MOST_POINTS:
        _mark([parameter for group in optimizer.param_groups for parameter in group["params"]], optimizer)


def note_out_of_memory() -> None:
    """Note what holds the memory when it is exhausted, in the middle of a step or before the first."""
    if _has_plot:
        _mark(parameters(), *_stepping)


def _mark(marked: list[Any], *optimizers: Any) -> None:
    _marks.append((_now(), addresses_of(marked, *optimizers)))


def _points(events: list[dict[str, Any]]) -> list[list[int]]:
    """Return the allocated bytes by category and the reserved bytes over the events of a run."""
    categories = _categories(events)
    held: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
    reserved = 0
    sizes: dict[int, tuple[int, str]] = {}
    step = max(1, len(events) // _MOST_POINTS)
    points: list[list[int]] = []
    most: list[int] = []
    for index, event in enumerate(events):
        action, address, size = event["action"], event["addr"], event["size"]
        if action == "alloc":
            sizes[address] = size, categories.get(index, "other")
            held[sizes[address][1]] += size
        elif action == "free_requested" and address in sizes:
            freed, category = sizes.pop(address)
            held[category] -= freed
        elif action in ("segment_alloc", "segment_map"):
            reserved += size
        elif action in ("segment_free", "segment_unmap"):
            reserved -= size
        now = [*held.values(), reserved]
        if not most or sum(now[:-1]) > sum(most[:-1]):
            most = now
        if index % step == step - 1 or index == len(events) - 1:
            points.append(most)  # the largest of each interval, so that no peak is lost
            most = []
    return points


def _categories(events: list[dict[str, Any]]) -> dict[int, str]:
    """Return the category of allocations by the index of their event."""
    found: dict[int, str] = {}
    alive: dict[int, int] = {}
    marks = [*_marks]

    def apply(before: float) -> None:
        while marks and marks[0][0] < before:
            _, by_address = marks.pop(0)
            for address, allocation in alive.items():
                if by_address is None:
                    found.setdefault(allocation, "activations")
                elif address in by_address:
                    found[allocation] = by_address[address]

    for index, event in enumerate(events):
        apply(event.get("time_us", 0))
        if event["action"] == "alloc":
            alive[event["addr"]] = index
        elif event["action"] == "free_requested":
            alive.pop(event["addr"], None)
    apply(math.inf)
    return found
