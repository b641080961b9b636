"""The CUDA driver in this process, looked at but never loaded and never started."""

from __future__ import annotations

import ctypes
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing would cost more than all of this file
    from typing import Any

NAME = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"

NO_DEVICE = 100

_library: Any = None
_count = ctypes.c_int()
_count_pointer = ctypes.byref(_count)


if sys.platform == "linux":
    # dlopen(RTLD_NOLOAD) searches the file system when the library is not loaded, which costs far more than asking the
    # loader how many libraries it has ever added: only a change of that number makes another look worth while.
    # Both calls are too short for releasing the GIL to pay, hence the Py variants of the ctypes loaders.
    _ADDED_OFFSET = 4 * ctypes.sizeof(ctypes.c_void_p)
    _added = 0
    _added_at_last_look = -1

    def _read_added(info: int, size: int, data: int | None) -> int:
        global _added
        _added = ctypes.c_ulonglong.from_address(info + _ADDED_OFFSET).value
        return 1

    _visit = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)(_read_added)
    _iterate = ctypes.PyDLL(None).dl_iterate_phdr

    def loaded() -> Any:
        """The driver library if something in this process loaded it, else None."""
        global _library, _added_at_last_look
        if _library is None:
            _iterate(_visit, None)
            if _added != _added_at_last_look:
                _added_at_last_look = _added
                try:
                    _library = ctypes.PyDLL(NAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
                except OSError:
                    pass
        return _library

else:

    def loaded() -> Any:
        """The driver library if something in this process loaded it, else None: never known on this platform."""
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


def is_installed() -> bool:
    """Whether a driver library can be expected to load, judged by the files there are; loads nothing."""
    if sys.platform != "linux":
        return sys.platform == "win32"
    if _library is not None:
        return True
    folders = (*os.environ.get("LD_LIBRARY_PATH", "").split(":"), "/usr/lib", "/usr/lib64", "/lib", "/lib64")
    if any(os.path.exists(os.path.join(folder, NAME)) for folder in folders if folder):
        return True
    try:
        with open("/etc/ld.so.cache", "rb") as cache:
            return NAME.encode() in cache.read()
    except OSError:
        return False
