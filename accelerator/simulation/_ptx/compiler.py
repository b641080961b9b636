"""Compiles the C that ``translate.py`` made of a kernel, into a cache that processes share.

The simulated libraries know where in the cache a kernel belongs, by the content of its image. They look there first, and start
this package only for a kernel that is missing. Long kernels are compiled with ``-O1``.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import shutil
import struct
import subprocess
import tempfile
import time
import zlib
from collections.abc import Generator, Sequence
from pathlib import Path

from .errors import Refused

CACHE_SIZE = 1 << 30
"""Bytes of compiled kernels that a cache may have."""
_ABANDONED_AFTER_S = 3600
"""Seconds after which a folder of a build is that of a killed process."""

HEADERS = Path(__file__).parents[1] / "native" / "ptx"
FLAGS = (
    *("-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w", "-mcx16"),
    # PTX's integers wrap around, its memory has no types, and it says which operations are fused.
    *("-fwrapv", "-fno-strict-aliasing", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    "-fno-delete-null-pointer-checks",
    *("-Wl,-z,defs", "-Wl,--hash-style=gnu", "-Wl,-z,noseparate-code", "-s"),
)
_FEATURES = {
    "fma": "-mfma",
    "avx2": "-mavx2",
    "f16c": "-mf16c",
    "bmi1": "-mbmi",
    "bmi2": "-mbmi2",
    "popcnt": "-mpopcnt",
    "abm": "-mlzcnt",
    "sse4_1": "-msse4.1",
}
_LONG_SOURCE = 150_000
"""Characters, above which gcc's second level of optimization takes over a second: its time grows faster than the length."""


def compiler_command() -> list[str]:
    """Find the C compiler: $CC, with its arguments, otherwise cc, gcc or clang.

    Raises:
        Refused: There is none.
    """
    configured = shlex.split(os.environ.get("CC", ""))
    for command in [configured] if configured else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]) is not None:
            return command
    raise Refused("no C compiler was found; install one or set CC")


def processor_flags() -> list[str]:
    """Return the flags for what this machine's processor has, of what matters to kernels."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("flags"):
                present = set(line.split())
                return [flag for feature, flag in _FEATURES.items() if feature in present]
    return []


def build(source: str, target: Path, *, headers: Path = HEADERS, flags: Sequence[str] = ()) -> None:
    """Compile a kernel and put it into its place, whole or not at all.

    Args:
        source: The C of the kernel.
        target: The path of the library.
        headers: The folder of what the C includes.
        flags: More flags of the compiler.

    Raises:
        Refused: There is no compiler, or it fails.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        raise Refused("kernels run on x86-64 only")
    with tempfile.TemporaryDirectory(prefix=".building-", dir=target.parent) as scratch:
        path, output = Path(scratch, "kernel.c"), Path(scratch, "kernel.so")
        path.write_text(source, encoding="utf-8")
        level = ["-O1"] if len(source) > _LONG_SOURCE else []
        command = [*compiler_command(), *FLAGS, *level, *processor_flags(), *flags, "-I", str(headers)]
        command += ["-I", str(headers.parent), "-o", str(output), str(path), "-lm"]
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or [""]
            raise Refused(f"the C compiler {command[0]} failed: {errors[0].strip()}")
        code = output.read_bytes()
        output.write_bytes(code + b"SIMK" + struct.pack("<I", zlib.crc32(code)))  # native/runtime/translation.c checks it
        output.chmod(0o644)
        output.rename(target)
    limit_cache(target.parent)


def limit_cache(folder: Path) -> None:
    """Remove the kernels that were used longest ago from a cache that is too large, and what killed processes have left.

    Loading a kernel sets its file's time. Processes that have loaded a removed one keep it.
    """
    kernels: list[tuple[float, int, Path]] = []
    size, oldest = 0, time.time() - _ABANDONED_AFTER_S
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process removes it too
            status = path.stat()
            if path.suffix == ".so":
                kernels.append((status.st_mtime, status.st_size, path))
                size += status.st_size
            elif path.name.startswith(".building-") and status.st_mtime < oldest:
                shutil.rmtree(path, ignore_errors=True)
    for _, length, path in sorted(kernels):
        if size <= CACHE_SIZE:
            break
        path.unlink(missing_ok=True)
        size -= length


@contextlib.contextmanager
def lock(target: Path) -> Generator[None, None, None]:
    """Let one process at a time build a file. The lock is a file beside it, which is removed at the end."""
    import fcntl  # imported late: Windows has none, and this module must be importable there

    path = target.with_suffix(".lock")
    try:
        opened = path.open("a")
    except (IsADirectoryError, PermissionError):  # nothing of ours
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        opened = path.open("a")
    with opened as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
