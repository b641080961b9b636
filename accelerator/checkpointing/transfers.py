"""Copies of activations to host memory and back, on one stream per device if the device has streams."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from .._machine import process
from .._torch.bindings import get_index, restore_index


class _CopyStream:
    """The copy stream of a device, and the offloaded activations whose device memory is not yet freed."""

    __slots__ = ("_index", "_on_device", "lock", "module", "stream")

    def __init__(self, device: torch.device) -> None:
        self.module: Any = torch.get_device_module(device)
        self.stream: Any = self.module.Stream(device=device)
        self._index = self.stream.device_index
        # Oldest first.
        self._on_device: deque[weakref.ref[Offloaded]] = deque()
        # Held while an activation's device memory is taken or freed: another thread's forward may free it during a backward.
        self.lock = threading.Lock()

    @contextmanager
    def entered(self) -> Generator[None, None, None]:
        """Make the stream the current one. Its own context would make one of CUDA's on the device that was current before."""
        previous = get_index()
        restore_index(self._index)
        try:
            with self.module.stream(self.stream):
                yield
        finally:
            restore_index(previous)

    def add(self, offloaded: Offloaded) -> None:
        """Register an activation, and free the device memory of those of earlier checkpoints."""
        self.free_unused(0)
        with self.lock:
            self._on_device.append(weakref.ref(offloaded))

    def free_unused(self, keep: int) -> None:
        """Free the device memory of activations whose forward has ended, except for the ``keep`` newest ones."""
        with self.lock:
            while len(self._on_device) > keep:
                oldest = self._on_device[0]()
                if oldest is not None and not oldest.forward_has_ended:
                    return
                self._on_device.popleft()
                if oldest is not None:
                    oldest.free_device_memory()


_copy_streams: dict[torch.device, _CopyStream | None] = {}


@process.reset_after_fork
def _reset_after_fork() -> None:
    _copy_streams.clear()


def _copy_stream(device: torch.device) -> _CopyStream | None:
    """Return the copy stream of a device, None if the device has no streams."""
    if device not in _copy_streams:
        module = torch.get_device_module(device)
        has_streams = device.type != "cpu" and all(hasattr(module, name) for name in ("Stream", "stream", "current_stream"))
        _copy_streams[device] = _CopyStream(device) if has_streams else None
    return _copy_streams[device]


def allocate(numel: int, dtype: torch.dtype, device: torch.device, on_host: bool) -> torch.Tensor:
    """Allocate memory for activations, on their device or on the host. Host memory is pinned if the device has streams.

    torch's caching host allocator reuses a pinned block only after the copies that use it have ended.
    """
    if not on_host:
        return torch.empty(numel, dtype=dtype, device=device)
    return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=_copy_stream(device) is not None)


class Offloaded:
    """A tensor of one dimension that is copied to the host, and back when a recomputation needs it.

    The tensor stays on the device until the forward of its checkpoint ends. The newest tensor stays until the next checkpoint
    starts; if backward starts first, it uses that tensor without a copy.
    """

    __slots__ = (
        "__weakref__",
        "_copied_back",
        "_copied_to_host",
        "_copy_stream",
        "_device",
        "_host",
        "_on_device",
        "_stream",
        "_version",
        "forward_has_ended",
        "was_edited",
    )

    def __init__(self, source: torch.Tensor, host: torch.Tensor) -> None:
        self._on_device: torch.Tensor | None = None
        device = source.device
        self._device = device
        self._host = host
        self._copied_to_host: Any = None
        self._copied_back: Any = None
        # Whether the source was edited in place before the copy had ended. The copy may then mix old and new values.
        self.was_edited = False
        self.forward_has_ended = False
        self._version = source._version
        copy_stream = self._copy_stream = _copy_stream(device)
        if copy_stream is None:
            host.copy_(source)
            return
        copy_stream.add(self)
        self._on_device = source
        # The stream of the computation that uses the tensor.
        self._stream: Any = copy_stream.module.current_stream(device)
        copy_stream.stream.wait_stream(self._stream)
        with copy_stream.entered():
            host.copy_(source, non_blocking=True)
            self._copied_to_host = copy_stream.module.Event()
            self._copied_to_host.record(copy_stream.stream)

    def __del__(self) -> None:
        # The allocator must not reuse the memory before the copy has ended.
        if self._on_device is not None and self._copy_stream is not None:
            self._on_device.record_stream(self._copy_stream.stream)

    def forward_ended(self) -> None:
        """Free the device memory, unless this is the newest activation on the device."""
        self.forward_has_ended = True
        if self._copy_stream is not None:
            self._copy_stream.free_unused(1)

    def free_device_memory(self) -> None:
        """Free the device memory. The stream waits for the copy first, because its later work may reuse the memory."""
        if self._copied_back is None and self._on_device is not None:
            self.was_edited = self._on_device._version != self._version
            self._stream.wait_event(self._copied_to_host)
            self._on_device = None

    def prefetch(self) -> None:
        """Start to copy the tensor back, concurrently with the computation."""
        copy_stream = self._copy_stream
        if copy_stream is None or self._on_device is not None:
            return
        # The memory belongs to the stream of the computation, which uses and frees it.
        on_device = torch.empty_like(self._host, device=self._device, pin_memory=False)
        self._stream = copy_stream.module.current_stream(self._device)
        copy_stream.stream.wait_stream(self._stream)
        with copy_stream.entered():
            on_device.copy_(self._host, non_blocking=True)
            copied_back = copy_stream.module.Event()
            copied_back.record(copy_stream.stream)
        with copy_stream.lock:
            self._copied_back, self._on_device = copied_back, on_device

    def fetch(self) -> torch.Tensor:
        """Return the tensor on its device, ready for the current stream. The copy on the host stays."""
        if self._copy_stream is None:
            return self._host.to(self._device)
        on_device = self._take()
        if on_device is None:
            self.prefetch()
            on_device = self._take()
        assert on_device is not None
        stream = self._copy_stream.module.current_stream(self._device)
        if self._copied_back is not None:
            stream.wait_event(self._copied_back)
            self._copied_back = None
        else:
            # The tensor is still on the device. Work on this stream must not change it before the copy to the host has ended.
            self.was_edited = on_device._version != self._version
            stream.wait_event(self._copied_to_host)
        if stream != self._stream:
            on_device.record_stream(stream)
        return on_device

    def _take(self) -> torch.Tensor | None:
        """Return the tensor if it is on the device, and leave it to the caller."""
        assert self._copy_stream is not None
        with self._copy_stream.lock:
            on_device, self._on_device = self._on_device, None
        return on_device
