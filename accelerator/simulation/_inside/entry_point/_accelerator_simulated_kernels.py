"""Entry point of the group ``torch.backends``: loads the simulated GPUs' kernels into a process on a simulated machine.

torch imports every entry point of that group, and ``import torch`` fails if one of them fails. Only simulated machines have
this file's folder on their path. Their Python may lack the package or have it under another name, so this module loads the
kernels by file name. If that fails, one line on stderr says why, and so does the error message of a kernel launch.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import types

_PACKAGE = "_accelerator_simulation"


def load() -> None:
    """Replace torch's CUDA kernels in this process by kernels that compute on the CPU, or that compute nothing."""
    problem = None
    try:
        _make_package()
        _write_whole_lines()
        _load()
    except BaseException as error:  # raising would make `import torch` fail
        problem = f"{type(error).__name__}: {error}"
        _tell(f"the kernels of simulated GPUs cannot be installed in this torch: {problem}")
    _report(problem)


def _make_package() -> None:
    """Make an empty package in place of simulation/__init__.py, which would import the rest of accelerator."""
    package = types.ModuleType(_PACKAGE)
    package.__path__ = [os.path.abspath(f"{os.path.dirname(__file__)}/../..")]
    sys.modules[_PACKAGE] = package


def _read(setting: str) -> str | None:
    text: str | None = importlib.import_module(f"{_PACKAGE}._settings").read(setting)
    return text


def _write_whole_lines() -> None:
    """On a node of a cluster, write each line at once: its ranks share a pipe, and parts of their lines would be mixed."""
    if _read("node") is not None:
        for file in (sys.__stdout__, sys.__stderr__):
            if isinstance(file, io.TextIOWrapper):
                file.reconfigure(line_buffering=True, write_through=False)


def _load() -> None:
    import torch

    computes = _read("compute")
    if computes not in ("0", "1") or torch.version.cuda is None or not _has_driver():
        return
    importlib.import_module(f"{_PACKAGE}._inside.{'compiled' if computes == '1' else 'rehearsal'}").install()


def _has_driver() -> bool:
    """Return whether the machine has a driver: without one, no program can use a GPU."""
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _tell(problem: str) -> None:
    """Print a problem, once for all processes of a run. The command line reads it from the file."""
    settings = importlib.import_module(f"{_PACKAGE}._settings")
    if settings.read("told") is not None:
        return
    os.environ[settings.variable("told")] = "1"  # for processes that this one starts
    state = settings.read("state")
    if settings.read("run") is not None and state is not None:
        try:
            with open(f"{state}{settings.PROBLEM_SUFFIX}", "x", encoding="utf-8") as file:
                file.write(problem)
        except FileExistsError:
            return
        except OSError:  # the file is only for others
            pass
    with contextlib.suppress(OSError):  # standard error is closed
        os.write(2, f"accelerator: {problem}\n".encode())


def _report(problem: str | None) -> None:
    """Tell the simulated runtime why the kernels are missing, if they are; it prints that at the first launch it refuses."""
    try:
        import ctypes

        for major in (12, 13):
            runtime = ctypes.CDLL(f"libcudart.so.{major}")
            runtime.accelerator_simulation_plugin_loaded(problem and problem.encode())
    except BaseException:  # the simulated runtime is not loaded either, so no kernel will be launched
        return
