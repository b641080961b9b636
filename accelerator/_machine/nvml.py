"""The NVML session of this process: initialized once, never shut down, begun anew after a fork."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from .grammar import Instance

# A daemon may start before the driver does, so a failed start is not remembered for ever.
RETRY_AFTER_S = 1.0

LIBRARY_NOT_FOUND = 12

_HINTS = {
    4: "this user may not use the NVIDIA driver",
    9: "the kernel's NVIDIA driver is not loaded",
    LIBRARY_NOT_FOUND: "no NVIDIA driver is installed, or the container was started without it",
    18: "the kernel's NVIDIA driver and its libraries differ, as after an upgrade; reboot or reload the driver",
    999: "the driver gave no reason; in a container its device files may be gone, and a restart of it helps",
}


class Unavailable(RuntimeError):
    """NVML cannot answer; the message says why, ``code`` is NVML's own."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Gpu(NamedTuple):
    """A physical GPU as NVML lists it, in PCI bus order; ``instances`` is None while MIG is off."""

    physical_index: int
    handle: Any
    uuid: str | None
    name: str | None
    instances: tuple[Instance, ...] | None


_lock = threading.RLock()
_binding: Any = None
_failure: tuple[float, Unavailable] | None = None
_gpus: tuple[Gpu, ...] | None = None


def session() -> Any:
    """The ``pynvml`` module with NVML initialized.

    Raises:
        Unavailable: if NVML is missing or does not start.
    """
    global _binding, _failure
    if _binding is None:
        with _lock:
            if _failure is not None:
                if time.monotonic() < _failure[0]:
                    raise _failure[1]
                _failure = None
            if _binding is None:
                try:
                    _binding = _start()
                except Unavailable as error:
                    _failure = time.monotonic() + RETRY_AFTER_S, error
                    raise
    return _binding


def is_up() -> bool:
    """Whether NVML is initialized in this process by us."""
    return _binding is not None


def _start() -> Any:
    try:
        import pynvml
    except ImportError as error:
        raise Unavailable(f"the package nvidia-ml-py is missing ({error})", LIBRARY_NOT_FOUND) from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise unavailable("nvmlInit", error) from error
    return pynvml


def unavailable(function: str, error: Any) -> Unavailable:
    """An NVML error as a sentence: what it usually means, the function, the error's name and number."""
    code: int = error.value
    answer = f"NVML's {function} answered {error_name(error)}, {code}"
    return Unavailable(f"{_HINTS[code]} ({answer})" if code in _HINTS else answer, code)


def error_name(error: Any) -> str:
    """NVML's own name of an error, such as NVML_ERROR_NOT_SUPPORTED."""
    import pynvml

    code: int = error.value
    names = (name for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_") and value == code)
    return next(names, "an unknown error")


def gpus() -> tuple[Gpu, ...]:
    """All physical GPUs, with their MIG instances, in PCI bus order.

    Raises:
        Unavailable: if NVML is missing, does not start, or cannot list them.
    """
    global _gpus
    if _gpus is None:
        with _lock:
            nvml = session()
            try:
                count = nvml.nvmlDeviceGetCount()
            except nvml.NVMLError as error:
                raise unavailable("nvmlDeviceGetCount", error) from error
            _gpus = tuple(_gpu(nvml, index) for index in range(count))
    return _gpus


def forget() -> None:
    """Drop the list of GPUs, so that the next question reads it again."""
    global _gpus, _failure
    _gpus = _failure = None


def _gpu(nvml: Any, index: int) -> Gpu:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        instances = _instances(nvml, handle)
    except nvml.NVMLError as error:
        raise unavailable(f"list of devices, at device {index},", error) from error
    return Gpu(index, handle, ask(nvml.nvmlDeviceGetUUID, handle), ask(nvml.nvmlDeviceGetName, handle), instances)


def _instances(nvml: Any, handle: Any) -> tuple[Instance, ...] | None:
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
    except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound):
        return None
    if current != nvml.NVML_DEVICE_MIG_ENABLE:
        return None
    found: list[Instance] = []
    for slot in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
        except nvml.NVMLError_NotFound:  # slots may be empty between full ones
            continue
        uuid = text(nvml.nvmlDeviceGetUUID(instance))
        gi, ci = nvml.nvmlDeviceGetGpuInstanceId(instance), nvml.nvmlDeviceGetComputeInstanceId(instance)
        found.append(Instance(uuid, gi, ci, instance))
    return tuple(found)


def ask(function: Callable[[Any], Any], handle: Any) -> Any:
    """What NVML answers about a device, texts as str, or None if it does not answer."""
    nvml = session()
    try:
        value = function(handle)
    except nvml.NVMLError:
        return None
    return text(value) if isinstance(value, bytes) else value


def text(value: str | bytes) -> str:
    """Text from NVML as str: older bindings give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def restart() -> None:
    """Start NVML anew, after somebody in this process shut it down more often than started it."""
    global _binding
    forget()
    _binding = None


def temperature(nvml: Any, handle: Any) -> int:
    """Degrees Celsius."""
    try:
        celsius: int = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
    except nvml.NVMLError_FunctionNotFound:  # the turn of its successor, which the binding makes slow
        celsius = nvml.nvmlDeviceGetTemperatureV(handle, nvml.NVML_TEMPERATURE_GPU)
    return celsius


def memory_info(nvml: Any, handle: Any) -> Any:
    """What is used and free, without the driver's reserve where possible; None if the device has no memory of its own."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except (AttributeError, TypeError, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_ArgumentVersionMismatch):
        pass  # an older binding or driver
    except nvml.NVMLError_NotSupported:
        return None
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError_NotSupported:
        return None


def processes(nvml: Any, handle: Any) -> list[tuple[int, str | None, int | None]]:
    """Id, name and bytes of each process with a context on a device."""
    try:
        # Not by the plain name, behind which the binding hides an older driver's answer in an error of another kind.
        found = nvml.nvmlDeviceGetComputeRunningProcesses_v3(handle)
    except (AttributeError, nvml.NVMLError_FunctionNotFound):  # an older binding or driver
        found = nvml.nvmlDeviceGetComputeRunningProcesses_v2(handle)
    return [(entry.pid, _process_name(nvml, entry.pid), entry.usedGpuMemory) for entry in found]


def _process_name(nvml: Any, pid: int) -> str | None:
    try:
        return text(nvml.nvmlSystemGetProcessName(pid))
    except nvml.NVMLError:  # gone meanwhile, or of another namespace
        return None


_cuda_version: tuple[int, int] | None = None


def cuda_version() -> tuple[int, int]:
    """The newest CUDA version that the installed driver supports, without loading or starting it for good.

    Raises:
        Unavailable: if NVML cannot tell; with the code of a missing library where NVML is there but the driver library is not.
    """
    global _cuda_version
    if _cuda_version is None:
        nvml = session()
        try:
            number: int = nvml.nvmlSystemGetCudaDriverVersion_v2()
        except nvml.NVMLError_FunctionNotFound:
            number = nvml.nvmlSystemGetCudaDriverVersion()
        except nvml.NVMLError as error:
            raise unavailable("nvmlSystemGetCudaDriverVersion", error) from error
        _cuda_version = number // 1000, number % 1000 // 10
    return _cuda_version


def driver_version() -> str:
    """The driver's version text.

    Raises:
        Unavailable: if NVML cannot tell.
    """
    nvml = session()
    try:
        return text(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError as error:
        raise unavailable("nvmlSystemGetDriverVersion", error) from error


def _begin_anew() -> None:
    """In a forked child: NVML's own state does not survive a fork, and neither lock may stay held by a thread that is gone."""
    global _lock, _binding, _failure, _gpus
    binding = sys.modules.get("pynvml")
    if binding is not None:
        binding.libLoadLock = threading.Lock()  # type: ignore[attr-defined]
    _lock, _binding, _failure, _gpus = threading.RLock(), None, None, None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
