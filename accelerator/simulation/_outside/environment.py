"""Builds the environment of a process with simulated GPUs; says whether this process runs in one."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal

from ..._machine import torch_build
from .. import _settings
from .._settings import known_gpus
from .._settings.drivers import driver_version
from .._settings.values import check_mig

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import ParamSpec

    _Parameters = ParamSpec("_Parameters")

RACES_SUFFIX = ".races"
"""Ends the name of the file beside a machine's state that has an entry for each race of its processes."""
_MEMORY, _CAPABILITY = "8GiB", "9.0"
_CACHE_TAG = "TORCH_COMPILE_CACHE_KEY_TAG"
_OLD_CUDA = "11.4"

_CU_UNKNOWN = "cuInit:999"
_NVML_ERRORS = {"broken": "nvmlInit*:9", "mismatch": "nvmlInit*:18"}

# Matches the paths of any build, also of other versions of this package: an inner simulation replaces the outer one whole.
_SIMULATION_PATH = re.compile(
    re.escape(f"/{_settings.LIBRARIES_FOLDER}") + r"[0-9a-f]+/|/simulation/(_inside/entry_point|_plugin)[:/]"
)
# The folder with the entry point through which torch loads the kernels.
_PLUGIN = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "_inside", "entry_point")


def unavailable_reason() -> str | None:
    """Return why GPUs cannot be simulated here.

    Compiles nothing and does not import torch.

    Returns:
        None if `environment` works. Otherwise one sentence: this is not Linux on x86-64, this Python's torch is not built
        for CUDA, or there is neither a C compiler nor an earlier build.

    Example:
        >>> from accelerator import simulation
        >>> simulation.unavailable_reason() is None
        True
    """
    from .._build import libraries  # imported late: `is_simulated` does not need what it imports

    return _unsuitable_reason() or libraries.build_problem()


def _unsuitable_reason() -> str | None:
    """Return why GPUs cannot be simulated with this machine and this torch, whatever is built."""
    from .._build import libraries  # imported late, as above

    build = torch_build.read()
    # Without torch, programs can still query NVML.
    if build is None or build.cuda:
        return libraries.platform_problem()
    built_for = "ROCm" if build.hip else "XPU" if build.xpu else "the CPU alone"
    return f"torch {build.version} of {sys.executable} is built for {built_for}; install a CUDA build"


def _where_possible(function: Callable[_Parameters, dict[str, str]]) -> Callable[_Parameters, dict[str, str]]:
    """Make a function raise if GPUs cannot be simulated, instead of describing a machine without GPUs."""

    @wraps(function)
    def checked(*arguments: _Parameters.args, **options: _Parameters.kwargs) -> dict[str, str]:
        reason = _unsuitable_reason()  # the function raises what else `unavailable_reason` returns
        if reason is not None:
            raise RuntimeError(reason)
        return function(*arguments, **options)

    return checked


@_where_possible
def environment(
    gpus: int = 1,
    *,
    memory: int | str | Sequence[int | str] | None = None,
    name: str | Sequence[str] = "Simulated GPU",
    capability: str | Sequence[str] | None = None,
    speed: int | Sequence[int] | None = None,
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
    fill: Literal["zero", "nan"] = "zero",
    kernels: Literal["run", "refuse"] = "run",
    triton: bool = True,
    tune: bool = False,
    races: Literal["report", "raise"] | None = None,
    late_copies: bool = False,
    faults: Sequence[str | Mapping[str, Any]] | None = None,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the complete environment of a child process with simulated GPUs.

    torch's ops compute there, on the CPU and in the simulated memory. The first call compiles the simulated libraries. An
    argument that describes a GPU takes one value for all GPUs, or a sequence with one value for each GPU whose last value
    repeats. GPUs are numbered as NVML numbers them, in the order of the PCI bus.

    Args:
        gpus: Number of GPUs, 0 to 120, which is the maximum of torch.
        memory: Size of each GPU's memory: bytes, or text such as "8GiB", "512MiB" or "1GB". None means that of its name, and
            8 GiB if the name is not known.
        name: Name of each GPU. Known are names such as "H100" and "NVIDIA H100 80GB HBM3", of which CUDA's and NVML's totals
            differ by what the driver reserves.
        capability: Compute capability of each GPU. None means that of its name, and 9.0 if the name is not known.
        speed: Relative speed of each GPU. CUDA enumerates the fastest GPU first, unless CUDA_DEVICE_ORDER is PCI_BUS_ID. None
            means that of its name, its peak in single precision in GFLOPS, and 0 if the name is not known.
        mig: Number of MIG instances of each GPU, 0 to 7; None if MIG is off.
        nvlink: True if NVLink connects all GPUs. A sequence gives the number of each GPU's group, within which NVLink
            connects; None is a GPU without NVLink.
        numa: The host's NUMA node nearest to each GPU, 0 to 63; an inner sequence if several nodes are equally near;
            None if NVML does not know it.
        clock_reasons: Reasons that hold each GPU's clocks back, as NVML's bits: 0x4 for the power cap, 0x40 for heat.
        driver: "present"; "absent": no libcuda, even if the machine has a real one; "old": older than torch needs;
            "broken": it fails to start. Does not affect NVML.
        driver_cuda: The CUDA version that the driver supports, which decides the driver's own version; None means 13.2, and
            11.4 if the driver is "old".
        nvml: "present"; "absent": no libnvidia-ml; "broken": it does not find its kernel driver; "mismatch": its version
            differs from its kernel driver's, as after an upgrade without a restart.
        errors: Failures of driver and NVML functions, such as ``{"cuInit": 999, "nvmlDeviceGetTemperature*@1": 3}``.
            A trailing * means all functions that begin so, @1 only GPU 1. Also accepts text such as
            "cuInit:999,nvmlDeviceGetTemperature*@1:3".
        log: A file that gets one line for each initialization of a library or context in the child.
        state: A file through which processes of one simulated machine see each other's memory use; it is created when
            needed. None: each process has a machine of its own.
        compute: Whether torch's ops compute. If not, they allocate their results and leave what memory holds, which is
            zero if nothing was written. Device memory then needs no host memory. Copies of over 1 MiB are not performed,
            and random fills of CPU tensors of over 1 MiB write nothing. An op whose shapes torch cannot infer raises
            NotImplementedError. Kernels of extensions launch and do nothing.
        fill: Content of new device memory, and of the shared memory of kernels. "nan" fills it with NaN bytes, which exposes
            reads of uninitialized memory.
        kernels: What launches of kernels do that are not torch's own: "run" translates their PTX to C, compiles that once
            and runs it on the CPU; "refuse" lets them fail.
        triton: Whether Triton kernels run. If not, launching one fails.
        tune: Whether ``triton.autotune`` and ``torch.compile`` time all configurations of a kernel. If not, they take the
            first that compiles, because the times of a simulated GPU mean nothing.
        races: "report": print each race, two accesses to the same device or pinned memory, one of them a write, that nothing
            orders. "raise": also let the second op raise RuntimeError. `races` returns those of its process. Needs a C++
            compiler, or an engine that was compiled before.
        late_copies: Whether the target of a ``non_blocking`` copy to pinned memory has NaN, -1 for integers, until the host
            has synchronized: a timing that CUDA allows.
        faults: What fails while programs run, such as ``["xid=94,gpu=1,after_ops=400", {"slow": "20ms", "gpu": 0}]``, as the
            option ``--fault`` takes it.
        base: The environment to extend; None means this process's. A simulation that it already contains is replaced.

    Returns:
        The environment, for a call such as ``subprocess.run(command, env=environment(2))``.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has an invalid value.
        RuntimeError: GPUs cannot be simulated here. The message is that of `unavailable_reason`, the compiler or the
            system.

    Example:
        >>> import subprocess, sys
        >>> from accelerator.simulation import environment
        >>> program = "import pynvml; pynvml.nvmlInit(); print(pynvml.nvmlDeviceGetCount())"
        >>> child = environment(2, memory=["8GiB", "16GiB"])
        >>> subprocess.run([sys.executable, "-c", program], env=child, capture_output=True, text=True).stdout
        '2\\n'
    """
    parameters = dict(locals())
    from .._build import engine, libraries  # imported late: `is_simulated` does not need what they import

    reserves = _use_known_names(parameters)
    machine = _settings.encode(parameters)
    if reserves is not None:
        machine["reserves"] = reserves
    check_mig(machine["mig"], machine["capability"])
    failures = [
        *filter(None, [machine.get("errors")]),
        *([_CU_UNKNOWN] if driver == "broken" else []),
        *([_NVML_ERRORS[nvml]] if nvml in _NVML_ERRORS else []),
    ]
    if failures:
        machine["errors"] = ",".join(failures)
    if driver == "old":
        machine.setdefault("driver_cuda", _OLD_CUDA)
    if "driver_cuda" in machine:
        machine["driver_version"] = driver_version(machine["driver_cuda"])
    if "races" in machine:
        reason = engine.missing_compiler(_settings.read("libraries"))
        if reason is not None:
            raise RuntimeError(reason)
        if "state" in machine:
            machine["race_file"] = machine["state"] + RACES_SUFFIX
    result = _without_simulation(os.environ if base is None else base)
    root = libraries.ensure_built()
    machine["python"] = sys.executable
    cache = libraries.kernel_cache()
    if cache is not None:
        machine["kernel_cache"] = str(cache)
    _prepend(result, "LD_PRELOAD", [root / library for library in libraries.PRELOADED])
    driver_root, nvml_root = (root / "absent" if word == "absent" else root for word in (driver, nvml))
    _prepend(result, "LD_LIBRARY_PATH", [driver_root / "driver", nvml_root / "nvml"])
    _prepend(result, "PYTHONPATH", [_PLUGIN])
    if "absent" not in (driver, nvml):
        result.setdefault("PATH", os.defpath)
        _prepend(result, "PATH", [root / "bin"])  # nvidia-smi
    if compute:
        # The CPU and real GPUs must not run code that was compiled for simulated GPUs: the tag separates it in torch's caches.
        tag = "-".join(filter(None, (result.get(_CACHE_TAG), "simulated-gpu")))
        result[_CACHE_TAG] = tag
    # torch waits 10 s at exit for autograd threads, which native/preload/exit has suspended for good.
    result.setdefault("TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT", "1")
    result.update({_settings.variable(name): text for name, text in machine.items()})
    return result


def _use_known_names(parameters: dict[str, Any]) -> str | None:
    """Replace names of GPUs by full names, and memory, capability and speed that are not given by those of known names.

    Return the text of what the drivers of the GPUs reserve, or None if they reserve nothing.
    """
    name = parameters["name"]
    names = name if isinstance(name, Sequence) and not isinstance(name, str) else [name]
    known = [known_gpus.find(each) if isinstance(each, str) else None for each in names]
    if any(known):
        parameters["name"] = [each if gpu is None else gpu.name for each, gpu in zip(names, known, strict=True)]
    if isinstance(parameters["gpus"], int):
        known = known[: max(parameters["gpus"], 1)]  # `encode` refuses more names
    if parameters["capability"] is None:
        parameters["capability"] = [_CAPABILITY if gpu is None else gpu.capability for gpu in known] or _CAPABILITY
    if parameters["speed"] is None:
        parameters["speed"] = [0 if gpu is None else gpu.speed for gpu in known] or 0
    if parameters["memory"] is not None:
        return None
    parameters["memory"] = [_MEMORY if gpu is None else gpu.memory for gpu in known] or _MEMORY
    return ",".join("0" if gpu is None else str(gpu.reserve) for gpu in known) if any(known) else None


def is_simulated() -> bool:
    """Return whether this process runs on the simulated libraries.

    Looks at the loaded libraries, not at environment variables. Loads nothing; False on other systems than Linux.

    Returns:
        True if the simulated CUDA runtime is in this process.

    Example:
        >>> from accelerator.simulation import is_simulated
        >>> is_simulated()
        True
    """
    if sys.platform != "linux":
        return False
    import ctypes  # imported late: most programs that import this module do not call this

    # CDLL(None) searches the program and its preloaded libraries, and opens nothing.
    return hasattr(ctypes.CDLL(None), "accelerator_simulation")


def triton_runs() -> bool:
    """Whether Triton's kernels can run in this process. They cannot on a machine that was described with ``triton=False``."""
    return _settings.read("compute") != "1" or _settings.read("triton") != "0" or not is_simulated()


def _without_simulation(base: Mapping[str, str]) -> dict[str, str]:
    """Copy an environment without the variables and paths of an outer simulation."""
    set_by_user = {_settings.variable(setting.name) for setting in _settings.SETTINGS if setting.is_set_by_user}
    result = {key: value for key, value in base.items() if not key.startswith(_settings.PREFIX) or key in set_by_user}
    tag = re.sub(r"-?simulated-gpu$", "", result.pop(_CACHE_TAG, ""))
    if tag:
        result[_CACHE_TAG] = tag
    search_paths = (("LD_LIBRARY_PATH", "[:;]"), ("PYTHONPATH", ":"), ("PATH", ":"))
    for variable, separators in (("LD_PRELOAD", "[ :]"), *search_paths):
        old = result.get(variable)
        if old is None or not _SIMULATION_PATH.search(old + "/"):
            continue
        rest = ":".join(entry for entry in re.split(separators, old) if not _SIMULATION_PATH.search(entry + "/"))
        if rest:
            result[variable] = rest
        else:
            del result[variable]
    return result


def _prepend(result: dict[str, str], variable: str, paths: Sequence[str | Path]) -> None:
    """Put paths before those of a search path variable."""
    entries = [str(path) for path in paths]
    if result.get(variable):
        entries.append(result[variable])
    result[variable] = ":".join(entries)
