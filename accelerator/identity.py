"""Identity of devices: name, compute capability, links, NUMA node, and the driver's version.

The functions are fork-safe: they initialize nothing in this process. If NVML cannot answer, a child process asks the driver.
"""

from __future__ import annotations

from ._machine import cuda, description, discovery_cache, nvml, visibility_variables
from ._machine.device_argument import Device
from ._machine.discovery_result import Failed, NotSupported
from ._machine.dynamo import assume_constant
from .discovery import index_in, resolve_device

__all__ = ["compute_capability", "driver_cuda_version", "driver_version", "get_device_name", "is_nvlink_connected", "numa_node"]


@assume_constant
def compute_capability(device: Device = None) -> tuple[int, int] | None:
    """Return the compute capability of a device.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        Major and minor; None without an accelerator, for devices other than CUDA's, and if unknown.

    Example:
        >>> acc.compute_capability()
        (9, 0)
    """
    result, index = resolve_device(device)
    return description.compute_capability(result.devices[index], result.backend) if result.count else None


@assume_constant
def get_device_name(device: Device = None) -> str:
    """Return the product name of a device.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        The name; "cpu" under the CPU fallback.

    Example:
        >>> acc.get_device_name(1)
        'Simulated GPU'
    """
    result, index = resolve_device(device)
    return description.name(result.devices[index], result.backend) if result.count else "cpu"


def is_nvlink_connected(device: Device, peer_device: Device) -> bool | None:
    """Return whether NVLink, or XGMI on ROCm, connects two devices.

    Args:
        device: one of them.
        peer_device: the other; a device is connected with itself.

    Returns:
        None if unknown, and without an accelerator.

    Example:
        >>> acc.is_nvlink_connected(0, 1)
        False
    """
    result = discovery_cache.current()
    index, peer_index = index_in(result, device), index_in(result, peer_device)
    if result.count == 0:
        return None
    if index == peer_index:
        return True
    gpu, peer = result.devices[index].gpu, result.devices[peer_index].gpu
    if result.backend is None or gpu is None or peer is None:
        return None
    try:
        return result.backend.is_linked(gpu.handle, peer.handle)
    except (NotSupported, Failed):
        return None


def numa_node(device: Device = None) -> int | None:
    """Return the host's NUMA node nearest to a device, to bind processes and memory to it.

    Args:
        device: an index, "cuda:1", a ``torch.device``, or None for the current device.

    Returns:
        The node's number; None if several are equally near, if unknown, and without an accelerator.

    Example:
        >>> acc.numa_node(1)
        0
    """
    result, index = resolve_device(device)
    if result.count == 0:
        return None
    gpu = result.devices[index]._replace(instance=None)
    try:
        node: int | None = description.read(gpu, result.backend, "numa_node")
    except (NotSupported, Failed):
        return description.numa_node_of_bus(description.pci_bus_id(gpu, result.backend))
    return node


def driver_version() -> str | None:
    """Return the version of the installed NVIDIA driver.

    Returns:
        The version; None if NVML does not report it.

    Example:
        >>> acc.driver_version()
        '595.45.04'
    """
    try:
        return nvml.driver_version()
    except Failed:
        return None


def driver_cuda_version() -> tuple[int, int] | None:
    """Return the newest CUDA version that the installed driver supports.

    Returns:
        Major and minor; from the driver, in a child process, if NVML does not report it; None without a driver.

    Example:
        >>> acc.driver_cuda_version()
        (13, 2)
    """
    return cuda.driver_cuda_version(visibility_variables.as_mapping(visibility_variables.snapshot()))
