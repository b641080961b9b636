"""What the driver itself says: of CUDA's that is up in this process, or through a child process that starts one.

Only the child, which exists for nothing else, ever calls ``cuInit`` or ``hipInit``.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from . import driver

DEADLINE_S = 60.0

_COMPUTE_CAPABILITY_MAJOR = 75
_COMPUTE_CAPABILITY_MINOR = 76


class Device(NamedTuple):
    """What the driver says of one device; None for what it does not. The UUID has no ``GPU-`` or ``MIG-`` prefix.

    For accelerators other than CUDA's and ROCm's only the name is known.
    """

    uuid: str | None
    name: str
    pci_bus_id: str | None
    compute_capability: tuple[int, int] | None
    total_memory: int | None


class Answer(NamedTuple):
    """What a child process found out.

    Attributes:
        error: why the driver could not be started there, or None.
        version: the newest CUDA version that the driver supports, None without a driver, and for ROCm.
        devices: what it enumerates, in its order.
        unusable: for each device the error of creating a context on it, or None; empty unless asked for.
    """

    error: str | None
    version: tuple[int, int] | None
    devices: tuple[Device, ...]
    unusable: tuple[str | None, ...]


class DriverError(RuntimeError):
    """A driver call failed."""


def ask(environment: Mapping[str, str | None], *, use: bool = False, hip: str | None = None) -> Answer:
    """Ask the driver in a child process.

    Args:
        environment: variables to set in the child, or with None to remove, beside those of this process.
        use: also create a context on each device.
        hip: the ROCm runtime's library, to ask it in place of CUDA's driver.

    Returns:
        The child's answer; a child that crashes or misses the deadline is an answer with an error.
    """
    import subprocess

    whom = "the ROCm runtime" if hip else "the CUDA driver"
    # The executable of a frozen program is that program: starting it again would ask again, without an end.
    if not sys.executable or getattr(sys, "frozen", False):
        return _failed(f"{whom} can only be asked in a child process, and there is no Python executable to start one")
    variables = {**os.environ, **environment}
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    program = "import sys; sys.path.append(sys.argv[1]); from accelerator._machine import probe; probe.main(*sys.argv[2:])"
    try:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program, root, "use" if use else "list", hip or ""],
            env={name: value for name, value in variables.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    except OSError as error:
        return _failed(f"no child process could be started to ask {whom} ({error})")
    try:
        output, errors = child.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        # Not waited for: one that is stuck in the kernel does not die before the driver lets it.
        child.kill()
        return _failed(f"{whom} did not answer a child process within {DEADLINE_S:g} s")
    except BaseException:
        child.kill()
        raise
    try:
        problem, version, devices, unusable = json.loads(output)
    except ValueError:
        last_line = errors.strip().rpartition("\n")[2]
        return _failed(f"the child process that asked {whom} ended with status {child.returncode} ({last_line})")
    return Answer(problem, _pair(version), tuple(_device(*device) for device in devices), tuple(unusable))


def _device(uuid: str | None, name: str, bus: str | None, capability: list[int] | None, memory: int | None) -> Device:
    return Device(uuid, name, bus, _pair(capability), memory)


def _pair(numbers: list[int] | None) -> tuple[int, int] | None:
    return (numbers[0], numbers[1]) if numbers else None


def _failed(error: str) -> Answer:
    return Answer(error, None, (), ())


def main(what: str, hip: str) -> None:
    """Be the child: start the driver and print an ``Answer`` as JSON."""
    error: str | None = None
    supported: tuple[int, int] | None = None
    found: tuple[Device, ...] = ()
    unusable: list[str | None] = []
    whom = "ROCm runtime" if hip else "CUDA driver"
    try:
        library = ctypes.CDLL(hip or driver.NAME)
        if not hip:
            supported = version(library)
        count = _start(library, "hip" if hip else "cu")
        found = _hip_devices(library, count) if hip else devices(library, count)
        if what == "use":
            unusable = [(_use_hip if hip else _use)(library, ordinal) for ordinal in range(count)]
    except DriverError as failure:
        error = f"the {whom} failed: {failure}"
    except OSError as failure:
        error = f"there is no {whom}: {failure}"
    print(json.dumps(Answer(error, supported, found, tuple(unusable))))


def _start(library: Any, prefix: str) -> int:
    count = ctypes.c_int()
    code = library[f"{prefix}Init"](0)
    if code == driver.NO_DEVICE:  # the number is the same in CUDA and in HIP
        return 0
    _check(library, f"{prefix}Init", code)
    get_count = "cuDeviceGetCount" if prefix == "cu" else "hipGetDeviceCount"
    code = library[get_count](ctypes.byref(count))
    if code != driver.NO_DEVICE:
        _check(library, get_count, code)
    return count.value


def version(library: Any) -> tuple[int, int]:
    """The newest CUDA version that the driver supports; needs no initialization."""
    number = ctypes.c_int()
    _call(library, "cuDriverGetVersion", ctypes.byref(number))
    return number.value // 1000, number.value % 1000 // 10


def devices(library: Any, count: int) -> tuple[Device, ...]:
    """Describe the first ``count`` devices of an initialized driver, without creating a context."""
    return tuple(_describe(library, ordinal) for ordinal in range(count))


def _describe(library: Any, ordinal: int) -> Device:
    handle, memory, major, minor = ctypes.c_int(), ctypes.c_size_t(), ctypes.c_int(), ctypes.c_int()
    uuid, name, bus = (ctypes.c_ubyte * 16)(), ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
    # The first version answers for a MIG instance with the UUID of its whole GPU.
    get_uuid = "cuDeviceGetUuid_v2" if hasattr(library, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    library.cuDeviceGet(ctypes.byref(handle), ordinal)
    has_uuid = library[get_uuid](ctypes.byref(uuid), handle) == 0
    has_name = library.cuDeviceGetName(name, len(name), handle) == 0
    has_bus = library.cuDeviceGetPCIBusId(bus, len(bus), handle) == 0
    has_memory = library.cuDeviceTotalMem_v2(ctypes.byref(memory), handle) == 0
    has_major = library.cuDeviceGetAttribute(ctypes.byref(major), _COMPUTE_CAPABILITY_MAJOR, handle) == 0
    has_minor = library.cuDeviceGetAttribute(ctypes.byref(minor), _COMPUTE_CAPABILITY_MINOR, handle) == 0
    digits = bytes(uuid).hex()
    return Device(
        uuid="-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])) if has_uuid else None,
        name=name.value.decode(errors="replace") if has_name else "cuda",
        pci_bus_id=bus.value.decode() if has_bus else None,
        compute_capability=(major.value, minor.value) if has_major and has_minor else None,
        total_memory=memory.value if has_memory else None,
    )


def _use(library: Any, ordinal: int) -> str | None:
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    try:
        _call(library, "cuDeviceGet", ctypes.byref(handle), ordinal)
        _call(library, "cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        _call(library, "cuDevicePrimaryCtxRelease_v2", handle)
    except DriverError as error:
        return str(error)
    return None


def _hip_devices(library: Any, count: int) -> tuple[Device, ...]:
    return tuple(_describe_hip(library, ordinal) for ordinal in range(count))


def _describe_hip(library: Any, ordinal: int) -> Device:
    memory, uuid = ctypes.c_size_t(), (ctypes.c_char * 16)()
    name, bus = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
    has_uuid = library.hipDeviceGetUuid(ctypes.byref(uuid), ordinal) == 0
    has_name = library.hipDeviceGetName(name, len(name), ordinal) == 0
    has_bus = library.hipDeviceGetPCIBusId(bus, len(bus), ordinal) == 0
    has_memory = library.hipDeviceTotalMem(ctypes.byref(memory), ordinal) == 0
    return Device(
        # Not sixteen numbers but the sixteen digits that HIP_VISIBLE_DEVICES takes.
        uuid=uuid.value.decode(errors="replace").lower() if has_uuid else None,
        name=name.value.decode(errors="replace") if has_name else "cuda",
        pci_bus_id=bus.value.decode() if has_bus else None,
        compute_capability=None,
        total_memory=memory.value if has_memory else None,
    )


def _use_hip(library: Any, ordinal: int) -> str | None:
    try:
        _call(library, "hipSetDevice", ordinal)
        _call(library, "hipFree", None)  # frees nothing, but not before there is a context
    except DriverError as error:
        return str(error)
    return None


def _call(library: Any, function: str, *arguments: Any) -> None:
    _check(library, function, library[function](*arguments))


def _check(library: Any, function: str, code: int) -> None:
    if code:
        raise DriverError(f"{function} answered {_error_name(library, function, code)} ({code})")


def _error_name(library: Any, function: str, code: int) -> str:
    text = ctypes.c_char_p()
    if function.startswith("hip"):
        get_name = library.hipGetErrorName
        get_name.restype = ctypes.c_char_p
        text.value = get_name(code)
    else:
        library.cuGetErrorName(code, ctypes.byref(text))
    return (text.value or b"an unknown error").decode()
