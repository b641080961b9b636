"""Whether the visible devices can really be used: tried out in a child process."""

from __future__ import annotations

from . import driver, probe, rocm, torch_build
from .cuda import Seen

# The names that CUDA and HIP give to the errors of a device that works, but not for us.
_BUSY = ("out_of_memory", "outofmemory", "device_unavailable")


def problem(devices: tuple[Seen, ...]) -> str | None:
    """What a child process finds wrong when it creates a context on each of these devices, the visible ones; or None."""
    if torch_build.accelerator_type() != "cuda":
        return None
    is_rocm = torch_build.is_rocm()
    answer = probe.ask({} if is_rocm else _frozen(devices), use=True, hip=rocm.library() if is_rocm else None)
    if answer.error:
        return answer.error
    enumerated = {device.uuid for device in answer.devices}
    for device in devices:
        uuid = _uuid(device)
        if uuid and uuid.partition("-")[2] not in enumerated:
            name = device.gpu and device.gpu.name
            return f"{name} ({uuid}) cannot be used: {'amdsmi' if is_rocm else 'NVML'} lists it, and its driver does not"
    for index, error in enumerate(answer.unusable):
        if error:
            busy = any(word in error.lower() for word in _BUSY)
            state = "is busy, its memory is full or another process has it to itself" if busy else "is broken"
            return f"cuda:{index} ({answer.devices[index].name}) {state}: {error}"
    return None if answer.devices else "the driver enumerates no device in a child process"


def _frozen(devices: tuple[Seen, ...]) -> dict[str, str | None]:
    """The environment in which another process sees the devices that the driver of this one read once for all."""
    uuids = [_uuid(device) for device in devices]
    if driver.device_count() is None or None in uuids:
        return {}
    return {"CUDA_VISIBLE_DEVICES": ",".join(uuid for uuid in uuids if uuid)}


def _uuid(device: Seen) -> str | None:
    return device.instance.uuid if device.instance else device.gpu.uuid if device.gpu else None
