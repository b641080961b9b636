"""Functions for the programs of tests: forked children, and the driver's own view of the devices.

Imports neither torch nor the package under test, because many programs test what importing these does.
"""

from __future__ import annotations

import ctypes
import json
import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any


def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a forked child, as JSON keeps it. If it raises, show the child's traceback."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with os.fdopen(writing, "w") as pipe:
                try:
                    text = json.dumps([function(*arguments), None])
                except BaseException:
                    text = json.dumps([None, traceback.format_exc()[-4000:]])
                pipe.write(text)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"status {status} of the child"
    value, failure = json.loads(text)
    assert failure is None, f"the child failed\n{failure}"
    return value


def put(values: Mapping[str, str | None]) -> None:
    """Set environment variables, and remove those whose value is None."""
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def started() -> tuple[ctypes.CDLL, int]:
    """Load and initialize the driver in this process, which breaks fork. Return it and its number of devices."""
    library, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    code = library.cuInit(0)
    assert code in (0, 100, 101), code  # no device, or none of CUDA_VISIBLE_DEVICES
    if code == 0:
        assert library.cuDeviceGetCount(ctypes.byref(count)) == 0
    return library, count.value


def uuids(library: ctypes.CDLL, count: int) -> list[str]:
    """Return the UUIDs of the driver's devices, as hexadecimal digits."""
    found: list[str] = []
    uuid, handle = (ctypes.c_ubyte * 16)(), ctypes.c_int()
    for ordinal in range(count):
        assert library.cuDeviceGet(ctypes.byref(handle), ordinal) == 0
        assert library.cuDeviceGetUuid_v2(ctypes.byref(uuid), handle) == 0
        found.append(bytes(uuid).hex())
    return found


def driver(**environment: str | None) -> list[str]:
    """Return the UUIDs that the driver enumerates in a child with these environment variables."""

    def enumerate_devices() -> list[str]:
        put(environment)
        return uuids(*started())

    listed: list[str] = in_child(enumerate_devices)
    return listed


def plain(uuid: str) -> str:
    """Return the hexadecimal digits of a UUID."""
    return uuid.partition("-")[2].replace("-", "")
