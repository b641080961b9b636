"""An accelerator other than CUDA, for tests: ``plugin/hostacc``, which is compiled once for each torch.

Without a C++ compiler, tests with the fixture ``hostacc`` are skipped. In CI they fail.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from accelerator._machine import torch_build
from tests.support import plain_environment

PLUGIN = Path(__file__).parent / "plugin"
SOURCE = PLUGIN / "hostacc" / "hostacc.cpp"
# Each switch removes or changes a feature of the accelerator. plugin/hostacc/__init__.py describes them.
SWITCHES = (
    *("no-generators", "hidden-generators", "no-memory", "module-memory", "no-is_initialized", "no-streams", "bad-fork"),
)


@functools.cache
def library() -> Path:
    """Return the path of the compiled accelerator. Compile it if the cache has none for this source, torch and compiler."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        reason = "needs a C++ compiler, which compiles another accelerator"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    command = [compiler, *_flags()]
    digest = hashlib.sha256(SOURCE.read_bytes() + "\n".join(command).encode()).hexdigest()[:16]
    build = torch_build.read()
    assert build is not None
    folder = _cache() / f"hostacc-{build.version}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "libhostacc.so"
    with open(folder / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker of pytest may be compiling it
        if not path.exists():
            unfinished = folder / "unfinished.so"
            done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"the compiler failed:\n{done.stderr}"
            unfinished.rename(path)
    return path


def _flags() -> list[str]:
    """Return the compiler's options for this torch, without importing it."""
    build, folder = torch_build.read(), torch_build.folder()
    assert build is not None
    assert folder is not None
    minor = int(build.version.split(".")[1])
    include, libraries = Path(folder) / "include", Path(folder) / "lib"
    return [
        # Optimization would double the time of the compilation.
        *("-std=c++20", "-O0", "-fPIC", "-shared", "-w", f"-DTORCH_MINOR={minor}"),
        # Wheels of torch 2.6 still have the older ABI of the C++ library.
        f"-D_GLIBCXX_USE_CXX11_ABI={int(minor > 6)}",
        *(f"-I{include}", f"-I{include}/torch/csrc/api/include", str(SOURCE)),
        *(f"-L{libraries}", "-lc10", "-ltorch_cpu"),
    ]


def _cache() -> Path:
    """Return the user's cache directory, or one below the temporary directory if that is not writable."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache")) / "accelerator-tests"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError:
        pass
    return root if os.access(root, os.W_OK) else Path(tempfile.gettempdir()) / f"accelerator-tests-{os.getuid()}"


def environment(*switches: str, **variables: str) -> dict[str, str]:
    """Return the environment of a process in which ``import hostacc`` registers the accelerator."""
    with_library = plain_environment(HOSTACC_LIBRARY=str(library()), HOSTACC_SWITCHES=",".join(switches), **variables)
    with_library["PYTHONPATH"] += os.pathsep + str(PLUGIN)
    return with_library


def announce(folder: Path, environment: dict[str, str], plugin: str = "hostacc") -> dict[str, str]:
    """Write a package with a plug-in's entry point into a folder. Return an environment in which ``import torch`` loads it."""
    metadata = folder / f"{plugin}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {plugin}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\n{plugin} = {plugin}:load\n")
    return {**environment, "PYTHONPATH": f"{environment['PYTHONPATH']}{os.pathsep}{folder}"}
