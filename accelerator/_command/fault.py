"""The command line of ``python -m accelerator fault``: break the GPUs of a simulated machine that runs, and mend them."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ..simulation import _settings
from ..simulation._outside import machine_faults
from ..simulation._outside.processes import report
from ..simulation._settings import fault_words
from . import terminal

_VERBS = ("status", "clear", "reset", "restart")

_DESCRIPTION = """\
Break GPUs of a simulated machine while its programs run, and mend them.

WHAT is a fault as --fault of simulate takes it: xid=94, hang, slow=20ms, link,
flip=BIT or kill, with keys such as gpu=1, after_ops=400 and for=2, separated by
commas or blanks. Other words:
  status [node=N]   the faults, when and whom they hit, and what they left
  clear [gpu=N]     all causes are gone: hung GPUs go on, lost ones are back
  reset [gpu=N]     nvidia-smi --gpu-reset: ends errors of new processes, and
                    the contexts of those that use the GPU; not for a lost GPU
  restart node=N    starts the command of a node again that has failed, with
                    --on-node-failure continue; its GPUs stay as they are
Errors of a process stay until it ends, as on a GPU."""


def main(argv: list[str]) -> int:
    """Break or mend GPUs of a machine that runs.

    Args:
        argv: What follows ``python -m accelerator fault`` on the command line.

    Returns:
        The exit status: 0; 1 if no machine runs, or several; 2 if the usage is wrong.
    """
    parser = terminal.Parser(
        prog="python -m accelerator fault",
        usage="%(prog)s [--state FILE] WHAT... | status | clear | reset | restart",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--state", metavar="FILE", help="the state of the machine (default: the one machine that runs)")
    parser.add_argument("words", nargs="+", metavar="WHAT", help=argparse.SUPPRESS)
    try:
        options = parser.parse_args(argv)
        # The verb may follow the node: "node=1 restart".
        verb, *rest = sorted(options.words, key=lambda word: word not in _VERBS)
        try:
            if verb in _VERBS:
                gpu, node = fault_words.parse_gpu(rest)
                fault = None
                if (verb == "restart" and node is None) or (gpu is not None and verb in ("status", "restart")):
                    raise ValueError(f"{verb} takes node=N")
            else:
                fault = fault_words.parse(",".join(options.words))
                gpu, node = fault.gpu, fault.node
        except ValueError as error:
            parser.error(str(error))
    except SystemExit as stop:
        return int(stop.code or 0)
    given = None if options.state is None else Path(options.state)
    try:
        if verb == "restart":
            assert node is not None  # checked above
            own = os.environ.get(_settings.variable("state"))
            machine_faults.restart(node, Path(own) if own and given is None else given)
            return 0
        states = _states(given, node, is_for_all=verb == "status")
        for state in states:
            if fault is not None:
                machine_faults.add(state, fault)
            elif verb == "status":
                text = machine_faults.describe(state)
                terminal.write(f"{state}\n{text}" if len(states) > 1 else text or "no faults\n")
            else:
                machine_faults.end(state, gpu, is_reset=verb == "reset")
    except RuntimeError as error:
        report(parser.prog, str(error))
        return 1
    return 0


def _states(given: Path | None, node: int | None, *, is_for_all: bool) -> list[Path]:
    """Return the states of the machines that the command is for.

    Raises:
        RuntimeError: There is none, or there are several and the command does not say which.
    """
    if given is not None:
        if not given.exists():
            raise RuntimeError(f"{given}: there is no such file")
        return [given]
    states = machine_faults.find_states(os.environ.get(_settings.variable("state")))
    if node is not None:
        states = [state for state in states if state.name == f"state-{node}"]
    if not states:
        of_node = "" if node is None else f" with a node {node}"
        raise RuntimeError(f"no simulated machine{of_node} runs on which a process has used a GPU")
    if len(states) > 1 and not is_for_all:
        raise RuntimeError(f"several machines run; name one by node=N or --state: {', '.join(map(str, states))}")
    return states
