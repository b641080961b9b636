"""The times of checkpointed regions: recorded while ``profile`` is configured, read with ``region_times``."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import streams
from .._machine import process
from .._torch.bindings import get_index
from . import bindings

if TYPE_CHECKING:
    from .configuration import Settings


class RegionTimes(NamedTuple):
    """The totals of one checkpointed function: ``calls`` and ``recomputations`` are counts, the others seconds."""

    calls: int = 0
    forward_seconds: float = 0.0
    recomputations: int = 0
    recompute_seconds: float = 0.0


_times: dict[str, RegionTimes] = {}
_lock = threading.Lock()


@process.reset_after_fork
def _reset_after_fork() -> None:
    global _lock
    _lock = threading.Lock()


def region_times(*, clear: bool = False) -> dict[str, RegionTimes]:
    """Return the times of the checkpointed regions that ran while ``profile`` was configured.

    Times are measured on the host. They include the work of the accelerator if ``synchronize`` is configured too, else only
    its launch. A nested region counts in the outer region too.

    Args:
        clear: whether to reset the times after reading them.

    Returns:
        A dict from the name of each checkpointed function (the class for a module) to its ``RegionTimes``, in seconds.

    Example:
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
    """The name under which the times of a function are recorded."""
    name = getattr(function, "__qualname__", None)
    return name if isinstance(name, str) else type(function).__name__


class Region:
    """A context for one run of a function: records its time, and synchronizes at both ends, as the settings say."""

    __slots__ = ("_devices", "_name", "_recompute", "_settings", "_start")

    def __init__(
        self, function: Callable[..., Any], settings: Settings, devices: set[torch.device], *, recompute: bool
    ) -> None:
        """
        Args:
            devices: the devices of the arguments, without the CPU.
        """
        self._devices = devices
        self._name = region_name(function)
        self._settings = settings
        self._recompute = recompute

    def __enter__(self) -> None:
        if self._settings.synchronize:
            self._synchronize()
        self._start = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        if self._settings.synchronize:
            self._synchronize()
        if self._settings.profile:
            seconds = time.perf_counter() - self._start
            with _lock:
                calls, forward, recomputations, recompute = _times.get(self._name, RegionTimes())
                if self._recompute:
                    _times[self._name] = RegionTimes(calls, forward, recomputations + 1, recompute + seconds)
                else:
                    _times[self._name] = RegionTimes(calls + 1, forward + seconds, recomputations, recompute)

    def _synchronize(self) -> None:
        """Synchronize the devices of the arguments, and the current one, unless that makes a context on it."""
        if not process.is_initialized():
            streams.synchronize()
            return
        current = get_index()
        device_type = process.torch_accelerator().type
        for index in {each.index for each in self._devices if each.type == device_type} | {current}:
            if index != current or bindings.may_have_context(device_type, index):
                streams.synchronize(index)
