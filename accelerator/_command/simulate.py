"""The command line of ``python -m accelerator simulate``: run a command on a simulated machine."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ..simulation import environment
from ..simulation._build import engine, libraries
from ..simulation._outside import machine_faults
from ..simulation._outside.environment import RACES_SUFFIX
from ..simulation._outside.processes import report, run
from ..simulation._outside.state_folder import state_folder
from .run_parser import RunParser, report_error, report_unknown_names

_RACE = 1

_DESCRIPTION = """\
Run COMMAND on a machine with simulated GPUs, under the real CUDA build of
torch.

torch's ops compute, on the CPU and in the simulated memory. torch.compile and
Triton compile as for a GPU. Triton's kernels and CUDA kernels of extensions run
from their PTX; those that cannot run fail and are named. An op that is not
simulated raises NotImplementedError."""
_EPILOG = """\
Options of a GPU take a value for each GPU, separated by commas or as repeated
options; the last value holds for the remaining GPUs. A name may contain
commas, so --name is repeated only:
  python -m accelerator simulate --gpus 4 --memory 80GiB,24GiB -- pytest
A machine without any NVIDIA driver: --driver absent --nvml absent

The exit status is COMMAND's: 128 + N if signal N ended it, 126 if it is not
executable, 127 if it was not found; with --races, 1 instead of 0 if any of its
processes had a race. It is 2 on wrong usage or if GPUs cannot
be simulated here. This needs Linux on x86-64, a torch built for CUDA and a C
compiler, unless the wheel contains the libraries or they were built before.

Ranks on several machines:
  python -m accelerator simulate --nodes 2 --gpus 4 -- \\
      torchrun --nproc-per-node 4 train.py
torchrun reads the number of nodes and where they meet from its environment.
The first node that fails ends the others; its status is the exit status. With
--on-node-failure continue they go on, and the last node's status is the exit
status."""


def main(argv: list[str]) -> int:
    """Run a command on a simulated machine.

    Args:
        argv: What follows ``python -m accelerator simulate`` on the command line.

    Returns:
        The command's exit status, 128 + N if signal N ended it; 1 instead of 0 if races were found; 126 or 127 if it cannot be
        started, as a shell does; 2 if the usage is wrong or GPUs cannot be simulated here.

    Example:
        >>> from accelerator._command.simulate import main
        >>> main(["--gpus", "2", "--", "true"])
        0
    """
    parser = RunParser("simulate", _DESCRIPTION, _EPILOG)
    try:
        options, command = parser.parse(argv)
        if options.build is not None:
            if command:
                parser.error("--build takes no command")
            if not options.build:
                parser.error("--build needs a folder")
            return _build_into(options.build)
        parser.require(command)
        if options.on_node_failure is not None and options.nodes is None:
            parser.error("--on-node-failure needs --nodes")
    except SystemExit as stop:
        return int(stop.code or 0)
    if options.memory is None or options.capability is None:
        report_unknown_names("simulate", options.name or ())
    try:
        with state_folder() as folder:
            return _simulate(parser, options, command, folder)
    except RuntimeError as error:
        return report_error("simulate", f"cannot simulate GPUs: {error}")


def _simulate(parser: RunParser, options: argparse.Namespace, command: list[str], folder: Path) -> int:
    """Run a command on the machine that the options describe, and return its exit status."""
    parameters = parser.parameters(options)
    try:
        child = environment(**parameters, state=folder / "state")
    except (TypeError, ValueError) as error:
        return report_error("simulate", str(error))
    if options.nodes is None:
        status = run(parser.prog, command, child)
    else:
        from ..simulation._outside import cluster  # imported late: most runs have one machine

        nodes = cluster.node_environments(child, options.nodes, folder)
        status = cluster.run(parser.prog, command, nodes, goes_on=options.on_node_failure == "continue")
    faults = parameters.get("faults", ())
    names = ["state"] if options.nodes is None else [f"state-{node}" for node in range(options.nodes)]
    for line in machine_faults.unfired(*(folder / name for name in names), faults=faults):
        report(parser.prog, f"the fault {line}")
    return _RACE if status == 0 and (folder / f"state{RACES_SUFFIX}").exists() else status


def _build_into(directory: str) -> int:
    """Compile the libraries, and the engine for the installed torch, for machines without a compiler."""
    reason = libraries.platform_problem()
    if reason is not None:
        return report_error("simulate", f"cannot simulate GPUs: {reason}")
    root = Path(os.path.abspath(directory))
    try:
        print(libraries.build(root))
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
        engine.build(engine.describe(torch), root)
    except RuntimeError as error:
        print(f"python -m accelerator simulate: built without the engine: {error}", file=sys.stderr)
