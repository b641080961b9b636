"""The CUDA driver in this process; it is never loaded and never initialized here."""

from __future__ import annotations

import ctypes
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing takes longer than all of this module
    from typing import Any

NAME = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

NO_DEVICE = 100

_library: Any = None
_count = ctypes.c_int()
_count_pointer = ctypes.byref(_count)


if sys.platform == "linux":
    # dlopen(RTLD_NOLOAD) searches the file system if the library is not loaded, which is slow. dl_iterate_phdr is fast: its
    # counters of loaded and unloaded libraries show whether a search could have another result. It calls back under the
    # loader's lock. Python code there would let other threads run, and one that loads a library or forks could then wait for
    # that lock forever. So the callback is a C function that hashes the counters. PyDLL keeps the GIL: the calls are short.
    _hash: Any = getattr(ctypes.pythonapi, "Py_HashBuffer", None) or getattr(ctypes.pythonapi, "_Py_HashBytes", None)
    _iterate: Any = ctypes.PyDLL(None).dl_iterate_phdr
    _last_hash: int | None = None

    def loaded() -> Any:
        """The driver library if something in this process loaded it, else None."""
        global _library, _last_hash
        if _library is None:
            now: int | None = _iterate(_hash, None) if _hash else None
            if now is None or now != _last_hash:
                try:
                    _library = ctypes.PyDLL(NAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
                except OSError:
                    _last_hash = now
        return _library

else:

    def loaded() -> Any:
        """None: unknown on this platform."""
        return None


def device_count() -> int | None:
    """How many devices the initialized driver enumerates in this process; None while it is not initialized."""
    library = _library or loaded()
    if library is None:
        return None
    code = library.cuDeviceGetCount(_count_pointer)
    if code == 0:
        return _count.value
    return 0 if code == NO_DEVICE else None


def has_context(ordinal: int) -> bool | None:
    """Whether this process has a primary context on a device of the initialized driver, None if unknown; creates none."""
    library = loaded()
    handle, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    if library is None or library.cuDeviceGet(ctypes.byref(handle), ordinal):
        return None
    code: int = library.cuDevicePrimaryCtxGetState(handle, ctypes.byref(flags), ctypes.byref(active))
    return bool(active.value) if code == 0 else None


def is_installed() -> bool:
    """Whether a driver library would probably load, by the files on this machine; loads nothing."""
    if sys.platform != "linux":
        return sys.platform == "win32"
    if _library is not None:
        return True
    folders = (*os.environ.get("LD_LIBRARY_PATH", "").split(":"), "/usr/lib", "/usr/lib64", "/lib", "/lib64")
    paths = (os.path.join(folder, NAME) for folder in folders if folder)
    first = next((path for path in paths if os.path.exists(path)), None)
    if first:
        # The loader takes the first file. Container images built on a machine with a driver contain empty files of its names.
        return os.path.getsize(first) > 0
    try:
        with open("/etc/ld.so.cache", "rb") as cache:
            return NAME.encode() in cache.read()
    except OSError:
        return False
