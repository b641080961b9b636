"""Faults of a machine that runs: inject them, end them, and say what they did.

The simulated driver reads and writes the table of faults (``native/faults``). A process outside of the machine loads the driver
too, and names the file of the machine's state.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import _settings
from .._settings import fault_words
from .environment import is_simulated

_TEXT_SIZE = 1 << 16
_ANY_GPU = -1


def inject_fault(fault: str | Mapping[str, Any]) -> None:
    """Inject a fault into the simulated machine of this process.

    Args:
        fault: What fails, when and where, as the option ``--fault`` of ``simulate`` takes it. Without a condition it happens
            at once, in the next call of a process that uses the GPU.

    Raises:
        TypeError: The fault is no text and no mapping.
        ValueError: There is no such fault or GPU.
        RuntimeError: This process has no simulated GPUs.

    Example:
        >>> from accelerator import simulation
        >>> simulation.inject_fault("xid=94,gpu=1,after_ops=400")
    """
    parsed = fault_words.parse(fault)
    gpus = int(_settings.read("gpus") or 0)
    if not is_simulated() or gpus == 0:
        raise RuntimeError("this process has no simulated GPUs")
    if parsed.gpu is not None and parsed.gpu >= gpus:
        raise ValueError(f"fault {parsed.words!r}: there are {gpus} GPUs, numbered from 0")
    own_node = int(_settings.read("node") or 0)
    if parsed.node not in (None, own_node):
        raise ValueError(f"fault {parsed.words!r}: this process is on node {own_node}")
    try:
        add_here = _function("libcuda.so.1", "add")
    except OSError as error:
        raise RuntimeError(f"this process has no simulated GPUs: its driver cannot be loaded: {error}") from error
    problem = add_here(None, fault_words.encode([parsed]).encode(), 0)
    if problem is not None:
        raise RuntimeError(problem.decode())


def add(state: Path, fault: fault_words.Fault) -> None:
    """Inject a fault into a machine that runs.

    Raises:
        RuntimeError: The file is not the state of a machine of this version, the machine has no such GPU, or there is no place
            for more faults.
    """
    row = fault_words.encode([fault]).encode()
    _call_outside("add", state, row, int(fault.keys.get("node", 0)))


def end(state: Path, gpu: int | None, *, is_reset: bool) -> None:
    """End the faults of one GPU or of all: as a reset of the GPU ends them, or all that is left of them.

    Raises:
        RuntimeError: There is no such GPU, or the GPU to reset is lost.
    """
    number = _ANY_GPU if gpu is None else gpu
    _call_outside("end", state, number, is_reset)
    if is_reset and gpu is not None and f"\nGPU {gpu}: lost" in "\n" + describe(state):
        raise RuntimeError(f"GPU {gpu} is lost, and a reset does not bring it back; clear does")


def restart(node: int, state: Path | None) -> None:
    """Start the command of a node again that has failed, while the other nodes go on.

    Args:
        node: The number of the node.
        state: The state of a machine of the cluster; None for the one cluster that runs.

    Raises:
        RuntimeError: No such node has failed, or those of several clusters have.
    """
    import tempfile  # imported late, as below

    from .state_folder import ended_mark, ended_marks

    if state is not None:
        marks = [mark for mark in [ended_mark(state.with_name(f"state-{node}"))] if mark.exists()]
    else:
        marks = ended_marks(Path(tempfile.gettempdir()), node)
    if len(marks) > 1:
        names = ", ".join(str(mark.with_name(f"state-{node}")) for mark in marks)
        raise RuntimeError(f"node {node} of several clusters has failed; name one by --state: {names}")
    if not marks:
        raise RuntimeError(f"no node {node} has failed in a cluster that runs with --on-node-failure continue")
    marks[0].unlink()


def describe(state: Path, *, only_unfired: bool = False) -> str:
    """Return a line for each fault of a machine, and for each GPU on which faults have left something."""
    text = ctypes.create_string_buffer(_TEXT_SIZE)
    size = ctypes.c_size_t(_TEXT_SIZE)
    _call_outside("describe", state, only_unfired, text, size)
    return text.value.decode()


def find_states(own: str | None) -> list[Path]:
    """Return the states of the machines that run: this process's own, or else all of this user."""
    if own:
        return [Path(own)]
    import tempfile  # imported late: most programs that import this package do not call this

    from .state_folder import running_states

    return running_states(Path(tempfile.gettempdir()))


def unfired(*states: Path, faults: Sequence[str | Mapping[str, Any]] = ()) -> list[str]:
    """Return a line for each fault of machines whose programs have ended, if the fault never fired.

    Args:
        states: The states of the machines: one, or one for each node. A machine has none if no process used a GPU.
        faults: The faults that the machines began with, to name them if there is no state.
    """
    used = [state for state in states if state.exists()]
    lines = [line for state in used for line in describe(state, only_unfired=True).splitlines()]
    if len(used) > 1:
        # The table of each node has a fault of a rank, which only the node of the rank can fire.
        fired = {line.partition(": ")[0] for state in used for line in describe(state).splitlines() if ", fired at " in line}
        of_ranks = {line: None for line in lines if ",rank=" in line}
        lines = [line for line in lines if line not in of_ranks]
        lines += [line for line in of_ranks if line.partition(" never fired")[0] not in fired]
    for fault in map(fault_words.parse, faults):
        of_node = states if fault.node is None else [state for state in states if state.name == f"state-{fault.node}"]
        if not any(state in used for state in of_node):
            lines.append(f"{fault.words} never fired: no process used a GPU")
    return lines


def _call_outside(name: str, state: Path, *arguments: Any) -> None:
    """Call a function of the driver for the machine with a state, and raise its problem as a RuntimeError."""
    from .._build import libraries  # imported late, as above

    problem = _function(str(libraries.ensure_built() / "driver/libcuda.so.1"), name)(os.fsencode(state), *arguments)
    if problem is not None:
        raise RuntimeError(f"{state}: {problem.decode()}")


def _function(library: str, name: str) -> Any:
    """Return a function of the driver that returns a problem in words, or None."""
    function = getattr(ctypes.CDLL(library), f"accelerator_sim_faults_{name}")
    function.restype = ctypes.c_char_p
    return function
