"""The result of discovery: its types, and the two errors that reading a device raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from . import visibility
from .driver_child import DriverDevice

if TYPE_CHECKING:
    from .driver_probe import ProbeResult


class NotSupported(RuntimeError):
    """The device has no such feature; callers may use another source."""


class Failed(RuntimeError):
    """The library failed; no other source may replace it.

    Attributes:
        code: NVML's error code, 0 if the error is not NVML's.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


def failure_of(list_gpus: Callable[[], object]) -> str | None:
    """Why a library cannot list the GPUs; None if it can."""
    try:
        list_gpus()
    except Failed as error:
        return str(error)
    return None


class PhysicalGpu(NamedTuple):
    """A physical GPU in the list of its library.

    Attributes:
        physical_index: its index in that list.
        handle: the object by which its backend reads it.
        uuid: with the prefix "GPU-".
        name: the product name.
        instances: its MIG instances; None while MIG is off.
        problem: why the library could not list its instances, so that its devices are uncertain; or None.
    """

    physical_index: int
    handle: Any
    uuid: str | None
    name: str | None
    instances: tuple[visibility.Instance, ...] | None = None
    problem: str | None = None


class DiscoveredDevice(NamedTuple):
    """A device as the library that lists GPUs knows it, as the driver describes it, or both.

    Attributes:
        gpu: the GPU in the list of its library.
        instance: its MIG instance.
        driver: what the driver reports; for other accelerators, what torch reports.
        torch_index: the index by which an initialized torch reads it, if no library lists it.
    """

    gpu: PhysicalGpu | None
    instance: visibility.Instance | None = None
    driver: DriverDevice | None = None
    torch_index: int | None = None

    @property
    def handle(self) -> Any:
        """The handle of the instance, else of the GPU, else torch's index; None if only the driver knows the device."""
        return self.instance.handle if self.instance else self.gpu.handle if self.gpu else self.torch_index

    @property
    def uuid(self) -> str | None:
        """The UUID with its prefix, from the library or the driver."""
        uuid = self.instance.uuid if self.instance else self.gpu.uuid if self.gpu else None
        return uuid or (self.driver.uuid and f"GPU-{self.driver.uuid}" if self.driver else None)

    @property
    def name(self) -> str:
        """The product name, as far as it has been read."""
        return (self.gpu and self.gpu.name) or (self.driver and self.driver.name) or "unknown"

    @property
    def mig(self) -> tuple[int, int] | None:
        """GPU instance id and compute instance id of a MIG instance."""
        return (self.instance.gi, self.instance.ci) if self.instance else None


class Reader(Protocol):
    """A module that reads devices by their handles."""

    def read(self, handle: Any, field: str, /) -> Any:
        """Read a field of a device. Raises NotSupported or Failed."""

    def library_problem(self) -> str:
        """Why the library cannot read a device that has no handle."""
        ...


class Backend(Reader, Protocol):
    """A discovery backend: the module ``cuda`` or ``rocm``, whose functions these are."""

    def discover(self, env: Mapping[str, str]) -> DiscoveryResult:
        """The devices of a fresh process with this environment."""
        ...

    def physical(self) -> tuple[DiscoveredDevice, ...]:
        """Every device of the machine. Raises Failed."""
        ...

    def is_linked(self, handle: Any, peer: Any) -> bool | None:
        """Whether a fast link connects two GPUs. Raises NotSupported or Failed."""

    def driver_device(self, device: DiscoveredDevice) -> DriverDevice | None:
        """The driver's description of a device."""

    def probe_usability(self, result: DiscoveryResult, *, refresh: bool) -> ProbeResult:
        """Create a context on each device in a child process."""
        ...

    def has_context(self, index: int) -> bool | None:
        """Whether this process has a context on a device; None if unknown."""
        ...

    def limiting_variable(self, env: Mapping[str, str]) -> str:
        """The variable by which an environment limits what a process sees."""
        ...

    def clear(self) -> None:
        """Discover again at the next query."""


# The devices, or a function that lists them and says whether their order is certain.
ListedDevices: TypeAlias = "tuple[DiscoveredDevice, ...] | Callable[[], tuple[tuple[DiscoveredDevice, ...], bool]]"


class DiscoveryResult:
    """The visible devices. It is immutable and complete: its users need not read the environment again.

    Attributes:
        count: how many devices torch could use.
        accelerator_type: the type of the accelerator that torch would use, present or not; None for the CPU.
        device_type: the type of these devices, "cpu" if there are none.
        problem: one sentence on why there are none, or None.
        source: which library the result is from.
        environment: the variables that it was discovered with.
        selection: how a visible-devices variable was read, if it was read in this process.
        is_cacheable: whether it holds while everything it depends on is unchanged; a failure may pass in a second.
        backend: the discovery backend that reads the handles of its devices; None if only torch knows them.
    """

    __slots__ = (
        *("_devices", "_handles", "_list", "accelerator_type", "backend", "count", "device_type", "environment"),
        *("is_cacheable", "problem", "selection", "source"),
    )

    def __init__(
        self,
        count: int,
        problem: str | None,
        source: str,
        devices: ListedDevices = (),
        *,
        environment: Mapping[str, str],
        accelerator_type: str | None = None,
        backend: Backend | None = None,
        selection: visibility.Selection | None = None,
        is_cacheable: bool = True,
    ) -> None:
        self.count, self.problem, self.source, self.environment = count, problem, source, environment
        self.accelerator_type = accelerator_type
        self.device_type = (accelerator_type if count else None) or "cpu"
        self.backend, self.selection, self.is_cacheable = backend, selection, is_cacheable
        # Listing devices may need a child process, or functions that torch lacks for an accelerator; a count does not.
        self._list = devices if callable(devices) else None
        self._devices = None if callable(devices) else devices
        self._handles: tuple[Any, ...] | None = None

    @property
    def devices(self) -> tuple[DiscoveredDevice, ...]:
        """The ``count`` devices in torch's order; listed again at the next access if their order is not certain yet."""
        if self._devices is None:
            assert self._list is not None
            devices, is_certain = self._list()
            if not is_certain:
                return devices
            self._devices = devices
        return self._devices

    def handle(self, index: int) -> Any:
        """The handle of a device; None if only the driver knows it."""
        if self._handles is None:
            devices = self.devices
            if devices is not self._devices:  # the order is not certain yet
                return devices[index].handle
            self._handles = tuple(device.handle for device in devices)
        return self._handles[index]
