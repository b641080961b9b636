"""How long checkpointed regions take: filled while ``profile`` is configured, read with ``region_times``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from .. import streams

__all__ = ["RegionTimes", "region_times"]


class RegionTimes(NamedTuple):
    """What one checkpointed function took, in all: ``calls`` and ``recomputations`` count, the others are seconds."""

    calls: int = 0
    forward_seconds: float = 0.0
    recomputations: int = 0
    recompute_seconds: float = 0.0


_times: dict[str, RegionTimes] = {}
_lock = threading.Lock()


def region_times(*, clear: bool = False) -> dict[str, RegionTimes]:
    """Return the times of the checkpointed regions that ran while ``profile`` was configured.

    Times are the host's. With ``synchronize`` configured too they include the work of the accelerator, without it they
    are what launching the work took. A region inside another counts in both.

    Args:
        clear: forget the times once they are read.

    Returns:
        From the name of each checkpointed function (the class for a module) to its ``RegionTimes``, in seconds.

    Raises:
        Nothing.

    Fork: safe, initializes nothing.

    Example:
        >>> import torch
        >>> from accelerator import checkpointing
        >>> checkpointing.configure(profile=True)
        >>> y = checkpointing.checkpoint(torch.nn.Linear(2, 2), torch.ones(1, 2))
        >>> checkpointing.region_times(clear=True)["Linear"].calls
        1
        >>> checkpointing.configure()
    """
    with _lock:
        times = dict(_times)
        if clear:
            _times.clear()
    return times


def region_name(function: Any) -> str:
    """The name under which a function's times are kept."""
    name = getattr(function, "__qualname__", None)
    return name if isinstance(name, str) else type(function).__name__


class Region:
    """Times one run of a function and, where asked, waits for the accelerator at both ends."""

    __slots__ = ("_name", "_profile", "_recompute", "_start", "_wait")

    def __init__(self, function: Callable[..., Any], profile: bool, synchronize: bool, recompute: bool) -> None:
        self._name = region_name(function)
        self._profile = profile
        self._wait = synchronize
        self._recompute = recompute

    def __enter__(self) -> None:
        if self._wait:
            streams.synchronize()
        self._start = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        if self._wait:
            streams.synchronize()
        if self._profile:
            seconds = time.perf_counter() - self._start
            with _lock:
                calls, forward, recomputations, recompute = _times.get(self._name, RegionTimes())
                if self._recompute:
                    _times[self._name] = RegionTimes(calls, forward, recomputations + 1, recompute + seconds)
                else:
                    _times[self._name] = RegionTimes(calls + 1, forward + seconds, recomputations, recompute)
