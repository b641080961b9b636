"""A visible device in words: what NVML, amdsmi or the driver have about it."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import amdsmi, host_memory, nvml, probe
from .cuda import Seen


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


def describe(index: int, device: Seen) -> VisibleDevice:
    """Describe the device that torch calls by this index."""
    gpu, instance, driver = device
    if gpu is None or isinstance(gpu.handle, amdsmi.Processor):
        assert driver is not None  # one of the two has named the device
        return VisibleDevice(
            index,
            driver.uuid and f"GPU-{driver.uuid}",
            driver.name,
            driver.pci_bus_id and driver.pci_bus_id.rjust(len("00000000:00:00.0"), "0").upper(),
            driver.compute_capability,
            driver.total_memory,
            None if gpu is None else gpu.physical_index,
            None,
        )
    handle, binding = device.handle, nvml.session()
    return VisibleDevice(
        index,
        instance.uuid if instance else gpu.uuid,
        nvml.ask(binding.nvmlDeviceGetName, handle) or gpu.name or (driver.name if driver else "unknown"),
        nvml.ask(lambda handle: binding.nvmlDeviceGetPciInfo(handle).busId, gpu.handle),
        nvml.ask(lambda handle: tuple(binding.nvmlDeviceGetCudaComputeCapability(handle)), gpu.handle),
        _total_memory(binding, handle, driver),
        gpu.physical_index,
        (instance.gi, instance.ci) if instance else None,
    )


def _total_memory(binding: Any, handle: Any, driver: probe.Device | None) -> int:
    # Devices that share the host's memory have none of their own to report: not supported, or zero.
    total: int | None = nvml.ask(lambda handle: binding.nvmlDeviceGetMemoryInfo(handle).total, handle)
    return total or (driver.total_memory if driver else None) or host_memory.total()
