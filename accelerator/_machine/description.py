"""A device in words: what NVML, amdsmi or the driver have about it."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

from . import host_memory, nvml
from .discovery_result import DiscoveredDevice, Failed, NotSupported


class VisibleDevice(NamedTuple):
    """A device that torch can use, in torch's order.

    Attributes:
        index: the index by which torch calls the device.
        uuid: NVML's name of it, beginning with "GPU-" or "MIG-"; None where unknown.
        name: the product's name, or the accelerator's type where torch alone knows the device.
        pci_bus_id: domain, bus and device, as in "00000000:3B:00.0"; None where unknown.
        compute_capability: major and minor; None for devices other than CUDA's.
        total_memory: bytes; None where unknown before the accelerator is initialized.
        physical_index: NVML's index of the GPU; None where NVML does not know it.
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


class PhysicalDevice(NamedTuple):
    """A GPU or a MIG instance of the machine, whether this process sees it or not.

    Attributes:
        index: the index that NVML, or amdsmi, gives the GPU; its MIG instances share it.
        uuid: beginning with "GPU-" or "MIG-"; None where unknown.
        name: the product's name.
        pci_bus_id: domain, bus and device, as in "00000000:3B:00.0"; None where unknown.
        compute_capability: major and minor; None for devices other than CUDA's, and where unknown.
        total_memory: bytes; None where unknown.
        mig: GPU instance id and compute instance id of a MIG instance, else None.
        visible_index: the index by which torch calls it in this process; None where this process does not see it.
    """

    index: int  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleMethodOverride]  # tuple.index
    uuid: str | None
    name: str
    pci_bus_id: str | None
    compute_capability: tuple[int, int] | None
    total_memory: int | None
    mig: tuple[int, int] | None
    visible_index: int | None


def visible(index: int, device: DiscoveredDevice, backend: ModuleType | None) -> VisibleDevice:
    """Describe the device that torch calls by this index."""
    physical_index = None if device.gpu is None else device.gpu.physical_index
    return VisibleDevice(index, device.uuid, *_about(device, backend), physical_index, device.mig)


def physical(device: DiscoveredDevice, backend: ModuleType, visible_index: int | None) -> PhysicalDevice:
    """Describe a device of the machine."""
    assert device.gpu is not None  # from the list of the backend
    return PhysicalDevice(device.gpu.physical_index, device.uuid, *_about(device, backend), device.mig, visible_index)


def _about(device: DiscoveredDevice, backend: ModuleType | None) -> tuple[str, str | None, tuple[int, int] | None, int | None]:
    try:
        total = total_memory(device, backend)
    except Failed:
        total = None
    return name(device, backend), pci_bus_id(device, backend), compute_capability(device, backend), total


def name(device: DiscoveredDevice, backend: ModuleType | None) -> str:
    """The product's name."""
    # The list has the whole GPU's, which an instance's own name says more than.
    return (device.instance and read_or_none(device, backend, "name")) or device.name


def pci_bus_id(device: DiscoveredDevice, backend: ModuleType | None) -> str | None:
    """Domain, bus and device of the GPU, the domain in eight digits."""
    found = read_or_none(device._replace(instance=None), backend, "pci_bus_id") or (device.driver and device.driver.pci_bus_id)
    return found and nvml.plain_bus(found)


def compute_capability(device: DiscoveredDevice, backend: ModuleType | None) -> tuple[int, int] | None:
    """Major and minor; from the driver where the library that lists GPUs fails, None where nobody can tell."""
    if device.driver and device.driver.compute_capability:
        return device.driver.compute_capability
    try:
        found: tuple[int, int] = read(device._replace(instance=None), backend, "compute_capability")
    except NotSupported:
        return None
    except Failed:
        asked = backend and backend.driver_device(device)
        return asked.compute_capability if asked else None
    return found


def total_memory(device: DiscoveredDevice, backend: ModuleType | None) -> int:
    """Bytes; the host's where the device has none of its own.

    Raises:
        Failed: if nobody can tell.
    """
    try:
        return memory(device, backend)[1]
    except Failed:
        if device.driver and device.driver.total_memory:
            return device.driver.total_memory
        raise


def memory(device: DiscoveredDevice, backend: ModuleType | None) -> tuple[int, int, int]:
    """Free, total and used bytes, all processes counted; the host's where the device has none of its own.

    Raises:
        Failed: if nobody can tell.
    """
    # Devices that share the host's memory have none of their own to report: not supported, or zero.
    if device.handle is not None or not (device.driver and device.driver.integrated):
        try:
            found: tuple[int, int, int] = read(device, backend, "memory")
            return found
        except NotSupported:
            pass
    available, total = host_memory.available(), host_memory.total()
    return available, total, total - available


def read(device: DiscoveredDevice, backend: ModuleType | None, field: str) -> Any:
    """A field of a device.

    Raises:
        NotSupported: if the device does not report it.
        Failed: if the library that lists GPUs fails, or does not know the device.
    """
    if device.handle is None or backend is None:
        raise Failed("it is known to the driver only, and to no library that tells what it is doing (NVML, amdsmi)")
    return backend.read(device.handle, field)


def read_or_none(device: DiscoveredDevice, backend: ModuleType | None, field: str) -> Any:
    """The same, None where it cannot be had."""
    try:
        return read(device, backend, field)
    except (NotSupported, Failed):
        return None


def numa_node_of_bus(bus: str | None) -> int | None:
    """The NUMA node that the kernel has for a place on the PCI bus; None where it does not tell."""
    if bus is None:
        return None
    try:
        # The kernel's spelling has four digits of domain, NVML's eight.
        with open(f"/sys/bus/pci/devices/{bus[4:].lower()}/numa_node", encoding="ascii") as file:
            node = int(file.read())
    except (OSError, ValueError):
        return None
    return None if node < 0 else node
