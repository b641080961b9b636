"""What the installed torch is built for, read from its ``version.py`` without importing it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from . import process


class Build(NamedTuple):
    """The installed torch: its version and the CUDA, ROCm or XPU version that it is built for."""

    version: str
    cuda: str | None
    hip: str | None
    xpu: str | None


_read: tuple[Build | None] | None = None


def read() -> Build | None:
    """The installed torch's build, or None where no torch can be found; read once, as an installation does not change."""
    global _read
    if _read is None:
        try:
            _read = (_from_file(),)
        except OSError:  # such as too many open files, which pass
            return None
    return _read[0]


def _from_file() -> Build | None:
    try:
        where = folder()
        if where is None:
            return None
        path = os.path.join(where, "version.py")
        with open(path, "rb") as file:
            values: dict[str, Any] = {"__name__": "torch.version"}
            exec(compile(file.read(), path, "exec"), values)
        # __version__ may be a str subclass that compares versions; Build holds plain text.
        return Build(str(values["__version__"]), values.get("cuda"), values.get("hip"), values.get("xpu"))
    except OSError:
        raise
    except Exception:  # whatever is wrong with it, this is not a torch that could use an accelerator
        return None


def is_settled() -> bool:
    """Whether what the installed torch is built for is known for good."""
    return _read is not None


def is_rocm() -> bool:
    """Whether torch is built for ROCm, whose devices it calls "cuda" too."""
    build = read()
    return build is not None and build.hip is not None


def fits_no_gpu() -> bool:
    """Whether there is no torch that says which vendor's GPUs matter."""
    build = read()
    return build is None or not (build.cuda or build.hip)


def folder() -> str | None:
    """Where the installed torch is, or None without one."""
    spec = importlib.util.find_spec("torch")
    return os.path.dirname(spec.origin) if spec and spec.origin else None


def accelerator_type(env: Mapping[str, str] = os.environ) -> str | None:
    """The type of the accelerator that this torch is built for ("cuda" also for ROCm), or None for a CPU build.

    An imported torch is asked, as a backend may have been registered in it; the build is read otherwise, and torch imported
    only where a plug-in could bring an accelerator that the build does not know.

    Args:
        env: the environment whose ``ACCELERATOR_BACKEND`` counts.
    """
    if env.get("ACCELERATOR_BACKEND") == "cpu":
        return None
    if "torch.accelerator" in sys.modules:
        return process.torch_accelerator_type()
    return _type_without_torch()


_type: tuple[str | None] | None = None


def _type_without_torch() -> str | None:
    global _type
    if _type is None:
        found = _find_type()
        if _read is None:  # nor does it last that the build could not be read
            return found
        _type = (found,)
    return _type[0]


def _find_type() -> str | None:
    build = read()
    if build is None:
        return None
    if _has_plugins():
        return _import_and_ask()
    if build.cuda or build.hip:
        return "cuda"
    # XPU builds and Apple's GPUs can only be known by torch itself.
    return _import_and_ask() if build.xpu or sys.platform == "darwin" else None


def _has_plugins() -> bool:
    """Whether an installed package announces a backend that ``import torch`` would load."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return False
    # importlib.metadata would say the same, but importing it takes longer than all the rest of a first answer.
    return any(_announces_backend(entry) for path in sys.path for entry in _metadata(path))


# The kernels of simulated GPUs come as a plug-in too, and bring no accelerator but CUDA's.
_OUR_PLUGIN = "accelerator_simulated_kernels-1.dist-info"
_METADATA = (".dist-info", ".egg-info")


def _metadata(path: str) -> list[str]:
    try:
        entries = os.scandir(path or ".")
        return [entry.path for entry in entries if entry.name.endswith(_METADATA) and entry.name != _OUR_PLUGIN]
    except OSError:
        return []


def _announces_backend(metadata: str) -> bool:
    try:
        with open(os.path.join(metadata, "entry_points.txt"), encoding="utf-8") as file:
            return "[torch.backends]" in file.read()
    except (OSError, UnicodeDecodeError):
        return False


def _import_and_ask() -> str | None:
    try:
        import torch.accelerator  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except Exception:  # a torch that cannot be imported offers no accelerator
        return None
    return process.torch_accelerator_type()
