"""Moving activations to the host's memory and back, beside the computation where the device has streams."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch

# How many activations per device may be on their way to the host: the computation waits for the oldest of them before it
# lets a further one leave, which bounds the memory that a host running ahead of the device would pile up.
_MAX_LEAVING = 2


class _CopyStream:
    """The stream beside a device's computation, and the activations that are leaving on it."""

    __slots__ = ("leaving", "module", "stream")

    def __init__(self, device: torch.device) -> None:
        self.module: Any = torch.get_device_module(device)
        self.stream: Any = self.module.Stream(device=device)
        self.leaving: deque[weakref.ref[Offloaded]] = deque()


_sides: dict[torch.device, _CopyStream | None] = {}


def _copy_stream(device: torch.device) -> _CopyStream | None:
    """The side stream of a device, None where the device has no streams."""
    if device not in _sides:
        module = torch.get_device_module(device)
        streams = device.type != "cpu" and all(hasattr(module, name) for name in ("Stream", "stream", "current_stream"))
        _sides[device] = _CopyStream(device) if streams else None
    return _sides[device]


def allocate(numel: int, dtype: torch.dtype, device: torch.device, host: bool) -> torch.Tensor:
    """Memory for activations of a device: its own, or the host's, pinned if the device is another one.

    Pinned blocks come from torch's caching host allocator, which hands a block out again once the copies that use it are
    done; a pool of our own would add nothing.
    """
    if not host:
        return torch.empty(numel, dtype=dtype, device=device)
    return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=_copy_stream(device) is not None)


class Offloaded:
    """A tensor of one dimension on its way to the host, there, or on its way back.

    The two that left last stay on the device until further ones leave: if backward comes first, it takes them as they are.
    """

    __slots__ = (
        "__weakref__",
        "_arrival",
        "_copy_stream",
        "_device",
        "_event",
        "_host",
        "_on_device",
        "_stream",
        "_version",
        "changed",
    )

    def __init__(self, source: torch.Tensor, host: torch.Tensor) -> None:
        self._on_device: torch.Tensor | None = None
        device = source.device
        self._device = device
        self._host = host
        self._event: Any = None
        self._arrival: Any = None
        # Whether the source was written to while it was leaving, so that what arrived may be neither old nor new.
        self.changed = False
        self._version = source._version
        side = self._copy_stream = _copy_stream(device)
        if side is None:
            host.copy_(source)
            return
        self._on_device = source
        # The stream of the computation that has the use of what is here.
        self._stream: Any = side.module.current_stream(device)
        side.stream.wait_stream(self._stream)
        with side.module.stream(side.stream):
            host.copy_(source, non_blocking=True)
            self._event = side.module.Event()
            self._event.record(side.stream)
        side.leaving.append(weakref.ref(self))
        while len(side.leaving) > _MAX_LEAVING:
            oldest = side.leaving.popleft()()
            if oldest is not None:
                oldest._let_go()

    def __del__(self) -> None:
        # Dropped while a copy from or to the device's memory is under way: the allocator may hand it out again only after.
        if self._on_device is not None and self._copy_stream is not None:
            self._on_device.record_stream(self._copy_stream.stream)

    def _let_go(self) -> None:
        """Free the device's memory, in the order of its computation."""
        if self._arrival is None and self._on_device is not None:
            self.changed = self._on_device._version != self._version
            self._stream.wait_event(self._event)
            self._on_device = None

    def start(self) -> None:
        """Begin to bring the tensor back, beside the computation."""
        side = self._copy_stream
        if side is None or self._on_device is not None:
            return
        # Allocated for the stream of the computation, which will use and free it.
        here = torch.empty_like(self._host, device=self._device, pin_memory=False)
        self._stream = side.module.current_stream(self._device)
        side.stream.wait_stream(self._stream)
        with side.module.stream(side.stream):
            here.copy_(self._host, non_blocking=True)
            self._arrival = side.module.Event()
            self._arrival.record(side.stream)
        self._on_device = here

    def take(self) -> torch.Tensor:
        """The tensor on its device, usable by the stream of the computation; the host's copy stays."""
        if self._copy_stream is None:
            return self._host.to(self._device)
        self.start()
        here = self._on_device
        assert here is not None
        stream = self._copy_stream.module.current_stream(self._device)
        if self._arrival is not None:
            stream.wait_event(self._arrival)
            self._arrival = None
        else:
            # Still here from the forward; the copy to the host must not see what comes after.
            self.changed = here._version != self._version
            stream.wait_event(self._event)
        if stream != self._stream:
            here.record_stream(stream)
        self._on_device = None
        return here
