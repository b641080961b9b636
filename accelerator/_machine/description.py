"""Descriptions of devices, from NVML, amdsmi or the driver."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import host_memory, nvml
from .discovery_result import Backend, DiscoveredDevice, Failed, NotSupported, Reader

_PCI_DEVICES = "/sys/bus/pci/devices"


class VisibleDevice(NamedTuple):
    """A device that torch can use, in torch's order. It is a device argument: ``__index__`` gives ``index``.

    Attributes:
        index: the index that torch uses.
        uuid: NVML's UUID, with the prefix "GPU-" or "MIG-"; None if unknown.
        name: the product name; the device type if only torch knows the device.
        pci_bus_id: domain, bus and device, as in "00000000:3B:00.0"; None if unknown.
        compute_capability: major and minor; None for devices other than CUDA's.
        total_memory: bytes; None if unknown before the accelerator is initialized.
        physical_index: NVML's index of the GPU; None if NVML does not list it.
        mig: GPU instance id and compute instance id of a MIG instance, else None.
    """

    index: int  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleMethodOverride]  # tuple.index
    uuid: str | None
    name: str
    pci_bus_id: str | None
    compute_capability: tuple[int, int] | None
    total_memory: int | None
    physical_index: int | None
    mig: tuple[int, int] | None

    def __index__(self) -> int:
        return self.index


class PhysicalDevice(NamedTuple):
    """A GPU or a MIG instance of the machine, visible to this process or not.

    Attributes:
        index: the GPU's index in NVML or amdsmi; its MIG instances share it.
        uuid: with the prefix "GPU-" or "MIG-"; None if unknown.
        name: the product name.
        pci_bus_id: domain, bus and device, as in "00000000:3B:00.0"; None if unknown.
        compute_capability: major and minor; None for devices other than CUDA's, and if unknown.
        total_memory: bytes; None if unknown.
        mig: GPU instance id and compute instance id of a MIG instance, else None.
        visible_index: the index that torch uses in this process; None if this process does not see it.
    """

    index: int  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleMethodOverride]  # tuple.index
    uuid: str | None
    name: str
    pci_bus_id: str | None
    compute_capability: tuple[int, int] | None
    total_memory: int | None
    mig: tuple[int, int] | None
    visible_index: int | None


def visible(index: int, device: DiscoveredDevice, backend: Backend | None) -> VisibleDevice:
    """Describe the visible device with this index."""
    physical_index = None if device.gpu is None else device.gpu.physical_index
    return VisibleDevice(index, device.uuid, *_shared_fields(device, backend), physical_index, device.mig)


def physical(device: DiscoveredDevice, backend: Backend, visible_index: int | None) -> PhysicalDevice:
    """Describe a device of the machine."""
    assert device.gpu is not None  # from the list of the backend
    return PhysicalDevice(device.gpu.physical_index, device.uuid, *_shared_fields(device, backend), device.mig, visible_index)


def _shared_fields(
    device: DiscoveredDevice, backend: Backend | None
) -> tuple[str, str | None, tuple[int, int] | None, int | None]:
    try:
        total = total_memory(device, backend)
    except Failed:
        total = None
    return name(device, backend), pci_bus_id(device, backend), compute_capability(device, backend), total


def name(device: DiscoveredDevice, backend: Reader | None) -> str:
    """The product name."""
    # The list has the GPU's name. A MIG instance has a longer name of its own.
    return (device.instance and read_or_none(device, backend, "name")) or device.name


def pci_bus_id(device: DiscoveredDevice, backend: Reader | None) -> str | None:
    """Domain, bus and device of the GPU, the domain in eight digits."""
    bus = read_or_none(device._replace(instance=None), backend, "pci_bus_id") or (device.driver and device.driver.pci_bus_id)
    return bus and nvml.plain_bus(bus)


def compute_capability(device: DiscoveredDevice, backend: Backend | None) -> tuple[int, int] | None:
    """Major and minor; from the driver if the library that lists GPUs fails, None if unknown."""
    if device.driver and device.driver.compute_capability:
        return device.driver.compute_capability
    try:
        capability: tuple[int, int] = read(device._replace(instance=None), backend, "compute_capability")
    except NotSupported:
        return None
    except Failed:
        driver_device = backend.driver_device(device) if backend else None
        return driver_device.compute_capability if driver_device else None
    return capability


def total_memory(device: DiscoveredDevice, backend: Reader | None) -> int:
    """Bytes; the host's if the device has none of its own.

    Raises:
        Failed: if unknown.
    """
    try:
        return memory(device, backend)[1]
    except Failed:
        if device.driver and device.driver.total_memory:
            return device.driver.total_memory
        raise


def memory(device: DiscoveredDevice, backend: Reader | None) -> tuple[int, int, int]:
    """Free, total and used bytes, all processes counted; the host's if the device has none of its own.

    Raises:
        Failed: if unknown.
    """
    # Devices that share the host's memory report none of their own: "not supported", or zero.
    if device.handle is not None or not (device.driver and device.driver.integrated):
        try:
            figures: tuple[int, int, int] = read(device, backend, "memory")
            return figures
        except NotSupported:
            pass
    available, total = host_memory.available(), host_memory.total()
    return available, total, total - available


def read(device: DiscoveredDevice, backend: Reader | None, field: str) -> Any:
    """Read a field of a device.

    Raises:
        NotSupported: if the device does not report it.
        Failed: if the library that lists GPUs fails, or does not list the device.
    """
    if backend is None:
        raise Failed("only torch knows it")
    if device.handle is None:
        raise Failed(f"only the driver knows it; {backend.library_problem()}")
    return backend.read(device.handle, field)


def read_or_none(device: DiscoveredDevice, backend: Reader | None, field: str) -> Any:
    """Read a field of a device; None if it cannot be read."""
    try:
        return read(device, backend, field)
    except (NotSupported, Failed):
        return None


def numa_node_of_bus(bus: str | None) -> int | None:
    """The kernel's NUMA node of a PCI bus id; None if unknown."""
    if bus is None:
        return None
    try:
        # The kernel writes the domain in four digits or, from 0x10000 on, in as many as it needs; NVML in eight.
        domain, _, rest = bus.lower().partition(":")
        with open(f"{_PCI_DEVICES}/{int(domain, 16):04x}:{rest}/numa_node", encoding="ascii") as file:
            node = int(file.read())
    except (OSError, ValueError):
        return None
    return None if node < 0 else node
