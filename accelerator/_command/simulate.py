"""The command line of ``python -m accelerator simulate``: run a command on a simulated machine."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..simulation import _build, _cluster, _engine_build, _values, environment
from ..simulation._environment import RACES_SUFFIX
from ..simulation._run import run
from ..simulation._state_folder import state_folder
from .run_parser import RunParser, report_error, report_unknown_names

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_RACE = 1
_MOST_NODES = 128  # ranks of a simulated communicator

_DESCRIPTION = """\
Run COMMAND on a machine with simulated GPUs, under the real CUDA build of
torch.

torch's ops compute, on the CPU and in the simulated memory. torch.compile
generates code for the CPU that runs on that memory, and Triton kernels run in
Triton's interpreter. An op that is not simulated raises NotImplementedError.
Other compiled kernels (an extension, cupy, numba) fail and are named."""
_EPILOG = """\
Options of a GPU take a value for each GPU, separated by commas or as repeated
options; the last value holds for the remaining GPUs. A name may contain
commas, so --name is repeated only:
  python -m accelerator simulate --gpus 4 --memory 80GiB,24GiB -- pytest
A machine without any NVIDIA driver: --driver absent --nvml absent

The exit status is COMMAND's: 128 + N if signal N ended it, 126 if it is not
executable, 127 if it was not found; with --races 1 instead of 0 if any of its
processes had a race. It is 2 on wrong usage or if GPUs cannot
be simulated here. This needs Linux on x86-64, a torch built for CUDA and, the
first time, a C compiler.

Ranks on several machines:
  python -m accelerator simulate --nodes 2 --gpus 4 -- \\
      torchrun --nproc-per-node 4 train.py
torchrun reads the number of nodes and where they meet from its environment.
The first node that fails ends the others; its status is the exit status."""


def main(argv: list[str]) -> int:
    """Run a command on a simulated machine.

    Args:
        argv: What follows ``python -m accelerator simulate`` on the command line.

    Returns:
        The command's exit status, 128 + N if signal N ended it; 126 or 127 if it cannot be started, as a shell does;
        2 if the usage is wrong or GPUs cannot be simulated here.

    Example:
        >>> from accelerator._command.simulate import main
        >>> main(["--gpus", "2", "--", "true"])
        0
    """
    parser = _parser()
    try:
        options, command = parser.parse(argv)
        if options.build is not None:
            if command:
                parser.error("--build takes no command")
            if not options.build:
                parser.error("--build needs a folder")
            return _build_into(options.build)
        parser.require(command)
    except SystemExit as stop:
        return int(stop.code or 0)
    if options.memory is None or options.capability is None:
        report_unknown_names("simulate", options.name or ())
    try:
        with state_folder() as folder:
            return _simulate(options, command, folder)
    except RuntimeError as error:
        return report_error("simulate", f"cannot simulate GPUs: {error}")


def _simulate(options: argparse.Namespace, command: list[str], folder: Path) -> int:
    """Run a command on the machine that the options describe, and return its exit status."""
    try:
        child = environment(
            options.gpus,
            memory=_split(options.memory) if options.memory else None,
            name=options.name or ["Simulated GPU"],
            capability=_split(options.capability) if options.capability else None,
            mig=[None if word == "off" else int(word) for word in _split(options.mig or ["off"])],
            nvlink=_nvlink_groups(_split(options.nvlink or ["off"])),
            numa=[int(word) for word in _split(options.numa or ["0"])],
            driver=options.driver,
            nvml=options.nvml,
            compute=not options.no_compute,
            fill=options.fill,
            triton=not options.no_triton,
            compile=options.compile,
            races=options.races,
            late_copies=options.late_copies,
            state=folder / "state",
        )
    except ValueError as error:
        return report_error("simulate", str(error))
    if options.nodes is None:
        status = run(command, child)
    else:
        status = _cluster.run(command, _cluster.node_environments(child, options.nodes, options.gpus, folder))
    return _RACE if status == 0 and (folder / f"state{RACES_SUFFIX}").exists() else status


def _parser() -> RunParser:
    """Describe the command line."""
    parser = RunParser("simulate", _DESCRIPTION, _EPILOG)
    add = parser.add_argument
    add("--gpus", type=_values.gpus_of_option, default=1, metavar="N", help="number of GPUs, 0 included (default: 1)")
    add(
        "--nodes",
        type=_nodes,
        metavar="K",
        help="run COMMAND once on each of K machines with N GPUs; each line of output begins with its node",
    )
    add(
        "--memory", action="append", metavar="SIZE", help="memory of a GPU, such as 512MiB (default: that of --name, else 8GiB)"
    )
    add(
        "--name",
        action="append",
        metavar="NAME",
        help="name of a GPU, such as H100, which sets memory and capability if it is known; repeat it for the next GPU "
        '(default: "Simulated GPU")',
    )
    add("--capability", action="append", metavar="X.Y", help="compute capability of a GPU (default: that of --name, else 9.0)")
    add("--mig", action="append", type=_mig, metavar="K", help="MIG instances of a GPU, or off (default: off)")
    add(
        "--nvlink",
        action="append",
        type=_nvlink,
        metavar="GROUP",
        help="group of GPUs linked by NVLink, all or off (default: off)",
    )
    add("--numa", action="append", type=_numa_nodes, metavar="NODE", help="NUMA node of a GPU (default: 0)")
    add(
        "--driver",
        choices=("present", "absent", "old", "broken"),
        default="present",
        metavar="STATE",
        help="the CUDA driver: present (the default), absent, old (older than torch needs) or broken (fails to start)",
    )
    add(
        "--nvml",
        choices=("present", "absent", "broken", "mismatch"),
        default="present",
        metavar="STATE",
        help="the NVML library: present (the default), absent, broken (fails to start) or mismatch (not of the kernel driver's "
        "version)",
    )
    add("--no-compute", action="store_true", help="ops allocate their results and compute nothing")
    add(
        "--fill",
        choices=("zero", "nan"),
        default="zero",
        help="content of new device memory; nan exposes reads of uninitialized memory (default: zero)",
    )
    add("--no-triton", action="store_true", help="launching a Triton kernel fails")
    add(
        "--compile",
        choices=("cpp", "triton"),
        default="cpp",
        help="what torch.compile generates: C++ for the CPU, or the Triton code of a real GPU, which the interpreter runs "
        "slowly (default: cpp)",
    )
    add(
        "--races",
        choices=("report", "raise"),
        help="report accesses to the same memory that nothing orders; raise: the second op also raises RuntimeError",
    )
    add(
        "--late-copies",
        action="store_true",
        help="a non_blocking copy to pinned memory arrives when the host synchronizes; until then its target has NaN",
    )
    add(
        "--build",
        metavar="DIR",
        help="compile the simulated libraries into DIR and run nothing; ACCELERATOR_SIM_LIBRARIES=DIR uses them",
    )
    return parser


def _nodes(text: str) -> int:
    """Convert the value of --nodes."""
    if re.fullmatch(r"[1-9][0-9]{0,2}", text) is None or int(text) > _MOST_NODES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of nodes from 1 to {_MOST_NODES}")
    return int(text)


def _without_blanks(text: str) -> str:
    """Remove blanks at commas."""
    return re.sub(r"\s*,\s*", ",", text.strip())


def _mig(text: str) -> str:
    """Check a value of --mig."""
    text = _without_blanks(text)
    if re.fullmatch(r"(off|[0-9]+)(,(off|[0-9]+))*", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of instances or off")
    return text


def _nvlink(text: str) -> str:
    """Check a value of --nvlink."""
    text = _without_blanks(text)
    if re.fullmatch(r"all|(off|[0-9]+)(,(off|[0-9]+))*", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not all, off, or a group for each GPU")
    return text


def _nvlink_groups(words: Sequence[str]) -> bool | list[int | None]:
    """Convert the values of --nvlink."""
    if list(words) == ["all"]:
        return True
    if "all" in words:
        raise ValueError("nvlink must be all, or off or a group for each GPU, not both")
    return [None if word == "off" else int(word) for word in words]


def _numa_nodes(text: str) -> str:
    """Check a value of --numa."""
    text = _without_blanks(text)
    if re.fullmatch(r"[0-9]+(,[0-9]+)*", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a node for each GPU")
    return text


def _split(values: Sequence[str]) -> list[str]:
    """Split values at commas."""
    return [word.strip() for value in values for word in value.split(",")]


def _build_into(directory: str) -> int:
    """Compile the libraries, and the engine for the installed torch, for machines without a compiler."""
    reason = _build.platform_problem()
    if reason is not None:
        return report_error("simulate", f"cannot simulate GPUs: {reason}")
    root = Path(os.path.abspath(directory))
    try:
        print(_build.build(root))
        _build_engine_into(root)
    except (OSError, RuntimeError) as error:
        return report_error("simulate", f"cannot build into {directory}: {error}")
    return 0


def _build_engine_into(root: Path) -> None:
    """Compile the engine if a CUDA build of torch can be imported and there is a C++ compiler."""
    try:
        import torch
    except Exception:  # whatever a damaged torch raises, the libraries are built
        return
    if torch.version.cuda is None:
        return
    try:
        _engine_build.build(_engine_build.describe(torch), root)
    except RuntimeError as error:
        print(f"python -m accelerator simulate: built without the engine: {error}", file=sys.stderr)
