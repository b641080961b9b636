"""Compiles the engine of simulated GPUs (``native/engine``) against the headers of the installed torch.

Each version of torch has a build of its own, in the cache directory of the simulated libraries. Without a C++ compiler, or if
it fails, the ops run in Python, slower, and one line says so. For some hours the other processes with this cache directory then
say nothing and do not try again.

Processes on a simulated machine load this module by file name, so it uses only relative imports.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from .boundary import boundary_flag, read_with_included
from .cache import Build, announce, announce_once, cache_roots, install, install_in_cache, is_intact, was_announced

_CACHE_NAME = "accelerator/engine-"
_LIBRARY = "engine.so"
_MAIN = "engine/engine.cpp"
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra")
_EXPORTS = "{ global: accelerator_engine_*; aoti_torch_cuda_*; local: *; };"  # the library is loaded with RTLD_GLOBAL
_SHIMS = "torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h"
_SHIM = re.compile(r"^AOTI_TORCH_EXPORT (AOTITorchError aoti_torch_cuda_(\w+)\((.+)\));", re.MULTILINE)
_LINKED = ("-lc10", "-ltorch_cpu", "-ltorch_cuda", "-Wl,-z,defs", "-Wl,--allow-shlib-undefined")
# The reason of a failure may pass: a full disk, or a compiler that was killed for its memory.
_RETRY_AFTER_S = 4 * 3600.0
_COMPILERS = ("c++", "g++", "clang++")
_RACES_NEED_ENGINE = "races are found by the engine of simulated GPUs, which a C++ compiler makes: {}"


class Torch(NamedTuple):
    """An installed torch: its folder, its version and commit, and whether it has the newer ABI of the C++ library."""

    folder: str
    version: str
    has_new_abi: bool


def describe(torch: ModuleType) -> Torch:
    """Describe the imported torch."""
    version = f"{torch.__version__} {torch.version.git_version}"
    return Torch(os.path.dirname(os.path.abspath(str(torch.__file__))), version, torch.compiled_with_cxx11_abi())


def ensure_built(torch: Torch, libraries: str | None, *, is_required: bool = False) -> Path | None:
    """Return the engine's library, compiling it if this torch has none yet; None if there is none and none can be made.

    Args:
        torch: The installed torch.
        libraries: The directory into which ``simulate --build`` compiled, which is searched first, or None.
        is_required: Whether to raise an error instead of returning None.

    Raises:
        RuntimeError: `is_required`, and the engine cannot be compiled.
    """
    made = _engine(torch)
    for root in _roots(libraries):
        if is_intact(made, root / made.name):
            return root / made.name / _LIBRARY
    try:
        if not is_required and was_announced(_failure_name(made.name), within_s=_RETRY_AFTER_S):
            return None
        return install_in_cache(made) / _LIBRARY
    except RuntimeError as error:
        if is_required:
            raise RuntimeError(_RACES_NEED_ENGINE.format(error)) from error
        message = f"simulated GPUs compute slower, without their engine: {error}"
        announce_once(_failure_name(made.name), message, within_s=_RETRY_AFTER_S)
        return None


def missing_compiler(libraries: str | None) -> str | None:
    """Return why races cannot be found on any torch: there is no C++ compiler, and no engine was compiled before."""
    if is_any_built(libraries):
        return None
    try:
        _compiler()
    except RuntimeError as error:
        return _RACES_NEED_ENGINE.format(error)
    return None


def is_any_built(libraries: str | None) -> bool:
    """Return whether an engine was compiled before, for any torch."""
    return any(any(root.glob(f"{_CACHE_NAME}*/{_LIBRARY}")) for root in _roots(libraries))


def _roots(libraries: str | None) -> list[Path]:
    """Return the directories that may have an engine: that of ``simulate --build`` first, then the caches."""
    return [Path(os.path.abspath(libraries)), *cache_roots()] if libraries else cache_roots()


def build(torch: Torch, root: Path) -> Path:
    """Compile the engine below a directory, and return its library.

    Raises:
        RuntimeError: No C++ compiler was found, or it failed.
        OSError: The directory is not usable.
    """
    return install(_engine(torch), root) / _LIBRARY


def _engine(torch: Torch) -> Build:
    sources = read_with_included(_read, _MAIN)
    boundary = boundary_flag(_read)
    digest = hashlib.sha256(repr((torch.version, torch.has_new_abi, _FLAGS, boundary, _LINKED, _EXPORTS)).encode())
    for name, content in sources.items():
        digest.update(f"{name} {len(content)}\n".encode() + content)

    def make(directory: Path) -> None:
        _compile(torch, sources, boundary, directory)

    return Build(_CACHE_NAME + digest.hexdigest()[:16], (_LIBRARY,), make)


def _read(name: str) -> bytes:
    """Read a source by this module's loader: it may be in a zip archive."""
    assert __spec__ is not None
    path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "native", *name.split("/"))
    return __spec__.loader.get_data(path)  # type: ignore[union-attr]


def _compiler() -> tuple[str, ...]:
    """Find the C++ compiler: $CXX, with its arguments, otherwise c++, g++ or clang++."""
    configured = shlex.split(os.environ.get("CXX", ""))
    for command in [configured] if configured else [[name] for name in _COMPILERS]:
        program = shutil.which(command[0])
        if program is not None:
            return (program, *command[1:])
    missing = f"CXX names {configured[0]!r}, which was not found" if configured else "no C++ compiler was found"
    raise RuntimeError(f"{missing}; install g++ or set CXX")


def _compile(torch: Torch, sources: dict[str, bytes], boundary: str, directory: Path) -> None:
    compiler = _compiler()
    announce(f"compiling the engine of simulated GPUs for torch {torch.version.partition(' ')[0]}, about 15 s, once")
    folder = directory / "sources"
    for name, content in sources.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    (folder / "exports").write_text(_EXPORTS, encoding="utf-8")
    (folder / "shim_functions.inc").write_text(_shim_functions(torch), encoding="utf-8")
    libraries = os.path.join(torch.folder, "lib")
    command = [
        *(*compiler, *_FLAGS, boundary, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.has_new_abi)}"),
        *("-isystem", os.path.join(torch.folder, "include"), f"-I{folder}"),
        *("-o", str(directory / _LIBRARY), str(folder / _MAIN)),
        *("-L", libraries, *_LINKED, f"-Wl,--version-script={folder / 'exports'}"),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise RuntimeError(f"the C++ compiler {compiler[0]} does not start: {error.strerror or error}") from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines() or [""]
        raise RuntimeError(f"{compiler[0]} failed (status {done.returncode}): {errors[0].strip()}")
    shutil.rmtree(folder)


def _shim_functions(torch: Torch) -> str:
    """Define each function that torch declares for AOTInductor's code, as a call of the op (native/engine/shims.hpp)."""
    header, functions = Path(torch.folder, "include", _SHIMS), []
    declarations = _SHIM.findall(header.read_text(encoding="utf-8")) if header.is_file() else []
    for declaration, name, parameters in declarations:
        names = re.findall(r"(\w+)(?:,|$)", parameters)
        arguments = ", ".join(f'{{"{each}", {each}}}' for each in names)
        functions.append(f'EXPORT {declaration} {{ SHIM("{name}", {{{arguments}}}) }}\n')
    return "".join(functions)


def _failure_name(name: str) -> str:
    """Return the name of the file that says that this user's compiler could not make a build."""
    search = (os.environ.get("CXX"), *map(shutil.which, _COMPILERS))
    return f"{name}-failed-{hashlib.sha256(repr(search).encode()).hexdigest()[:16]}"
