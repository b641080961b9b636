"""The build of the installed torch, from its ``version.py``; with plug-ins, what a child process that imports it says."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from . import child_process, process, torch_probe, visibility_variables


class Build(NamedTuple):
    """The version of the installed torch, and the CUDA, ROCm or XPU version that it is built for."""

    version: str
    cuda: str | None
    hip: str | None
    xpu: str | None


_build: tuple[Build | None] | None = None
_error: Exception | None = None
_import_error: str | None = None
# The type, and the environment in which it was read if torch could not be imported there.
_type: tuple[str | None, dict[str, str] | None] | None = None

# Why torch cannot be imported if a file has its name.
HIDDEN = "the file {} hides torch, because it has the same name; rename it"

_FAILED_HERE = "an earlier import of it failed in this process"


def read() -> Build | None:
    """The installed torch's build, or None without torch; read once, because an installation does not change."""
    global _build, _error
    if _build is None:
        try:
            _build = (_read_version(),)
        except (OSError, ImportError) as error:  # too many open files, or the interpreter shuts down
            _error = error
            return None
    return _build[0]


def _read_version() -> Build | None:
    try:
        torch_folder = folder()
        if torch_folder is None:
            return None
        path = os.path.join(torch_folder, "version.py")
        with open(path, "rb") as file:
            values: dict[str, Any] = {"__name__": "torch.version"}
            exec(compile(file.read(), path, "exec"), values)
        # __version__ may be a str subclass that compares versions.
        return Build(str(values["__version__"]), values.get("cuda"), values.get("hip"), values.get("xpu"))
    except (OSError, ImportError):
        raise
    except Exception:  # a broken torch cannot use an accelerator, whatever is wrong with it
        return None


def is_known() -> bool:
    """Whether the build has been read."""
    return _build is not None


def read_error() -> Exception | None:
    """Why the build could not be read at the latest attempt; None if it has been read."""
    return None if is_known() else _error


def is_rocm() -> bool:
    """Whether torch is built for ROCm, whose devices it calls "cuda" too."""
    build = read()
    return build is not None and build.hip is not None


def fits_no_gpu() -> bool:
    """Whether torch is missing, or built for neither CUDA nor ROCm."""
    build = read()
    return build is None or not (build.cuda or build.hip)


def folder() -> str | None:
    """The folder of the installed torch, or None without torch."""
    spec = importlib.util.find_spec("torch")
    # A module has no such locations: it is a file torch.py, and a version.py beside it is not torch's.
    return os.path.dirname(spec.origin) if spec and spec.origin and spec.submodule_search_locations else None


def hiding_file() -> str | None:
    """A file ``torch.py`` that ``import torch`` would import in place of torch, or None."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):  # a broken torch
        return None
    return spec.origin if spec and not spec.submodule_search_locations else None


def accelerator_type() -> str | None:
    """The type of the accelerator that torch is built for ("cuda" also for ROCm), or None for a CPU build.

    If torch is imported, the imported torch decides, because a backend may be registered in it. Otherwise its build decides,
    unless a plug-in may bring an accelerator that the build does not name: then a child process imports torch. This ignores
    ``ACCELERATOR_BACKEND``.
    """
    global _type
    if process.is_torch_imported():
        return process.torch_accelerator_type()
    entry = _type
    if entry is None or (entry[1] is not None and entry[1] != visibility_variables.variables()):
        variables = visibility_variables.variables()
        device_type = _read_type()
        if not is_known():
            return device_type
        entry = _type = device_type, variables if _import_error else None
    return entry[0]


def _read_type() -> str | None:
    global _import_error
    build = read()
    if build is None:
        return None
    plugins = _plugins()
    if plugins or process.has_torch_import_failed():
        return _probe_torch(plugins)
    # Only torch knows whether an XPU or one of Apple's GPUs is present.
    if not (build.cuda or build.hip) and (build.xpu or sys.platform == "darwin"):
        return _probe_torch()
    _import_error = None
    return "cuda" if build.cuda or build.hip else None


def _plugins() -> list[str]:
    """The installed packages that announce a backend, which ``import torch`` would load."""
    if os.environ.get(torch_probe.AUTOLOAD, "1") != "1" and not process.has_torch_import_failed():
        return []
    # Importing importlib.metadata takes longer than all the rest of the first query.
    packages = (entry for path in sys.path for entry in _metadata(path) if _announces_backend(entry))
    return [os.path.basename(entry).partition("-")[0].partition(".")[0] for entry in packages]


_METADATA = (".dist-info", ".egg-info")


def _metadata(path: str) -> list[str]:
    try:
        return [entry.path for entry in os.scandir(path or ".") if entry.name.endswith(_METADATA)]
    except OSError:
        return []


def _announces_backend(metadata: str) -> bool:
    """Whether a package's entry points bring an accelerator; ``[accelerator.kernels_only]`` marks those that do not."""
    try:
        with open(os.path.join(metadata, "entry_points.txt"), encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError):
        return False
    return "[torch.backends]" in text and "[accelerator.kernels_only]" not in text


def _probe_torch(plugins: Sequence[str] = ()) -> str | None:
    """Import torch in a child process and return the type of its accelerator; None also if it cannot be imported there."""
    global _import_error
    has_failed = process.has_torch_import_failed()
    try:
        # A failed plug-in may have set the variable that makes torch load no plug-ins.
        result = torch_probe.run({torch_probe.AUTOLOAD: None} if has_failed else {})
    except child_process.NotStarted as not_started:
        if not has_failed:
            return _import_torch()
        result = torch_probe.TorchProbeResult(str(not_started))
    error = result.error or (_FAILED_HERE if has_failed else None)
    unnamed = [name for name in plugins if error and name not in error]
    _import_error = f"{error}; it loads {', '.join(unnamed)}" if unnamed else error
    return None if error else result.device_type


def _import_torch() -> str | None:
    """Import torch in this process, which has no Python executable for a child."""
    global _import_error
    try:
        import torch.accelerator  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except Exception as error:
        _import_error = f"{type(error).__name__}: {error}"
        return None
    return process.torch_accelerator_type()


def import_error() -> str | None:
    """Why torch with its plug-ins cannot be imported; None if it can be, or if that was not tried."""
    return None if process.is_torch_imported() else _import_error


def check_importable() -> None:
    """Raise if torch cannot be imported and Python's own error would not name the cause.

    Raises:
        RuntimeError: if a file hides torch; if an import of torch failed in this process, with the error of that import.
    """
    if path := hiding_file():
        raise RuntimeError(HIDDEN.format(path))
    if process.has_torch_import_failed():
        accelerator_type()
        raise RuntimeError(f"torch cannot be imported: {import_error() or _FAILED_HERE}")


def clear() -> None:
    """Probe torch's plug-ins again at the next query."""
    global _type, _import_error
    _type = _import_error = None
    torch_probe.clear()
