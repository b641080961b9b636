"""Compiles the simulated libraries, once per version of their sources.

The system's C compiler builds the libraries at first use, into the user's cache directory. The wheel for Linux on x86-64
contains them compiled; they are copied there instead, because a wheel cannot contain links, and its files may be anybody's. The
layout lets an environment leave the driver or NVML off the library path:

    preload/libcudart.so.12  preload/libcudart.so.13  preload/libcupti.so.13  preload/libnccl.so.2
    preload/libaccelerator-exit.so  preload/libaccelerator-hosts.so  preload/libaccelerator-cublas.so
    preload/libaccelerator-nvrtc.so
    driver/libcuda.so.1  driver/libcuda.so
    nvml/libnvidia-ml.so.1
    bin/nvidia-smi  bin/accelerator-guard
    translator/_ptx/...  translator/native/...
    absent/driver/libcuda.so.1  absent/driver/libcuda.so  absent/nvml/libnvidia-ml.so.1

libcudart starts what is under translator/ to translate a kernel: a copy of `_ptx`, and what translated kernels include.

The files under absent/ are empty. The loader finds them first, cannot load them and stops searching: this hides a real
driver or NVML of the machine.
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
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .._ptx.compiler import processor_flags
from .._settings import LIBRARIES_FOLDER, read, variable
from .boundary import boundary_flag
from .cache import Build, announce, cache_roots, install, install_in_cache, is_intact, lock
from .settings_header import HEADER_NAME, header

if TYPE_CHECKING:
    from importlib.abc import Traversable

_FLAGS = (
    *("-std=gnu11", "-D_GNU_SOURCE", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra"),
    *("-include", "common/locks.h"),
    *("-Wl,-Bsymbolic", "-Wl,-z,defs", "-Wl,--as-needed"),
)
_PLACEHOLDER = "@CUDART@"
_KERNEL_RUNS = "interface/kernel_runs.h"
_ANNOUNCEMENT = "compiling the simulated driver, about 10 s, once"


class _Library(NamedTuple):
    """A shared library or program, and the folders of its sources below ``native``."""

    path: str
    folders: tuple[str, ...]
    version_script: str = ""  # empty for a program
    cudart: str = ""


_LIBRARIES = (
    _Library("preload/libcudart.so.12", ("runtime", "races", "ptx"), "runtime/runtime.map.in", "12"),
    _Library("preload/libcudart.so.13", ("runtime", "races", "ptx"), "runtime/runtime.map.in", "13"),
    _Library("driver/libcuda.so.1", ("driver", "common", "faults"), "driver/driver.map"),
    _Library("nvml/libnvidia-ml.so.1", ("nvml", "common", "faults"), "nvml/nvml.map"),
    _Library("preload/libaccelerator-exit.so", ("preload/exit",), "preload/exit/exit.map"),
    _Library("preload/libaccelerator-hosts.so", ("preload/hosts",), "preload/hosts/hosts.map"),
    _Library("preload/libaccelerator-cublas.so", ("preload/cublas",), "preload/cublas/cublas.map"),
    _Library("preload/libaccelerator-nvrtc.so", ("preload/nvrtc",), "preload/nvrtc/nvrtc.map"),
    _Library("preload/libcupti.so.13", ("preload/cupti",), "preload/cupti/cupti.map"),
    _Library("preload/libnccl.so.2", ("nccl",), "nccl/nccl.map"),
    _Library("bin/nvidia-smi", ("smi",)),
    _Library("bin/accelerator-guard", ("guard",)),
)
# NVIDIA's driver has this name too, and the Triton of torch 2.8 links with -lcuda.
_LINKS = {"driver/libcuda.so": "driver/libcuda.so.1"}
_ABSENT = ("absent/driver/libcuda.so.1", "absent/driver/libcuda.so", "absent/nvml/libnvidia-ml.so.1")
_FILES = (*(library.path for library in _LIBRARIES), *_LINKS, *_ABSENT)

COMPILED = tuple(library.path for library in _LIBRARIES)
"""What is compiled."""

PREBUILT_FOLDER = "prebuilt"
"""Below this package, in a wheel that contains the libraries: a folder for their version, in the layout above."""

PRELOADED = tuple(path for path in COMPILED if path.startswith("preload/"))
"""The libraries to preload: torch's RPATH would find the real ones first."""


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
        if _find_build() is None and _prebuilt() is None:
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
        >>> from accelerator.simulation._build import libraries
        >>> (libraries.ensure_built() / "driver/libcuda.so.1").is_file()
        True
    """
    # Each look at a build reads all of its files.
    if platform_problem() is None and (directory := _find_build()) is not None:
        return directory
    if (reason := build_problem()) is not None:
        raise RuntimeError(reason)
    return install_in_cache(_libraries())


def kernel_cache() -> Path | None:
    """Return the directory for translated kernels, which is made if it is missing; None if none is usable.

    Each version has its own, and so have processors with other instructions, which may share a home directory.
    """
    processor = hashlib.sha256(" ".join(processor_flags()).encode()).hexdigest()[:4]
    name = f"{LIBRARIES_FOLDER.removesuffix('simulation-')}kernels-{_source_digest()}-{processor}"
    for root in cache_roots():
        directory = root / name
        with contextlib.suppress(OSError), lock(root, directory):
            return directory
    return None


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
    return install(_libraries(), _checked(root))


def _libraries() -> Build:
    def make(directory: Path) -> None:
        prebuilt = _prebuilt()
        if prebuilt is None:
            _compile_all(_compiler(), directory)
        else:
            for path in COMPILED:
                (directory / path).write_bytes((prebuilt / path).read_bytes())
        for name in _ABSENT:
            (directory / name).touch()
        for name, content in _translator_sources().items():
            (directory / name).write_bytes(content)
        for name, target in _LINKS.items():
            # Not a symbolic link, which could lead elsewhere; and not a copy, which would be loaded as a second driver.
            os.link(directory / target, directory / name)

    return Build(LIBRARIES_FOLDER + _source_digest(), (*_FILES, *_translator_sources()), make)


def _prebuilt() -> Traversable | None:
    """Return the folder of the compiled libraries in the installed package, which may be in a zip archive; None without one."""
    folder = _package() / PREBUILT_FOLDER / Path(_libraries().name).name
    return folder if folder.is_dir() else None


def _find_build() -> Path | None:
    """Return the directory of an existing build, or None."""
    build = _libraries()
    configured = read("libraries")
    if configured:
        directory = _checked(Path(os.path.abspath(configured))) / build.name
        if not is_intact(build, directory):
            raise RuntimeError(
                f"{variable('libraries')} names {configured}, which has no libraries of this version that only root or this"
                f" user can write: build them with python -m accelerator simulate --build {shlex.quote(configured)}"
            )
        return directory
    directories = (_checked(root) / build.name for root in cache_roots())
    return next((directory for directory in directories if is_intact(build, directory)), None)


def _checked(root: Path) -> Path:
    """Return a cache directory from which libraries can be preloaded."""
    # LD_PRELOAD cannot escape blanks and colons.
    if any(character in str(root) for character in " \t\n:;$"):
        raise RuntimeError(
            f"the loader cannot preload libraries from {str(root)!r}:"
            " set XDG_CACHE_HOME to a path without blanks, ':', ';' and '$'"
        )
    return root


def _package() -> Traversable:
    from importlib import resources

    return resources.files(__name__.rsplit(".", 2)[0])


@functools.cache
def _sources() -> dict[str, bytes]:
    """Read the sources, which may be in a zip archive, by their paths below ``native``, and write the header of settings."""
    sources: dict[str, bytes] = {HEADER_NAME: header()}

    def read(folder: Traversable, path: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                read(entry, f"{path}{entry.name}/")
            elif entry.name.endswith((".c", ".h", ".map", ".in")):
                sources[path + entry.name] = entry.read_bytes()

    read(_package() / "native", "")
    return dict(sorted(sources.items()))


@functools.cache
def _translator_sources() -> dict[str, bytes]:
    """Read the translator of kernels, and what translated kernels include, by their paths in the build."""
    sources: dict[str, bytes] = {}

    def read(folder: Traversable, path: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir() and entry.name != "__pycache__":
                read(entry, f"{path}{entry.name}/")
            elif entry.name.endswith(".py"):
                sources[path + entry.name] = entry.read_bytes()

    read(_package() / "_ptx", "translator/_ptx/")
    for name, content in _sources().items():
        if name == _KERNEL_RUNS or (name.startswith("ptx/") and name.endswith(".h")):
            sources[f"translator/native/{name}"] = content
    return dict(sorted(sources.items()))


@functools.cache
def _source_digest() -> str:
    """Hash the sources and compiler flags."""
    digest = hashlib.sha256(repr((_FLAGS, _LIBRARIES, _LINKS, _ABSENT)).encode())
    for name, content in (*_sources().items(), *_translator_sources().items()):
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


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


def _compile_all(compiler: tuple[str, ...], scratch_directory: Path) -> None:
    """Compile all libraries into the layout below a directory, two at a time."""
    from concurrent.futures import ThreadPoolExecutor  # imported late: most runs compile nothing

    announce(_ANNOUNCEMENT)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(max_workers=2) as pool:
        for name, content in _sources().items():
            file = Path(scratch, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        jobs = [pool.submit(_compile, compiler, library, scratch_directory, Path(scratch)) for library in _LIBRARIES]
        for job in jobs:
            job.result()


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
    sources = sorted(str(path) for folder in library.folders for path in (scratch / folder).glob("*.c"))
    if library.version_script:
        flags += [f"-Wl,-soname,{output.name}", f"-Wl,--version-script={script}"]
    boundary = boundary_flag(lambda name: (scratch / name).read_bytes())
    command = [*compiler, *flags, boundary, f"-I{scratch}", "-o", str(output), *sources, "-ldl", "-lm"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise RuntimeError(f"the C compiler {compiler[0]} does not start: {error.strerror or error}") from error
    if done.returncode != 0:
        raise RuntimeError(
            f"compiling the simulated {output.name} with {compiler[0]} failed (status {done.returncode}):\n"
            f"{(done.stderr or done.stdout).strip()}"
        )
