"""What looking for devices gives: the types of the one answer, of what it is made of, and of the two ways not to answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from . import grammar
from .driver_child import Device

if TYPE_CHECKING:
    from types import ModuleType

# A daemon may start before the driver does: what failed is tried again after this long.
RETRY_AFTER_S = 1.0


class NotSupported(RuntimeError):
    """The device has no such thing; something else may stand in for it."""


class Failed(RuntimeError):
    """The library could not answer; nothing may stand in for the answer.

    Attributes:
        code: NVML's number of the error, 0 where it was not NVML that failed.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class Gpu(NamedTuple):
    """A physical GPU as its library lists it.

    Attributes:
        physical_index: its place in that list.
        handle: what its backend reads it by.
        uuid: with its prefix "GPU-".
        name: the product's.
        instances: its MIG instances; None while MIG is off.
        problem: what the library could not tell of it, so that its devices are not known for sure; or None.
    """

    physical_index: int
    handle: Any
    uuid: str | None
    name: str | None
    instances: tuple[grammar.Instance, ...] | None = None
    problem: str | None = None


class DiscoveredDevice(NamedTuple):
    """A device: what the library that lists GPUs has about it, what the driver said of it, or both."""

    gpu: Gpu | None
    instance: grammar.Instance | None = None
    driver: Device | None = None

    @property
    def handle(self) -> Any:
        """The handle of the instance, else of the GPU; None where only the driver knows it."""
        return self.instance.handle if self.instance else self.gpu.handle if self.gpu else None

    @property
    def uuid(self) -> str | None:
        """With its prefix, from whoever knows it."""
        known = self.instance.uuid if self.instance else self.gpu.uuid if self.gpu else None
        return known or (self.driver.uuid and f"GPU-{self.driver.uuid}" if self.driver else None)

    @property
    def name(self) -> str:
        """The product's name as far as it was told already."""
        return (self.gpu and self.gpu.name) or (self.driver and self.driver.name) or "unknown"

    @property
    def mig(self) -> tuple[int, int] | None:
        """GPU instance id and compute instance id of a MIG instance."""
        return (self.instance.gi, self.instance.ci) if self.instance else None


class DiscoveryResult:
    """What is visible. Made once and replaced as a whole; all that is learned of its devices hangs on it.

    Attributes:
        count: how many devices torch could use.
        problem: one sentence on why there is none, or None.
        source: who said so.
        selection: how the environment was read, where it was read here.
        is_cacheable: whether it stays true while all that it was asked with does; what failed to start may start in a second.
        backend: the module that reads the handles of its devices; None where no library but torch knows them.
    """

    __slots__ = ("_devices", "_list", "backend", "count", "is_cacheable", "problem", "selection", "source")

    def __init__(
        self,
        count: int,
        problem: str | None,
        source: str,
        devices: tuple[DiscoveredDevice, ...] | Callable[[], tuple[tuple[DiscoveredDevice, ...], bool]] = (),
        *,
        backend: ModuleType | None = None,
        selection: grammar.Selection | None = None,
        is_cacheable: bool = True,
    ) -> None:
        self.count, self.problem, self.source = count, problem, source
        self.backend, self.selection, self.is_cacheable = backend, selection, is_cacheable
        # Listing them may take a child process, which a count does not need.
        self._list = devices if callable(devices) else None
        self._devices = None if callable(devices) else devices

    @property
    def devices(self) -> tuple[DiscoveredDevice, ...]:
        """The ``number`` devices in torch's order, kept unless who lists them says that the order may yet turn out another."""
        if self._devices is None:
            assert self._list is not None
            devices, lasting = self._list()
            if not lasting:
                return devices
            self._devices = devices
        return self._devices

    def handle(self, index: int) -> Any:
        """The handle of a device, None where only the driver knows it."""
        return (self._devices or self.devices)[index].handle
