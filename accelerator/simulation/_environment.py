"""The environment in which a process has simulated GPUs, and whether this process is such a one."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from functools import wraps
from typing import TYPE_CHECKING, Literal

from .._machine import torch_build
from . import _values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import ParamSpec

    _Parameters = ParamSpec("_Parameters")

__all__ = ["environment", "is_simulated", "unavailable_reason"]

_PREFIX = "ACCELERATOR_SIM_"
# Nothing here sets these: they hold for inner simulations too.
_OF_THE_USER = (f"{_PREFIX}NCCL_TIMEOUT",)
_DRIVERS = ("present", "absent", "old", "broken")
_NVMLS = ("present", "absent", "broken", "mismatch")
_OLD_CUDA = "11.4"
_DRIVER_VERSIONS = {"11.4": "470.57.02"}

_CU_UNKNOWN = "cuInit:999"
_NVML_ERRORS = {"broken": "nvmlInit*:9", "mismatch": "nvmlInit*:18"}

# Any build, also of another version of this package: an outer simulation is to be replaced whole.
_OURS = re.compile(re.escape(f"/{_values.CACHE_NAME}") + r"[0-9a-f]+/|/simulation/_plugin[:/]")
# What makes torch load the kernels; see there.
_PLUGIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_plugin")


def unavailable_reason() -> str | None:
    """Say why GPUs cannot be simulated here.

    Compiles nothing and imports no torch.

    Returns:
        None where `environment` works; else one sentence: this is not Linux on x86-64, this Python's torch is not built
        for CUDA, or there is no C compiler and nothing was built before.

    Example:
        >>> from accelerator import simulation
        >>> simulation.unavailable_reason() is None
        True
    """
    from . import _build  # here, for `is_simulated` has no use for its imports

    build = torch_build.read()
    # Without any torch there is still NVML to be asked.
    if build is None or build.cuda:
        return _build.build_problem()
    built_for = "ROCm" if build.hip else "XPU" if build.xpu else "the CPU alone"
    return f"torch {build.version} of {sys.executable} is built for {built_for}; install a CUDA build"


def _where_possible(function: Callable[_Parameters, dict[str, str]]) -> Callable[_Parameters, dict[str, str]]:
    """Let a function raise where GPUs cannot be simulated, rather than give a machine without them."""

    @wraps(function)
    def checked(*arguments: _Parameters.args, **options: _Parameters.kwargs) -> dict[str, str]:
        reason = unavailable_reason()
        if reason is not None:
            raise RuntimeError(reason)
        return function(*arguments, **options)

    return checked


@_where_possible
def environment(
    gpus: int = 1,
    *,
    memory: int | str | Sequence[int | str] = "8GiB",
    name: str | Sequence[str] = "Simulated GPU",
    capability: str | Sequence[str] = "9.0",
    speed: int | Sequence[int] = 0,
    mig: int | Sequence[int | None] | None = None,
    nvlink: bool | Sequence[int | None] = False,
    numa: int | Sequence[int | Sequence[int] | None] | None = 0,
    clock_reasons: int | Sequence[int] = 0,
    driver: Literal["present", "absent", "old", "broken"] = "present",
    driver_cuda: str | None = None,
    nvml: Literal["present", "absent", "broken", "mismatch"] = "present",
    errors: Mapping[str, int] | str | None = None,
    log: str | os.PathLike[str] | None = None,
    state: str | os.PathLike[str] | None = None,
    compute: bool = True,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Give the complete environment for a child process that has simulated GPUs.

    torch's ops compute there, on the CPU and in the simulated memory. Compiles the libraries the first time. What is said
    of a GPU takes one value for all GPUs or a sequence with one for each, of which the last repeats; GPUs are counted as
    NVML does, in the order of the PCI bus.

    Args:
        gpus: How many GPUs there are, 0 to 128.
        memory: Size of each GPU's memory: bytes, or text such as "8GiB", "512MiB" or "1GB".
        name: Name of each GPU.
        capability: Compute capability of each GPU.
        speed: Relative speed of each GPU. Unless CUDA_DEVICE_ORDER says otherwise, CUDA counts the fastest first.
        mig: None where MIG is off, else the number of MIG instances of the GPU, 0 to 7.
        nvlink: True: NVLink connects all GPUs with each other; a sequence gives the number of each GPU's group, which
            NVLink connects within; None is a GPU without NVLink.
        numa: The host's NUMA node nearest to each GPU, 0 to 63; a sequence of nodes within the sequence where several
            are equally near; None where NVML does not know it.
        clock_reasons: What holds each GPU's clocks back, as NVML's bits: 0x4 for the power cap, 0x40 for heat.
        driver: "present"; "absent": there is no libcuda, also if the machine has a real one; "old": it is older than
            torch needs; "broken": it is there and does not start. Says nothing about NVML.
        driver_cuda: The CUDA version the driver supports; None means 13.2, and 11.4 if the driver is "old".
        nvml: "present"; "absent": there is no libnvidia-ml; "broken": it does not find its kernel driver;
            "mismatch": it does not fit its kernel driver, as after an upgrade without a restart.
        errors: Failures of driver and NVML functions, such as ``{"cuInit": 999, "nvmlDeviceGetTemperature*@1": 3}``;
            a trailing * takes all functions that begin so, @1 only the GPU 1. Text in the form
            "cuInit:999,nvmlDeviceGetTemperature*@1:3" is taken too.
        log: A file that gets a line for each initialization of a library or context in the child.
        state: A file through which processes of one simulated machine see each other's memory; it is created when
            needed. None: each process has the machine to itself.
        compute: Whether torch's ops compute. If not, kernels are launched and compute nothing, at no cost: the result of
            arithmetic is meaningless, and matrix products and convolutions fail.
        base: The environment to build on; None means this process's own. What belongs to a simulation that is
            already in it is replaced.

    Returns:
        The environment, to be passed on as in ``subprocess.run(command, env=environment(2))``.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument has an impossible value.
        RuntimeError: GPUs cannot be simulated here; the message is that of `unavailable_reason`, or what the compiler
            or the system said.

    Example:
        >>> import subprocess, sys
        >>> from accelerator.simulation import environment
        >>> program = "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount())"
        >>> child = environment(2, memory=["8GiB", "16GiB"])
        >>> subprocess.run([sys.executable, "-c", program], env=child, capture_output=True, text=True).stdout
        '2\\n'
    """
    from . import _build  # here, for `is_simulated` has no use for its imports

    gpus = _values.count(gpus)
    driver_is = _values.choice("driver", driver, _DRIVERS)
    nvml_is = _values.choice("nvml", nvml, _NVMLS)
    failures = _values.errors(errors, gpus)
    if driver_is == "broken":
        failures.append(_CU_UNKNOWN)
    if nvml_is in _NVML_ERRORS:
        failures.append(_NVML_ERRORS[nvml_is])
    if driver_cuda is None and driver_is == "old":
        driver_cuda = _OLD_CUDA
    machine = {
        "GPUS": str(gpus),
        "MEMORY": _values.per_gpu("memory", memory, gpus, _values.memory),
        "NAMES": _values.per_gpu("name", name, gpus, _values.name, ";"),
        "CAPABILITIES": _values.per_gpu("capability", capability, gpus, _values.capability),
        "SPEEDS": _values.per_gpu("speed", speed, gpus, _values.speed),
        "MIG": _values.per_gpu("mig", mig, gpus, _values.mig),
        "NVLINK": _values.per_gpu("nvlink", nvlink, gpus, _values.nvlink),
        "NUMA": _values.per_gpu("numa", numa, gpus, _values.numa),
        "CLOCK_REASONS": _values.per_gpu("clock_reasons", clock_reasons, gpus, _values.clock_reasons),
    }
    _values.check_mig(machine["MIG"], machine["CAPABILITIES"])
    if driver_cuda is not None:
        machine["DRIVER_CUDA"] = _values.cuda_version("driver_cuda", driver_cuda)
        if driver_cuda in _DRIVER_VERSIONS:
            machine["DRIVER_VERSION"] = _DRIVER_VERSIONS[driver_cuda]
    if failures:
        machine["ERRORS"] = ",".join(failures)
    for variable, path in (("LOG", log), ("STATE", state)):
        if path is not None:
            machine[variable] = _values.file(variable.lower(), path)
    machine["COMPUTE"] = str(int(compute))
    if base is not None and not isinstance(base, Mapping):
        raise TypeError(f"base must be a mapping of variables to values, not {type(base).__name__}")
    result = _without_simulation(os.environ if base is None else base)
    root = _build.ensure_built()
    _prepend(result, "LD_PRELOAD", [root / library for library in _build.PRELOADED])
    driver_root, nvml_root = (root / "absent" if word == "absent" else root for word in (driver_is, nvml_is))
    _prepend(result, "LD_LIBRARY_PATH", [driver_root / "driver", nvml_root / "nvml"])
    if compute:
        _prepend(result, "PYTHONPATH", [_PLUGIN])
    if "absent" not in (driver_is, nvml_is):
        result.setdefault("PATH", os.defpath)
        _prepend(result, "PATH", [root / "bin"])  # nvidia-smi
    # A thread that native/exit.c puts to sleep does not come back: torch need not wait the 10 s it would.
    result.setdefault("TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT", "1")
    result.update({_PREFIX + key: value for key, value in machine.items()})
    return result


def is_simulated() -> bool:
    """Tell whether this process runs on the simulated libraries.

    Goes by what the process is made of, not by environment variables. Loads nothing; False off Linux.

    Returns:
        True if the simulated CUDA runtime is in this process.

    Example:
        >>> from accelerator.simulation import is_simulated
        >>> is_simulated()
        True
    """
    if sys.platform != "linux":
        return False
    import ctypes  # here, because most programs that import this module never ask

    # The handle of the program itself: the preloaded libraries are searched with it, and nothing is opened.
    return hasattr(ctypes.CDLL(None), "accelerator_simulation")


def _without_simulation(base: Mapping[str, str]) -> dict[str, str]:
    """Copy an environment, leaving out what an outer simulation put there."""
    from . import _build

    of_the_user = (*_OF_THE_USER, _build.LIBRARIES_VARIABLE)
    result = {key: value for key, value in base.items() if not key.startswith(_PREFIX) or key in of_the_user}
    colons = (("LD_LIBRARY_PATH", "[:;]"), ("PYTHONPATH", ":"), ("PATH", ":"))
    for variable, separators in (("LD_PRELOAD", "[ :]"), *colons):
        old = result.get(variable)
        if old is None or not _OURS.search(old + "/"):
            continue
        rest = ":".join(entry for entry in re.split(separators, old) if not _OURS.search(entry + "/"))
        if rest:
            result[variable] = rest
        else:
            del result[variable]
    return result


def _prepend(result: dict[str, str], variable: str, paths: Sequence[str | Path]) -> None:
    """Put paths in front of those that a variable of the loader has."""
    entries = [str(path) for path in paths]
    if result.get(variable):
        entries.append(result[variable])
    result[variable] = ":".join(entries)
