"""Compiles the simulated libraries, once per version of their sources.

The wheel contains C sources and no binaries, so that it stays a pure Python wheel. The system's C compiler builds the
libraries at first use, into the user's cache directory. The layout lets an environment leave the driver or NVML off the
library path:

    preload/libcudart.so.12  preload/libcudart.so.13  preload/libcupti.so.13  preload/libnccl.so.2
    preload/libaccelerator-exit.so
    driver/libcuda.so.1  driver/libcuda.so
    nvml/libnvidia-ml.so.1
    bin/nvidia-smi
    absent/driver/libcuda.so.1  absent/driver/libcuda.so  absent/nvml/libnvidia-ml.so.1

The files under absent/ are empty. The loader finds them first, cannot load them and stops searching: this hides a real
driver or NVML of the machine.

Programs load what is in that directory, so a build is used only if nobody except this user and root could have written it
and its files match the checksums, which are written last.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ._values import CACHE_NAME, MAXIMUM_GPUS

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["LIBRARIES_VARIABLE", "PRELOADED", "build", "build_problem", "ensure_built", "platform_problem"]

LIBRARIES_VARIABLE = "ACCELERATOR_SIM_LIBRARIES"
"""Names the directory into which ``simulate --build`` compiled the libraries."""

_FLAGS = (
    *("-std=gnu11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"),
    *("-Wl,-Bsymbolic", "-Wl,-z,defs", "-Wl,--as-needed"),
    f"-DSIM_MAX_GPUS={MAXIMUM_GPUS}",
)
_PLACEHOLDER = "@CUDART@"
_CHECKSUMS = "SHA256SUMS"
_ANNOUNCEMENT = "accelerator: compiling the simulated driver, about 10 s, once"
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class _Library(NamedTuple):
    """A shared library or program and its sources."""

    path: str
    sources: tuple[str, ...]
    version_script: str = ""  # empty for a program
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
# NVIDIA's driver has this name too, and the Triton of torch 2.8 links with -lcuda.
_LINKS = {"driver/libcuda.so": "driver/libcuda.so.1"}
_ABSENT = ("absent/driver/libcuda.so.1", "absent/driver/libcuda.so", "absent/nvml/libnvidia-ml.so.1")
_FILES = (*(library.path for library in _LIBRARIES), *_LINKS, *_ABSENT)
_DIRECTORIES = sorted({os.path.dirname(name) for name in _FILES} | {"", "absent"})

PRELOADED = tuple(library.path for library in _LIBRARIES if library.path.startswith("preload/"))
"""The libraries to preload: torch's RPATH would find the real ones first."""


class _UnusableDirectory(OSError):
    """A directory that cannot hold a build."""


def platform_problem() -> str | None:
    """Return why the libraries cannot run here; None if they can."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64") or sys.maxsize < 2**32:
        return (
            f"simulated GPUs need Linux on x86-64; this is {platform.system() or sys.platform} on"
            f" {platform.machine() or 'an unknown processor'}"
        )
    return None


def build_problem() -> str | None:
    """Return why there is no build and none can be made; None if one exists or can be made. Builds nothing."""
    reason = platform_problem()
    if reason is not None:
        return reason
    try:
        if _find_build() is None:
            _compiler()
    except RuntimeError as error:
        return str(error)
    return None


def ensure_built() -> Path:
    """Return the directory of the libraries, compiling them if this version has no build yet.

    Several processes may call this at once: one compiles while the others wait, and only a complete build is used.

    Returns:
        The directory, laid out as this module's docstring says.

    Raises:
        RuntimeError: This is not Linux on x86-64, no C compiler was found, the compiler failed (the message contains its
            output), or no cache directory is usable.

    Example:
        >>> from accelerator.simulation import _build
        >>> (_build.ensure_built() / "driver/libcuda.so.1").is_file()
        True
    """
    reason = build_problem()
    if reason is not None:
        raise RuntimeError(reason)
    directory = _find_build()
    if directory is not None:
        return directory
    *others, last = _cache_roots()
    for root in others:
        with contextlib.suppress(OSError):  # the next one may work
            return build(root)
    try:
        return build(last)
    except OSError as error:
        raise RuntimeError(
            f"cannot keep the simulated libraries in {' or '.join(map(str, (*others, last)))}: {error};"
            " set XDG_CACHE_HOME to a writable directory"
        ) from error


def build(root: Path) -> Path:
    """Compile the libraries below a directory, if it has no build of this version.

    Args:
        root: The directory; the build gets a subdirectory named after the version of the sources.

    Returns:
        The directory of the build.

    Raises:
        RuntimeError: No C compiler was found, or it failed.
        OSError: The directory is not usable.
    """
    directory = _build_directory(root)
    if _is_intact(directory):
        return directory
    parent = directory.parent
    parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    for path in (root, parent) if _is_exposed(root) else (parent,):
        if path.lstat().st_uid != os.geteuid():
            raise _UnusableDirectory(f"{path} belongs to another user")
        _forbid_others_to_write(path)
    with _lock(parent / ".simulation.lock"):
        if not _is_intact(directory):
            for left in parent.glob(".building-*"):  # of a killed process: a running one would hold the lock
                shutil.rmtree(left, ignore_errors=True)
            _install(_compiler(), directory)
    if not _is_intact(directory):
        raise _UnusableDirectory(f"{directory} is writable by other users")
    return directory


def _find_build() -> Path | None:
    """Return the directory of an existing build, or None."""
    configured = os.environ.get(LIBRARIES_VARIABLE)
    if configured:
        directory = _build_directory(Path(os.path.abspath(configured)))
        if not _is_intact(directory):
            raise RuntimeError(
                f"{LIBRARIES_VARIABLE} names {configured}, which has no libraries of this version that only root or this user"
                f" can write: build them with python -m accelerator simulate --build {shlex.quote(configured)}"
            )
        return directory
    return next((directory for directory in map(_build_directory, _cache_roots()) if _is_intact(directory)), None)


def _cache_roots() -> list[Path]:
    """Return the possible cache directories: the user's, and one below the temporary directory."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative XDG_CACHE_HOME.
    root = base if os.path.isabs(base) else os.path.join(os.path.expanduser("~"), ".cache")
    temporary = Path(tempfile.gettempdir(), f"accelerator-{os.geteuid()}")
    return [Path(root), temporary] if os.path.isabs(root) else [temporary]


def _build_directory(root: Path) -> Path:
    """Return the path of this version's build below a directory."""
    # LD_PRELOAD cannot escape blanks and colons.
    if any(character in str(root) for character in " \t\n:;$"):
        raise RuntimeError(
            f"the loader cannot preload libraries from {str(root)!r}:"
            " set XDG_CACHE_HOME to a path without blanks, ':', ';' and '$'"
        )
    return root / (CACHE_NAME + _source_digest())


@functools.cache
def _sources() -> dict[str, bytes]:
    """Read the sources, which may be in a zip archive."""
    from importlib import resources

    native = resources.files(__name__.rpartition(".")[0]) / "native"
    sources = {entry.name: entry.read_bytes() for entry in native.iterdir() if entry.name.endswith((".c", ".h", ".map", ".in"))}
    return dict(sorted(sources.items()))


@functools.cache
def _source_digest() -> str:
    """Hash the sources and compiler flags."""
    digest = hashlib.sha256(repr((_FLAGS, _LIBRARIES, _LINKS, _ABSENT)).encode())
    for name, content in _sources().items():
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _is_intact(directory: Path) -> bool:
    """Return whether a build is complete and writable only by this user and root."""
    root, parent = directory.parents[1], directory.parent
    try:
        parts = [parent, *(directory / name for name in (*_DIRECTORIES, *_FILES, _CHECKSUMS))]
        if _is_exposed(root):
            parts.append(root)
        if not all(_is_safe(part.lstat()) for part in parts):
            return False
        return (directory / _CHECKSUMS).read_text(encoding="ascii") == _checksums(directory)
    except (OSError, ValueError):
        return False


def _is_exposed(root: Path) -> bool:
    """Return whether everybody may create files beside this directory: whoever created it could replace its content."""
    return bool(root.parent.stat().st_mode & stat.S_IWOTH)


def _is_safe(status: os.stat_result) -> bool:
    """Return whether only this user and root may write there."""
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & _OTHERS_MAY_WRITE and not stat.S_ISLNK(status.st_mode)


def _checksums(directory: Path) -> str:
    """Return the checksum file of a build."""
    return "".join(f"{hashlib.sha256((directory / name).read_bytes()).hexdigest()}  {name}\n" for name in _FILES)


def _forbid_others_to_write(path: Path) -> None:
    """Take write permission from other users, whatever the umask is."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_OTHERS_MAY_WRITE)


@contextlib.contextmanager
def _lock(path: Path) -> Generator[None, None, None]:
    """Let one process compile at a time. The lock ends with its process."""
    import fcntl  # imported late: Windows has none, and this module must be importable there

    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compiler() -> tuple[str, ...]:
    """Find the C compiler: $CC, with its arguments, otherwise cc, gcc or clang."""
    configured = shlex.split(os.environ.get("CC", ""))
    for command in [configured] if configured else [["cc"], ["gcc"], ["clang"]]:
        program = shutil.which(command[0])
        if program is not None:
            return (program, *command[1:])
    raise RuntimeError(
        f"simulated GPUs need a C compiler: CC names {configured[0]!r}, which was not found"
        if configured
        else "simulated GPUs need a C compiler, and none of cc, gcc and clang was found; install one or set CC"
    )


def _install(compiler: tuple[str, ...], directory: Path) -> None:
    """Compile in a directory beside the final one, then rename it."""
    scratch_directory = Path(tempfile.mkdtemp(prefix=".building-", dir=directory.parent))
    try:
        _compile_all(compiler, scratch_directory)
        (scratch_directory / _CHECKSUMS).write_text(_checksums(scratch_directory), encoding="ascii")
        for name in (*_DIRECTORIES, *_FILES, _CHECKSUMS):
            (scratch_directory / name).chmod(0o755 if name in _DIRECTORIES or name.startswith("bin/") else 0o644)
        if directory.exists():
            # It is damaged or writable by others. Running programs keep the files they have loaded.
            directory.rename(scratch_directory / "replaced")
        scratch_directory.rename(directory)
        shutil.rmtree(directory / "replaced", ignore_errors=True)
    finally:
        shutil.rmtree(scratch_directory, ignore_errors=True)


def _compile_all(compiler: tuple[str, ...], scratch_directory: Path) -> None:
    """Compile all libraries into the layout below a directory, two at a time."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):  # a closed or full stderr must not prevent the build
            print(_ANNOUNCEMENT, file=sys.stderr, flush=True)
    for name in _FILES:
        (scratch_directory / name).parent.mkdir(parents=True, exist_ok=True)
    for name in _ABSENT:
        (scratch_directory / name).touch()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(max_workers=2) as pool:
        for name, content in _sources().items():
            Path(scratch, name).write_bytes(content)
        jobs = [pool.submit(_compile, compiler, library, scratch_directory, Path(scratch)) for library in _LIBRARIES]
        for job in jobs:
            job.result()
    for name, target in _LINKS.items():
        # Not a symbolic link, which could lead elsewhere; and not a copy, which would be loaded as a second driver.
        os.link(scratch_directory / target, scratch_directory / name)


def _compile(compiler: tuple[str, ...], library: _Library, scratch_directory: Path, scratch: Path) -> None:
    """Compile and link one library."""
    output = scratch_directory / library.path
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
