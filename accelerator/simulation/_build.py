"""Compiles the simulated libraries, once per version of their sources.

The wheel ships C and no binaries, so that it stays a pure Python wheel; the libraries are built with the system's
compiler when a simulation is first asked for and kept in the user's cache directory, laid out so that the driver and
NVML can each be left off the library path:

    preload/libcudart.so.12  preload/libcudart.so.13  preload/libcupti.so.13  preload/libnccl.so.2
    preload/libaccelerator-exit.so
    driver/libcuda.so.1
    nvml/libnvidia-ml.so.1
    bin/nvidia-smi
    absent/driver/libcuda.so.1  absent/nvml/libnvidia-ml.so.1

The files under absent/ are empty. The loader finds them first, cannot load them and stops looking, which hides a
real driver of the machine when its absence is to be simulated.

What is found there is loaded into programs, so it is taken only if nobody but this user and root could have written it,
and if it is what the list beside it, written last, says.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ._values import CACHE_NAME, MAXIMUM_GPUS

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["LIBRARIES_VARIABLE", "PRELOADED", "build", "libraries", "obstacle", "platform_obstacle"]

LIBRARIES_VARIABLE = "ACCELERATOR_SIM_LIBRARIES"
"""Names the directory in which ``simulate --build`` has put the libraries."""

_FLAGS = (
    *("-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"),
    *("-Wl,-Bsymbolic", "-Wl,-z,defs", "-Wl,--as-needed"),
    f"-DSIM_MAX_GPUS={MAXIMUM_GPUS}",
)
_PLACEHOLDER = "@CUDART@"
_LIST = "SHA256SUMS"
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class _Library(NamedTuple):
    """One shared library, or the one program, and what it is made of."""

    path: str
    sources: tuple[str, ...]
    version_script: str = ""  # a program has none
    cudart: str = ""


_LIBRARIES = (
    _Library("preload/libcudart.so.12", ("runtime*.c",), "runtime.map.in", "12"),
    _Library("preload/libcudart.so.13", ("runtime*.c",), "runtime.map.in", "13"),
    _Library("driver/libcuda.so.1", ("driver*.c", "visible.c", "config.c", "state.c"), "driver.map"),
    _Library("nvml/libnvidia-ml.so.1", ("nvml*.c", "config.c", "state.c"), "nvml.map"),
    _Library("preload/libaccelerator-exit.so", ("exit.c",), "exit.map"),
    _Library("preload/libcupti.so.13", ("cupti*.c",), "cupti.map"),
    _Library("preload/libnccl.so.2", ("nccl*.c",), "nccl.map"),
    _Library("bin/nvidia-smi", ("smi*.c",)),
)
_ABSENT = ("absent/driver/libcuda.so.1", "absent/nvml/libnvidia-ml.so.1")
_FILES = (*(library.path for library in _LIBRARIES), *_ABSENT)
_DIRECTORIES = sorted({os.path.dirname(name) for name in _FILES} | {"", "absent"})

PRELOADED = tuple(library.path for library in _LIBRARIES if library.path.startswith("preload/"))
"""The libraries that must be in the process from the start: torch's RPATH would find the real ones."""


class _Unusable(OSError):
    """A directory in which nothing of ours can be kept."""


def platform_obstacle() -> str | None:
    """Say why the libraries would not run here; None if they would."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64") or sys.maxsize < 2**32:
        return (
            f"simulated GPUs need Linux on x86-64; this is {platform.system() or sys.platform} on"
            f" {platform.machine() or 'an unknown processor'}"
        )
    return None


def obstacle() -> str | None:
    """Say why the libraries cannot be had here, without building them; None if they can."""
    reason = platform_obstacle()
    if reason is not None:
        return reason
    try:
        if _find() is None:
            _compiler()
    except RuntimeError as error:
        return str(error)
    return None


def libraries() -> Path:
    """Give the directory of the simulated libraries, compiling them if this version of them is not there yet.

    Safe with several processes at once: one compiles, the others wait for it, and a build counts when it is whole.

    Returns:
        The directory, laid out as this module's docstring says.

    Raises:
        RuntimeError: This is not Linux on x86-64, there is no C compiler, the compiler failed (the message carries
            its output), or no directory can be used.

    Example:
        >>> from accelerator.simulation import _build
        >>> (_build.libraries() / "driver/libcuda.so.1").is_file()
        True
    """
    reason = obstacle()
    if reason is not None:
        raise RuntimeError(reason)
    found = _find()
    if found is not None:
        return found
    *others, last = _caches()
    for root in others:
        with contextlib.suppress(OSError):  # the next one may do
            return build(root)
    try:
        return build(last)
    except OSError as error:
        raise RuntimeError(
            f"cannot keep the simulated libraries in {' or '.join(map(str, (*others, last)))}: {error};"
            " set XDG_CACHE_HOME to a directory that can be written to"
        ) from error


def build(root: Path) -> Path:
    """Compile the libraries below a directory, if they are not there yet.

    Args:
        root: Where to put them; a directory with the name of their version is made in it.

    Returns:
        The directory of the libraries.

    Raises:
        RuntimeError: There is no C compiler, or it failed.
        OSError: The directory cannot be used.
    """
    directory = _place(root)
    if _is_sound(directory):
        return directory
    parent = directory.parent
    parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    for place in (root, parent) if _is_exposed(root) else (parent,):
        if place.lstat().st_uid != os.geteuid():
            raise _Unusable(f"{place} belongs to another user")
        _take_from_others(place)
    with _lock(parent / ".simulation.lock"):
        if not _is_sound(directory):
            for left in parent.glob(".building-*"):  # by a process that was killed: whoever builds holds the lock
                shutil.rmtree(left, ignore_errors=True)
            _install(_compiler(), directory)
    if not _is_sound(directory):
        raise _Unusable(f"{directory} could be changed by others")
    return directory


def _find() -> Path | None:
    """Find libraries that were built before."""
    given = os.environ.get(LIBRARIES_VARIABLE)
    if given:
        directory = _place(Path(os.path.abspath(given)))
        if not _is_sound(directory):
            raise RuntimeError(
                f"{LIBRARIES_VARIABLE} names {given}, which has no libraries of this version that only root or this user"
                f" could have written: build them with python -m accelerator simulate --build {shlex.quote(given)}"
            )
        return directory
    return next((place for place in map(_place, _caches()) if _is_sound(place)), None)


def _caches() -> list[Path]:
    """Name the directories that may keep the libraries: the user's cache, else one of this user in the temporary one."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification of XDG_CACHE_HOME has relative paths ignored.
    root = base if os.path.isabs(base) else os.path.join(os.path.expanduser("~"), ".cache")
    temporary = Path(tempfile.gettempdir(), f"accelerator-{os.geteuid()}")
    return [Path(root), temporary] if os.path.isabs(root) else [temporary]


def _place(root: Path) -> Path:
    """Name the build of these sources in a directory."""
    # The loader splits LD_PRELOAD at blanks and colons and has no way to escape them.
    if any(character in str(root) for character in " \t\n:;$"):
        raise RuntimeError(
            f"the loader cannot take libraries from {str(root)!r}:"
            " set XDG_CACHE_HOME to a path without blanks, ':', ';' and '$'"
        )
    return root / (CACHE_NAME + _digest())


@functools.cache
def _sources() -> dict[str, bytes]:
    """Read the sources, which need not be files of their own: the package may be in a zip archive."""
    from importlib import resources

    native = resources.files(__name__.rpartition(".")[0]) / "native"
    found = {entry.name: entry.read_bytes() for entry in native.iterdir() if entry.name.endswith((".c", ".h", ".map", ".in"))}
    return dict(sorted(found.items()))


@functools.cache
def _digest() -> str:
    """Hash what a build is made of."""
    digest = hashlib.sha256(repr((_FLAGS, _LIBRARIES)).encode())
    for name, content in _sources().items():
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _is_sound(directory: Path) -> bool:
    """Tell whether a build is whole, and nobody but this user and root could have changed it."""
    root, parent = directory.parents[1], directory.parent
    try:
        parts = [parent, *(directory / name for name in (*_DIRECTORIES, *_FILES, _LIST))]
        if _is_exposed(root):
            parts.append(root)
        if not all(_is_safe(part.lstat()) for part in parts):
            return False
        return (directory / _LIST).read_text(encoding="ascii") == _sums(directory)
    except (OSError, ValueError):
        return False


def _is_exposed(root: Path) -> bool:
    """Tell whether everybody may make something of this name: who did could replace what is in it."""
    return bool(root.parent.stat().st_mode & stat.S_IWOTH)


def _is_safe(status: os.stat_result) -> bool:
    """Tell whether only this user and root may write there."""
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & _OTHERS_MAY_WRITE and not stat.S_ISLNK(status.st_mode)


def _sums(directory: Path) -> str:
    """List the libraries with their hashes."""
    return "".join(f"{hashlib.sha256((directory / name).read_bytes()).hexdigest()}  {name}\n" for name in _FILES)


def _take_from_others(path: Path) -> None:
    """Let nobody else write there, whatever the process's mask for new files."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_OTHERS_MAY_WRITE)


@contextlib.contextmanager
def _lock(path: Path) -> Generator[None, None, None]:
    """Let one process compile at a time; the lock goes with the process that holds it."""
    import fcntl  # not on Windows, where this module must still be importable

    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


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


def _install(compiler: tuple[str, ...], directory: Path) -> None:
    """Compile beside the final place and move there at once."""
    workplace = Path(tempfile.mkdtemp(prefix=".building-", dir=directory.parent))
    try:
        _compile_all(compiler, workplace)
        (workplace / _LIST).write_text(_sums(workplace), encoding="ascii")
        for name in (*_DIRECTORIES, *_FILES, _LIST):
            (workplace / name).chmod(0o755 if name in _DIRECTORIES or name.startswith("bin/") else 0o644)
        if directory.exists():
            # Damaged, or open to others. Programs that run on it keep what they have loaded.
            directory.rename(workplace / "replaced")
        workplace.rename(directory)
        shutil.rmtree(directory / "replaced", ignore_errors=True)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


def _compile_all(compiler: tuple[str, ...], workplace: Path) -> None:
    """Compile every library into the layout below the given directory, two at a time."""
    for name in _FILES:
        (workplace / name).parent.mkdir(parents=True, exist_ok=True)
    for name in _ABSENT:
        (workplace / name).touch()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(max_workers=2) as pool:
        for name, content in _sources().items():
            Path(scratch, name).write_bytes(content)
        jobs = [pool.submit(_compile, compiler, library, workplace, Path(scratch)) for library in _LIBRARIES]
        _show_progress(0)
        try:
            for done, job in enumerate(as_completed(jobs), 1):
                job.result()
                _show_progress(done)
        finally:
            _show_progress(None)


def _show_progress(done: int | None) -> None:
    """Say on a terminal how far the compilation is; None takes the line away."""
    if sys.stderr is None or not sys.stderr.isatty():
        return
    text = "" if done is None else f"compiling the simulated GPUs, once: {done} of {len(_LIBRARIES)} parts"
    sys.stderr.write(f"\r\033[K{text}")
    sys.stderr.flush()


def _compile(compiler: tuple[str, ...], library: _Library, workplace: Path, scratch: Path) -> None:
    """Compile and link one library."""
    output = workplace / library.path
    script = scratch / library.version_script
    flags = list(_FLAGS)
    if not library.version_script:
        flags.remove("-shared")
    if library.cudart:
        # One list of symbols serves both majors; only the version node differs.
        text = script.read_text(encoding="utf-8").replace(_PLACEHOLDER, library.cudart)
        script = scratch / f"runtime-{library.cudart}.map"
        script.write_text(text, encoding="utf-8")
        flags.append(f"-DCUDART={library.cudart}")
    sources = sorted({str(path) for pattern in library.sources for path in scratch.glob(pattern)})
    if library.version_script:
        flags += [f"-Wl,-soname,{output.name}", f"-Wl,--version-script={script}"]
    command = [*compiler, *flags, "-o", str(output), *sources, "-ldl"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise RuntimeError(f"the C compiler {compiler[0]} does not start: {error.strerror or error}") from error
    if done.returncode != 0:
        raise RuntimeError(
            f"compiling the simulated {output.name} with {compiler[0]} failed (status {done.returncode}):\n"
            f"{(done.stderr or done.stdout).strip()}"
        )
