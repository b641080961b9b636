"""What the CUDA driver itself says: of a driver that is up in this process, or through a child process that starts one.

Only the child, which exists for nothing else, ever calls ``cuInit``.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from accelerator import _driver

DEADLINE_S = 60.0

_COMPUTE_CAPABILITY_MAJOR = 75
_COMPUTE_CAPABILITY_MINOR = 76


class Device(NamedTuple):
    """What the driver says of one device; the UUID has no ``GPU-`` or ``MIG-`` prefix.

    For accelerators other than CUDA's only the name is known.
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
        version: the newest CUDA version that the driver supports, None without a driver.
        devices: what it enumerates, in its order.
        unusable: for each device the error of creating a context on it, or None; empty unless asked for.
    """

    error: str | None
    version: tuple[int, int] | None
    devices: tuple[Device, ...]
    unusable: tuple[str | None, ...]


class DriverError(RuntimeError):
    """A driver call failed."""


def ask(environment: Mapping[str, str | None], *, use: bool = False) -> Answer:
    """Ask the driver in a child process.

    Args:
        environment: variables to set in the child, or with None to remove, beside those of this process.
        use: also create a context on each device.

    Returns:
        The child's answer; a child that crashes or misses the deadline is an answer with an error.
    """
    import subprocess

    variables = {**os.environ, **environment}
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    program = "import sys; sys.path.append(sys.argv[1]); from accelerator import _probe; _probe.main(sys.argv[2])"
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-c", program, root, "use" if use else "list"],
            env={name: value for name, value in variables.items() if value is not None},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        return _failed(f"the CUDA driver did not answer a child process within {DEADLINE_S:g} s")
    except OSError as error:
        return _failed(f"no child process could be started to ask the CUDA driver ({error})")
    try:
        problem, version, devices, unusable = json.loads(child.stdout)
    except ValueError:
        last_line = child.stderr.strip().rpartition("\n")[2]
        return _failed(f"the child process that asked the CUDA driver ended with status {child.returncode} ({last_line})")
    return Answer(
        problem,
        (version[0], version[1]) if version else None,
        tuple(Device(uuid, name, bus, (major, minor), memory) for uuid, name, bus, (major, minor), memory in devices),
        tuple(unusable),
    )


def _failed(error: str) -> Answer:
    return Answer(error, None, (), ())


def main(what: str) -> None:
    """Be the child: start the driver and print an ``Answer`` as JSON."""
    error: str | None = None
    supported: tuple[int, int] | None = None
    found: tuple[Device, ...] = ()
    unusable: list[str | None] = []
    try:
        library = ctypes.CDLL(_driver.NAME)
        supported = version(library)
        count = _start(library)
        found = devices(library, count)
        if what == "use":
            unusable = [_use(library, ordinal) for ordinal in range(count)]
    except DriverError as failure:
        error = f"the CUDA driver failed: {failure}"
    except OSError as failure:
        error = f"there is no CUDA driver: {failure}"
    print(json.dumps(Answer(error, supported, found, tuple(unusable))))


def _start(library: Any) -> int:
    count = ctypes.c_int()
    if library.cuInit(0) == _driver.NO_DEVICE:
        return 0
    _call(library, "cuInit", 0)
    _call(library, "cuDeviceGetCount", ctypes.byref(count))
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
    _call(library, "cuDeviceGet", ctypes.byref(handle), ordinal)
    _call(library, get_uuid, ctypes.byref(uuid), handle)
    _call(library, "cuDeviceGetName", name, len(name), handle)
    _call(library, "cuDeviceGetPCIBusId", bus, len(bus), handle)
    _call(library, "cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
    _call(library, "cuDeviceGetAttribute", ctypes.byref(major), _COMPUTE_CAPABILITY_MAJOR, handle)
    _call(library, "cuDeviceGetAttribute", ctypes.byref(minor), _COMPUTE_CAPABILITY_MINOR, handle)
    digits = bytes(uuid).hex()
    return Device(
        uuid="-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])),
        name=name.value.decode(errors="replace"),
        pci_bus_id=bus.value.decode(),
        compute_capability=(major.value, minor.value),
        total_memory=memory.value,
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


def _call(library: Any, function: str, *arguments: Any) -> None:
    code = getattr(library, function)(*arguments)
    if code:
        text = ctypes.c_char_p()
        library.cuGetErrorName(code, ctypes.byref(text))
        raise DriverError(f"{function} answered {(text.value or b'an unknown error').decode()} ({code})")
