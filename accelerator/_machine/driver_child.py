"""What a driver reports about its devices.

As a module it reads the CUDA driver that is already initialized in this process. As a program, in a child process of its own,
it initializes CUDA's or ROCm's driver. The child runs the source of this file, which imports nothing of this package, so it
does not matter how the package is installed.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any, NamedTuple

NO_DEVICE = 100  # in CUDA and in HIP

_COMPUTE_CAPABILITY_MAJOR = 75
_COMPUTE_CAPABILITY_MINOR = 76
_INTEGRATED = 18


class DriverDevice(NamedTuple):
    """What the driver reports about one device; None if unknown. The UUID has no ``GPU-`` or ``MIG-`` prefix.

    Only the name is known for accelerators other than CUDA's and ROCm's. ``integrated``: whether it shares the host's memory.
    """

    uuid: str | None
    name: str
    pci_bus_id: str | None
    compute_capability: tuple[int, int] | None
    total_memory: int | None
    integrated: bool | None = None


class DriverError(RuntimeError):
    """A driver call failed."""


def version(library: Any) -> tuple[int, int]:
    """The newest CUDA version that the driver supports; needs no initialization."""
    encoded = ctypes.c_int()
    _call(library, "cuDriverGetVersion", ctypes.byref(encoded))
    return encoded.value // 1000, encoded.value % 1000 // 10


def devices(library: Any, count: int) -> tuple[DriverDevice, ...]:
    """Describe the first ``count`` devices of an initialized driver; creates no context."""
    return tuple(_describe(library, ordinal) for ordinal in range(count))


def _describe(library: Any, ordinal: int) -> DriverDevice:
    handle, memory = ctypes.c_int(), ctypes.c_size_t()
    uuid, name, bus = (ctypes.c_ubyte * 16)(), ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
    # For a MIG instance, the first version returns the UUID of the whole GPU.
    get_uuid = "cuDeviceGetUuid_v2" if hasattr(library, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    library.cuDeviceGet(ctypes.byref(handle), ordinal)
    has_uuid = library[get_uuid](ctypes.byref(uuid), handle) == 0
    has_name = library.cuDeviceGetName(name, len(name), handle) == 0
    has_bus = library.cuDeviceGetPCIBusId(bus, len(bus), handle) == 0
    has_memory = library.cuDeviceTotalMem_v2(ctypes.byref(memory), handle) == 0
    major, minor, integrated = (
        _attribute(library, which, handle) for which in (_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR, _INTEGRATED)
    )
    digits = bytes(uuid).hex()
    return DriverDevice(
        uuid="-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])) if has_uuid else None,
        name=name.value.decode(errors="replace") if has_name else "cuda",
        pci_bus_id=bus.value.decode(errors="replace") if has_bus else None,
        compute_capability=None if major is None or minor is None else (major, minor),
        total_memory=memory.value if has_memory else None,
        integrated=None if integrated is None else bool(integrated),
    )


def _attribute(library: Any, which: int, handle: Any) -> int | None:
    value = ctypes.c_int()
    return value.value if library.cuDeviceGetAttribute(ctypes.byref(value), which, handle) == 0 else None


def main(mode: str, library_name: str, prefix: str, mark: str) -> None:
    """Initialize the driver; print its error, version, devices and, for each device, why it is unusable, between two marks.

    Args:
        mode: "use" to create a context on each device, else "list".
        library_name: the driver library.
        prefix: the prefix of its functions, "cu" or "hip".
        mark: a line that nothing else prints.
    """
    error: str | None = None
    supported: tuple[int, int] | None = None
    described: tuple[DriverDevice, ...] = ()
    unusable: list[str | None] = []
    is_hip = prefix == "hip"
    driver_name = "ROCm runtime" if is_hip else "CUDA driver"
    try:
        library = ctypes.CDLL(library_name)
        if not is_hip:
            supported = version(library)
        count = _start(library, prefix)
        described = tuple(_describe_hip(library, i) for i in range(count)) if is_hip else devices(library, count)
        if mode == "use":
            unusable = [(_use_hip if is_hip else _use)(library, ordinal) for ordinal in range(count)]
    except (DriverError, AttributeError) as failure:  # AttributeError: the library lacks the function
        error = f"the {driver_name} failed: {failure}"
    except OSError as failure:
        error = f"there is no {driver_name}: {failure}"
    message = f"\n{mark}\n{json.dumps([error, supported, described, unusable])}\n{mark}\n".encode("ascii")
    # Written without Python's and C's buffers, so that no other output appears between the marks.
    sys.stdout.flush()
    while message:
        message = message[os.write(1, message) :]


def _start(library: Any, prefix: str) -> int:
    count = ctypes.c_int()
    code = library[f"{prefix}Init"](0)
    if code == NO_DEVICE:
        return 0
    _check(library, f"{prefix}Init", code)
    get_count = "cuDeviceGetCount" if prefix == "cu" else "hipGetDeviceCount"
    code = library[get_count](ctypes.byref(count))
    if code != NO_DEVICE:
        _check(library, get_count, code)
    return count.value


def _use(library: Any, ordinal: int) -> str | None:
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    try:
        _call(library, "cuDeviceGet", ctypes.byref(handle), ordinal)
        _call(library, "cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        _call(library, "cuDevicePrimaryCtxRelease_v2", handle)
    except DriverError as error:
        return str(error)
    return None


def _describe_hip(library: Any, ordinal: int) -> DriverDevice:
    memory, uuid = ctypes.c_size_t(), (ctypes.c_char * 16)()
    name, bus = ctypes.create_string_buffer(256), ctypes.create_string_buffer(32)
    has_uuid = library.hipDeviceGetUuid(ctypes.byref(uuid), ordinal) == 0
    has_name = library.hipDeviceGetName(name, len(name), ordinal) == 0
    has_bus = library.hipDeviceGetPCIBusId(bus, len(bus), ordinal) == 0
    has_memory = library.hipDeviceTotalMem(ctypes.byref(memory), ordinal) == 0
    return DriverDevice(
        # These bytes are the sixteen characters that HIP_VISIBLE_DEVICES takes.
        uuid=uuid.value.decode(errors="replace").lower() if has_uuid else None,
        name=name.value.decode(errors="replace") if has_name else "cuda",
        pci_bus_id=bus.value.decode(errors="replace") if has_bus else None,
        compute_capability=None,
        total_memory=memory.value if has_memory else None,
    )


def _use_hip(library: Any, ordinal: int) -> str | None:
    try:
        _call(library, "hipSetDevice", ordinal)
        _call(library, "hipFree", None)  # frees nothing; creates the context
    except DriverError as error:
        return str(error)
    return None


def _call(library: Any, function: str, *arguments: Any) -> None:
    _check(library, function, library[function](*arguments))


def _check(library: Any, function: str, code: int) -> None:
    if code:
        raise DriverError(f"{function} returned {_error_name(library, function, code)} ({code})")


def _error_name(library: Any, function: str, code: int) -> str:
    text = ctypes.c_char_p()
    if function.startswith("hip"):
        get_name = library.hipGetErrorName
        get_name.restype = ctypes.c_char_p
        text.value = get_name(code)
    else:
        library.cuGetErrorName(code, ctypes.byref(text))
    return (text.value or b"an unknown error").decode(errors="replace")


if __name__ == "__main__":
    main(*sys.argv[1:])
