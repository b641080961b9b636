"""The host's memory, as far as this process may use it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

_MEMORY = "/proc/meminfo"
_PROCESS_GROUPS = "/proc/self/cgroup"
_GROUPS = "/sys/fs/cgroup"


def total() -> int:
    """The memory of the machine or of the container that limits this process, in bytes."""
    return min([_machine()[1], *(limit for limit, _ in _cgroups())])


def available() -> int:
    """The bytes that could be allocated without swapping."""
    return max(0, min([_machine()[0], *(limit - used for limit, used in _cgroups())]))


def _machine() -> tuple[int, int]:
    """Available and total bytes of the machine."""
    if sys.platform == "linux":
        with open(_MEMORY, encoding="ascii") as file:
            fields = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in file)}
        return fields["MemAvailable"], fields["MemTotal"]
    if sys.platform == "win32":
        return _windows()
    page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    return _free_pages_of_macos() * page, pages * page


def _free_pages_of_macos() -> int:
    import re
    import subprocess

    text = subprocess.run(["vm_stat"], capture_output=True, text=True, check=True).stdout
    pages: dict[str, str] = dict(re.findall(r"Pages (\w+):\s+(\d+)", text))
    return sum(int(pages.get(name, 0)) for name in ("free", "inactive", "speculative"))


def _windows() -> tuple[int, int]:
    import ctypes

    # MEMORYSTATUSEX: length and load, 32 bits each, then seven sizes of 64 bits. The first two are the total and the available
    # physical memory.
    status = (ctypes.c_uint64 * 8)()
    ctypes.cast(status, ctypes.POINTER(ctypes.c_uint32))[0] = ctypes.sizeof(status)
    kernel = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined,unused-ignore]
    if not kernel.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise OSError("GlobalMemoryStatusEx failed")
    return status[2], status[1]


def _cgroups() -> Iterator[tuple[int, int]]:
    """Limit and use in bytes of each control group that limits the memory of this process."""
    try:
        with open(_PROCESS_GROUPS, encoding="utf-8") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return
    for _, controllers, path in lines:
        if controllers == "":
            yield from _limits(_GROUPS, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _limits(
                f"{_GROUPS}/memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )


def _limits(root: str, path: str, limit: str, used: str, cache: str) -> Iterator[tuple[int, int]]:
    # Limits of ancestors apply too. If the path exists on the host only, the root that the container sees is its own group.
    while True:
        folder = root + path.rstrip("/")
        try:
            # The kernel evicts cached files on demand, as MemAvailable assumes too.
            in_use = int(_read(f"{folder}/{used}")) - _cached(_read(f"{folder}/memory.stat"), cache)
            yield int(_read(f"{folder}/{limit}")), in_use
        except (OSError, ValueError):  # the group does not exist here, or "max": no limit
            pass
        if path in ("", "/"):
            return
        path = os.path.dirname(path)


def _cached(statistics: str, name: str) -> int:
    return next((int(line.split()[1]) for line in statistics.splitlines() if line.startswith(f"{name} ")), 0)


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()
