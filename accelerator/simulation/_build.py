"""Compiles the simulated libraries, once per version of their sources.

The wheel ships C and no binaries, so that it stays a pure Python wheel; the libraries are built with the
system compiler when a simulation is first asked for and kept in the user's cache directory, laid out so that the
driver and NVML can each be left off the library path:

    preload/libcudart.so.12  preload/libcudart.so.13  preload/libcupti.so.13  preload/libnccl.so.2
    preload/libaccelerator-exit.so
    driver/libcuda.so.1
    nvml/libnvidia-ml.so.1
    absent/driver/libcuda.so.1  absent/nvml/libnvidia-ml.so.1

The files under absent/ are empty. The loader finds them first, cannot load them and stops looking, which hides a
real driver of the machine when its absence is to be simulated.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ._values import CACHE_NAME

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["PRELOADED", "libraries"]

_NATIVE = Path(__file__).with_name("native")
_FLAGS = (
    *("-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"),
    *("-Wl,-Bsymbolic", "-Wl,-z,defs", "-Wl,--as-needed"),
)
_PLACEHOLDER = "@CUDART@"


class _Library(NamedTuple):
    """One shared library and what it is made of."""

    path: str
    sources: tuple[str, ...]
    version_script: str
    cudart: str = ""


_LIBRARIES = (
    _Library("preload/libcudart.so.12", ("runtime*.c",), "runtime.map.in", "12"),
    _Library("preload/libcudart.so.13", ("runtime*.c",), "runtime.map.in", "13"),
    _Library("driver/libcuda.so.1", ("driver*.c", "visible.c", "config.c", "state.c"), "driver.map"),
    _Library("nvml/libnvidia-ml.so.1", ("nvml*.c", "config.c", "state.c"), "nvml.map"),
    _Library("preload/libaccelerator-exit.so", ("exit.c",), "exit.map"),
    _Library("preload/libcupti.so.13", ("cupti.c",), "cupti.map"),
    _Library("preload/libnccl.so.2", ("nccl*.c",), "nccl.map"),
)
_ABSENT = ("absent/driver/libcuda.so.1", "absent/nvml/libnvidia-ml.so.1")
_FILES = (*(library.path for library in _LIBRARIES), *_ABSENT)

PRELOADED = tuple(library.path for library in _LIBRARIES if library.path.startswith("preload/"))
"""The libraries that must be in the process from the start: torch's RPATH would find the real ones."""


def libraries() -> Path:
    """Give the directory of the simulated libraries, compiling them if this version of them is not there yet.

    Safe with several processes at once: one compiles, the others wait for it, and a build appears as a whole.

    Returns:
        The directory, laid out as this module's docstring says.

    Raises:
        RuntimeError: This is not Linux on x86-64, there is no C compiler, the compiler failed (the message carries
            its output), or the cache directory cannot be used.

    Example:
        >>> from accelerator.simulation import _build
        >>> (_build.libraries() / "driver/libcuda.so.1").is_file()
        True
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64") or sys.maxsize < 2**32:
        raise RuntimeError(
            f"simulated GPUs need Linux on x86-64; this is {platform.system() or sys.platform} on"
            f" {platform.machine() or 'an unknown processor'}"
        )
    compiler = _compiler()
    directory = _cache_directory(compiler)
    if _is_complete(directory):
        return directory
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _lock(directory.with_name(".simulation.lock")):
            if not _is_complete(directory):
                _install(compiler, directory)
    except OSError as error:
        raise RuntimeError(
            f"cannot keep the simulated libraries in {directory.parent}: {error.strerror or error};"
            " set XDG_CACHE_HOME to a directory that can be written to"
        ) from error
    return directory


def _compiler() -> tuple[str, ...]:
    """Find the C compiler: $CC, which may carry arguments, else cc, gcc or clang."""
    asked = shlex.split(os.environ.get("CC", ""))
    for command in [asked] if asked else [["cc"], ["gcc"], ["clang"]]:
        program = shutil.which(command[0])
        if program is not None:
            return (program, *command[1:])
    raise RuntimeError(
        f"simulated GPUs need a C compiler: CC names {asked[0]!r}, which was not found"
        if asked
        else "simulated GPUs need a C compiler, and none of cc, gcc and clang was found; install one or set CC"
    )


def _cache_directory(compiler: tuple[str, ...]) -> Path:
    """Name the build of these sources by this compiler."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification of XDG_CACHE_HOME has relative paths ignored.
    root = base if os.path.isabs(base) else os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(root):
        raise RuntimeError("simulated GPUs need a cache directory: set HOME or XDG_CACHE_HOME")
    # The loader splits LD_PRELOAD at blanks and colons and has no way to escape them.
    if any(character in root for character in " \t\n:;$"):
        raise RuntimeError(
            f"the loader cannot take libraries from {root!r}: set XDG_CACHE_HOME to a path without blanks, ':', ';' and '$'"
        )
    return Path(root, CACHE_NAME + _digest(_compiler_version(compiler)))


def _digest(compiler_version: str) -> str:
    """Hash everything a build depends on."""
    digest = hashlib.sha256(repr((_FLAGS, _LIBRARIES, compiler_version)).encode())
    for source in sorted(_NATIVE.iterdir()):
        if source.suffix in (".c", ".h", ".map", ".in"):
            content = source.read_bytes()
            digest.update(f"{source.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


@functools.cache
def _compiler_version(compiler: tuple[str, ...]) -> str:
    """Ask the compiler who it is."""
    try:
        answer = subprocess.run([*compiler, "--version"], capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise RuntimeError(f"the C compiler {compiler[0]} does not start: {error.strerror or error}") from error
    return f"{compiler} {answer.stdout}"


def _is_complete(directory: Path) -> bool:
    """Tell whether every library is there: cleaners of cache directories take single files."""
    return all((directory / name).is_file() for name in _FILES)


@contextlib.contextmanager
def _lock(path: Path) -> Generator[None, None, None]:
    """Let one process compile at a time; the lock goes with the process that holds it."""
    import fcntl  # not on Windows, where this module must still be importable

    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install(compiler: tuple[str, ...], directory: Path) -> None:
    """Compile beside the final place and move there at once."""
    workplace = Path(tempfile.mkdtemp(prefix=".building-", dir=directory.parent))
    try:
        _compile_all(compiler, workplace)
        if not directory.exists():
            workplace.rename(directory)
            return
        for name in _FILES:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (workplace / name).replace(directory / name)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


def _compile_all(compiler: tuple[str, ...], workplace: Path) -> None:
    """Compile every library into the layout below the given directory, two at a time."""
    for name in _FILES:
        (workplace / name).parent.mkdir(parents=True, exist_ok=True)
    for name in _ABSENT:
        (workplace / name).touch()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(max_workers=2) as pool:
        jobs = [pool.submit(_compile, compiler, library, workplace, Path(scratch)) for library in _LIBRARIES]
        for job in jobs:
            job.result()


def _compile(compiler: tuple[str, ...], library: _Library, workplace: Path, scratch: Path) -> None:
    """Compile and link one library."""
    output = workplace / library.path
    script = _NATIVE / library.version_script
    defines: list[str] = []
    if library.cudart:
        # One list of symbols serves both majors; only the version node differs.
        text = script.read_text(encoding="utf-8").replace(_PLACEHOLDER, library.cudart)
        script = scratch / f"runtime-{library.cudart}.map"
        script.write_text(text, encoding="utf-8")
        defines = [f"-DCUDART={library.cudart}"]
    sources = sorted({str(path) for pattern in library.sources for path in _NATIVE.glob(pattern)})
    command = [
        *compiler,
        *_FLAGS,
        *defines,
        f"-Wl,-soname,{output.name}",
        f"-Wl,--version-script={script}",
        "-o",
        str(output),
        *sources,
        "-ldl",
    ]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        raise RuntimeError(
            f"compiling the simulated {output.name} with {compiler[0]} failed (status {done.returncode}):\n"
            f"{(done.stderr or done.stdout).strip()}"
        )
