"""torch's history of allocations: a snapshot for torch's viewer, and the curves of a plot by what holds the memory."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from ... import _settings
from ..._settings.rehearsal_record import CATEGORIES, Curve, snapshot_file, write_curve
from .peaks import addresses_of, category_of, known_addresses

_MAXIMUM_EVENTS = 2_000_000
_MOST_POINTS = 600
_has_snapshot = _settings.read("snapshot") is not None
_has_plot = _settings.read("plot") is not None
# The category by address at a time in microseconds.
_marks: list[tuple[int, dict[int, str]]] = []
_has_stepped = False


def start() -> None:
    """Record the stacks of what is allocated, and the history of allocations if a snapshot or a plot is asked for."""
    record: Any = torch.cuda.memory._record_memory_history
    if not _has_snapshot and not _has_plot:
        record("state", context="state", stacks="python", max_entries=1)
        return
    record("all", context="all" if _has_snapshot else "alloc", stacks="python", max_entries=_MAXIMUM_EVENTS)
    if _has_plot:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(_mark_step)


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


def _mark_step(optimizer: Any, *arguments: Any) -> None:
    """Note the addresses of parameters, gradients and optimizer state after the first steps."""
    global _has_stepped
    if not _has_stepped:
        _has_stepped = True
        mark(known_addresses())  # which takes longer, and finds parameters that no optimizer has
    elif len(_marks) <= 2 * _MOST_POINTS:
        mark(addresses_of([parameter for group in optimizer.param_groups for parameter in group["params"]], optimizer))


def note_out_of_memory() -> None:
    """Note what holds the memory when it is exhausted, in the middle of a step or before the first."""
    if _has_plot:
        mark(known_addresses())


def mark(by_address: dict[int, str]) -> None:
    """Note the category of memory by address, as of now."""
    if _has_plot:
        _marks.append((_now(), by_address))


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
            sizes[address] = size, categories[index]
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
            found.update({alive[address]: category for address, category in by_address.items() if address in alive})

    for index, event in enumerate(events):
        apply(event.get("time_us", 0))
        if event["action"] == "alloc":
            alive[event["addr"]] = index
            found[index] = category_of(event.get("frames", []))
        elif event["action"] == "free_requested":
            alive.pop(event["addr"], None)
    apply(math.inf)
    return found
