"""The table of settings: each option, parameter and variable of simulated GPUs is one row.

From the table come the options of ``simulate`` and ``rehearse`` (`_command/run_parser.py`), what `environment` checks and sets,
the command line that ``--pdb`` shows for a test (`_pytest/debugging.py`), and ``interface/settings.h`` for the C libraries
(`_build/settings_header.py`). Python reads a setting by ``read("name")``, C by ``getenv(SETTING_VARIABLE)``. A parameter of
`environment` is in its signature too; a test compares that with the table.

Processes on a simulated machine load this module by file name, so it imports only `values`, which imports only `fault_words`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from .drivers import driver_version
from .values import (
    Choice,
    ClockReasons,
    ComputeCapability,
    Count,
    CudaVersion,
    Environment,
    Faults,
    FaultWords,
    Flag,
    GpuName,
    InjectedErrors,
    MemorySize,
    MigInstances,
    NumaNodes,
    NvLinkGroups,
    OutputFile,
    PerGpu,
    Speed,
    ValueType,
)

PREFIX = "ACCELERATOR_SIM_"
"""The names of all variables begin so."""

LIBRARIES_FOLDER = "accelerator/simulation-"
"""The path of the compiled libraries below the user's cache directory begins so; the hash of their sources follows."""

PROBLEM_SUFFIX = ".problem"
"""Ends the name of the file beside a machine's state that says why its processes have no simulated kernels."""

LIMITS = {
    "GPUS": 120,  # of a machine: what torch is compiled for, C10_COMPILE_TIME_MAX_GPUS
    "RANKS": 128,  # of a communicator, and nodes of a cluster
    "INSTANCES": 7,  # of one GPU with MIG
    "NAME_LENGTH": 80,
    "NUMA_NODES": 64,
    "ERRORS": 60,  # that a caller injects
    "FAULTS": 64,  # of a machine
    "PROCESSES": 4096,  # of a machine, of which the state knows
    "REFUSAL_LENGTH": 4096,  # of the text about a launch that is refused
    "COPY": 2**20,  # bytes that a rehearsal copies, and that nccl moves of a rank
}
"""Limits that Python or several libraries need. In C they are ``SIM_MAX_GPUS`` and so on."""


class Option(NamedTuple):
    """How a command line gives a setting."""

    help: str
    metavar: str | None = None
    is_repeated: bool = False  # for the next GPU


class Setting(NamedTuple):
    """One setting.

    Attributes:
        name: The name of the parameter of `environment`, of the argument of the mark ``simulated_machine``, and of the option.
        type: Its values.
        default: The default of the parameter.
        is_of_a_run: Whether it describes a run of a machine and not the machine.
        simulate: The option of ``simulate``, or None.
        rehearse: The option of ``rehearse``, or None.
        readers: What reads its variable, if it has one: libraries by name; "inside" is Python of a simulated process
            (`_inside`), "outside" is the other Python of this package.
        variable_name: The name of the variable without `PREFIX`, if that is not the name of the setting in upper case.
        fallback: What libraries assume if the variable is unset (``SETTING_X_DEFAULT`` in C); None if that is the text of the
            default.
        is_read_early: Whether a process reads the variable while it imports torch, or may do so.
        is_set_by_user: Whether only users set the variable. An inner simulation keeps it.
    """

    name: str
    type: ValueType
    default: Any = None
    is_of_a_run: bool = False
    simulate: Option | None = None
    rehearse: Option | None = None
    readers: tuple[str, ...] = ()
    variable_name: str = ""
    fallback: str | None = None
    is_read_early: bool = False
    is_set_by_user: bool = False

    @property
    def variable(self) -> str:
        """The name of the environment variable without `PREFIX`; empty if there is none."""
        return (self.variable_name or self.name.upper()) if self.readers else ""

    @property
    def flag(self) -> str:
        """The option on the command line."""
        is_negative = isinstance(self.type, Flag) and not self.type.option_gives
        return f"--{'no-' * is_negative}{self.name.replace('_', '-')}"

    @property
    def native_default(self) -> str:
        """What the C libraries assume if the variable is unset."""
        return self.fallback if self.fallback is not None else self.type.encode(self.name, self.default, 1) or ""


# The libraries that contain common/config.c.
_NEWEST_CUDA = "13.2"  # the version of a driver without the setting; `drivers` has its number
_CONFIG = ("libcuda", "libnvidia-ml")

PARAMETERS = (
    Setting(
        "gpus",
        Count("GPUs", 0, LIMITS["GPUS"]),
        default=1,
        readers=(*_CONFIG, "libcudart", "outside"),
        simulate=Option("number of GPUs, 0 included (default: 1)", "N"),
        rehearse=Option("number of GPUs of a node (default: 1)", "N"),
    ),
    Setting(
        "memory",
        PerGpu(MemorySize()),
        readers=_CONFIG,
        fallback=str(8 * 2**30),
        simulate=Option("memory of a GPU, such as 512MiB (default: that of --name, else 8GiB)", "SIZE", is_repeated=True),
        rehearse=Option("memory of each GPU, such as 80GiB (default: that of --name; without it 8GiB)", "SIZE"),
    ),
    Setting(
        "name",
        PerGpu(GpuName(LIMITS["NAME_LENGTH"]), ";"),
        default="Simulated GPU",
        variable_name="NAMES",
        readers=_CONFIG,
        simulate=Option(
            "name of a GPU, such as H100, which sets memory and capability if it is known; repeat it for the next GPU "
            '(default: "Simulated GPU")',
            "NAME",
            is_repeated=True,
        ),
        rehearse=Option("name of the GPUs, such as H100", "NAME"),
    ),
    Setting(
        "capability",
        PerGpu(ComputeCapability()),
        variable_name="CAPABILITIES",
        readers=(*_CONFIG, "inside"),
        fallback="9.0",
        simulate=Option("compute capability of a GPU (default: that of --name, else 9.0)", "X.Y", is_repeated=True),
        rehearse=Option("compute capability of the GPUs (default: that of --name, else 9.0)", "X.Y"),
    ),
    Setting(
        "speed",
        PerGpu(Speed()),
        variable_name="SPEEDS",
        readers=_CONFIG,
        fallback="0",
        simulate=Option(
            "relative speed of a GPU: CUDA lists the fastest first, unless CUDA_DEVICE_ORDER=PCI_BUS_ID (default: that of "
            "--name, else 0)",
            "N",
            is_repeated=True,
        ),
    ),
    Setting(
        "mig",
        PerGpu(MigInstances(LIMITS["INSTANCES"])),
        readers=_CONFIG,
        simulate=Option("MIG instances of a GPU, or off (default: off)", "K", is_repeated=True),
        rehearse=Option("MIG instances of a GPU, or off (default: off)", "K", is_repeated=True),
    ),
    Setting(
        "nvlink",
        NvLinkGroups(LIMITS["GPUS"]),
        default=False,
        readers=_CONFIG,
        simulate=Option("group of GPUs linked by NVLink, all or off (default: off)", "GROUP", is_repeated=True),
        rehearse=Option("group of GPUs linked by NVLink, all or off (default: off)", "GROUP", is_repeated=True),
    ),
    Setting(
        "numa",
        PerGpu(NumaNodes(LIMITS["NUMA_NODES"])),
        default=0,
        readers=_CONFIG,
        simulate=Option("NUMA node of a GPU (default: 0)", "NODE", is_repeated=True),
        rehearse=Option("NUMA node of a GPU (default: 0)", "NODE", is_repeated=True),
    ),
    Setting("clock_reasons", PerGpu(ClockReasons()), default=0, readers=_CONFIG),
    Setting(
        "driver",
        Choice("present", "absent", "old", "broken"),
        default="present",
        simulate=Option(
            "the CUDA driver: present (the default), absent, old (older than torch needs) or broken (fails to start)", "STATE"
        ),
    ),
    Setting("driver_cuda", CudaVersion(), readers=_CONFIG, fallback=_NEWEST_CUDA),
    Setting(
        "nvml",
        Choice("present", "absent", "broken", "mismatch"),
        default="present",
        simulate=Option(
            "the NVML library: present (the default), absent, broken (fails to start) or mismatch (not of the kernel driver's "
            "version)",
            "STATE",
        ),
    ),
    Setting("errors", InjectedErrors(LIMITS["ERRORS"]), readers=_CONFIG),
    Setting("log", OutputFile(), readers=_CONFIG),
    Setting("state", OutputFile(), is_of_a_run=True, readers=(*_CONFIG, "libnccl", "inside")),
    Setting(
        "compute",
        Flag(option_gives=False),
        default=True,
        readers=("libcudart", "libnccl", "libaccelerator-cublas", "inside", "outside"),
        fallback="0",
        is_read_early=True,
        simulate=Option("ops allocate their results and compute nothing"),
    ),
    Setting(
        "fill",
        Choice("zero", "nan"),
        default="zero",
        readers=(*_CONFIG, "libcudart"),
        simulate=Option("content of new device and shared memory; nan exposes reads of uninitialized memory (default: zero)"),
    ),
    Setting(
        "kernels",
        Choice("run", "refuse"),
        default="run",
        readers=("libcudart",),
        simulate=Option("kernels that are not torch's own: run translates their PTX, refuse lets launches fail (default: run)"),
    ),
    Setting(
        "triton",
        Flag(option_gives=False),
        default=True,
        readers=("inside", "outside"),
        is_read_early=True,
        simulate=Option("launching a Triton kernel fails"),
    ),
    Setting(
        "tune",
        Flag(option_gives=True, is_unset_if_false=True),
        default=False,
        readers=("inside",),
        is_read_early=True,
        simulate=Option("triton.autotune and torch.compile time all configurations, and do not take the first that compiles"),
    ),
    Setting(
        "races",
        Choice("report", "raise", is_optional=True),
        readers=("libcudart", "outside"),
        is_read_early=True,
        simulate=Option(
            "report accesses to the same memory that nothing orders; raise: the second op also raises RuntimeError"
        ),
    ),
    Setting(
        "late_copies",
        Flag(option_gives=True, is_unset_if_false=True),
        default=False,
        readers=("libcudart",),
        is_read_early=True,
        simulate=Option(
            "a non_blocking copy to pinned memory arrives when the host synchronizes; until then its target has NaN"
        ),
    ),
    Setting(
        "faults",
        Faults(LIMITS["FAULTS"]),
        readers=_CONFIG,
        simulate=Option("a list of faults as JSON", "FILE", is_repeated=True),
    ),
    Setting("base", Environment(), is_of_a_run=True),
)
"""The parameters of `environment` and arguments of the mark, in the order of the signature."""

_OPTIONS = (
    Setting(
        "nodes",
        Count("nodes", 1, LIMITS["RANKS"]),
        readers=("libaccelerator-hosts",),
        fallback="0",
        simulate=Option("run COMMAND once on each of K machines with N GPUs; each line of output begins with its node", "K"),
    ),
    Setting(
        "on_node_failure",
        Choice("stop", "continue"),
        simulate=Option("whether the other nodes go on when a node fails (default: stop)"),
    ),
    Setting(
        "fault",
        FaultWords(),
        simulate=Option(
            "a fault of a GPU, such as xid=94,gpu=1,after_ops=400; repeat it for more", "WHAT[,KEY=VALUE...]", is_repeated=True
        ),
    ),
    Setting(
        "build",
        ValueType(),
        simulate=Option(f"compile the simulated libraries into DIR and run nothing; {PREFIX}LIBRARIES=DIR uses them", "DIR"),
    ),
    Setting(
        "world_size",
        Count("ranks", 1, 2**31 - 1),
        rehearse=Option("number of ranks of the world that the command is one rank of", "W"),
    ),
    Setting("rank", ValueType(), rehearse=Option("the ranks to rehearse, one after the other (default: 0)", "R[,R...]")),
    Setting("json", ValueType(), rehearse=Option("write the figures as JSON", "FILE")),
    Setting(
        "snapshot",
        ValueType(),
        readers=("inside",),
        is_read_early=True,
        rehearse=Option("write torch's memory snapshots, one file a rank, for https://pytorch.org/memory_viz", "DIR"),
    ),
    Setting(
        "plot",
        ValueType(),
        readers=("inside",),
        is_read_early=True,
        rehearse=Option("draw the memory over the run, by what holds it", "FILE.svg"),
    ),
)
_VARIABLES = (
    # Other settings decide these, or commands set them for the processes that they start.
    Setting("driver_version", ValueType(), readers=_CONFIG, fallback=driver_version(_NEWEST_CUDA)),
    # What the driver of each GPU reserves of its memory, in bytes.
    Setting("reserves", ValueType(), readers=_CONFIG, fallback="0"),
    # The number of a node of a cluster.
    Setting("node", ValueType(), readers=(*_CONFIG, "libcudart", "libaccelerator-hosts", "inside", "outside"), fallback="0"),
    # The folder to which the processes of a rehearsal write their figures.
    Setting("rehearse", ValueType(), readers=(*_CONFIG, "inside"), is_read_early=True, fallback=""),
    # "1" if no other rank of the world runs.
    Setting("without_peers", ValueType(), readers=("libnccl", "inside"), is_read_early=True),
    # The tokens of the runs that a process belongs to, and "1" if the problem of its kernels was told.
    Setting("run", ValueType(), readers=("inside",)),
    Setting("told", ValueType(), readers=("inside",)),
    # The file of the races of all processes, and the test that a process belongs to.
    Setting("race_file", ValueType(), readers=("libcudart", "outside")),
    Setting("race_test", ValueType(), readers=("libcudart",)),
    # Milliseconds that functions take to initialize, such as "cuInit:300,nvmlInit:50", for tests.
    Setting("init_delay", ValueType(), readers=_CONFIG, fallback=""),
    # The interpreter that translates kernels, and the directory for what it makes.
    Setting("python", ValueType(), readers=("libcudart",)),
    Setting("kernel_cache", ValueType(), readers=("libcudart",)),
    # Variables that users set.
    Setting("kernel_timeout", ValueType(), readers=("libcudart",), is_set_by_user=True, fallback="60"),
    Setting("nccl_timeout", ValueType(), readers=("libnccl",), is_set_by_user=True, fallback="600"),
    Setting("own_kernels", ValueType(), readers=("inside",), is_read_early=True, is_set_by_user=True),
    Setting("libraries", ValueType(), readers=("inside", "outside"), is_set_by_user=True),
)
SETTINGS = (*PARAMETERS, *_OPTIONS, *_VARIABLES)

_BY_NAME = {setting.name: setting for setting in SETTINGS}


def find(name: str) -> Setting:
    """Return a setting."""
    return _BY_NAME[name]


def variable(name: str) -> str:
    """Return the name of a setting's environment variable."""
    return PREFIX + _BY_NAME[name].variable


def read(name: str) -> str | None:
    """Return the text of a setting in this process's environment."""
    return os.environ.get(PREFIX + _BY_NAME[name].variable)


def encode(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Check the parameters of `environment`, and return the texts of their variables, by the names of the settings.

    Raises:
        TypeError: A parameter has the wrong type.
        ValueError: A parameter has an invalid value.
    """
    gpus, texts = 0, dict[str, str]()
    for setting in PARAMETERS:
        text = setting.type.encode(setting.name, parameters[setting.name], gpus)
        if setting.name == "gpus":
            gpus = parameters["gpus"]
        if text is not None and setting.variable:
            texts[setting.name] = text
    return texts
