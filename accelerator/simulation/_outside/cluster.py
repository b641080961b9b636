"""Runs a command on each node of a simulated cluster, and ends all nodes when one fails: signals and the time between them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path

from .. import _settings
from . import processes
from .guard import guarded
from .node_output import NodeOutput
from .state_folder import ended_mark

# How long processes have to end after each signal (a forwarded one, SIGTERM) before they get the next, stronger one.
_GRACE_S = 10.0
_POLL_S = 0.05
_MARKS_POLL_S = 0.2
_ADDRESS = "127.0.0.1"
# Below the ports that Linux gives to outgoing connections, one of which could take the port before COMMAND listens on it.
_PORTS = range(20000, 32000)
_STDIN, _STDOUT, _STDERR = range(3)
_SET_CHILD_SUBREAPER = 36  # of prctl(2)


def node_environments(machine: Mapping[str, str], nodes: int, folder: Path) -> list[dict[str, str]]:
    """Return the environment of each node.

    Args:
        machine: The environment of a simulated machine.
        nodes: The number of nodes.
        folder: Where the state of each node is kept.
    """
    count, port = str(nodes), str(_free_port())
    return [
        {
            "PYTHONUNBUFFERED": "1",  # the output is a pipe; with torch, the plug-in makes it whole lines
            **machine,
            _settings.variable("node"): str(node),
            _settings.variable("nodes"): count,
            _settings.variable("state"): str(folder / f"state-{node}"),
            "PET_NNODES": count,
            "PET_NODE_RANK": str(node),
            "PET_MASTER_ADDR": _ADDRESS,
            "PET_MASTER_PORT": port,
            "PET_RDZV_ENDPOINT": f"{_ADDRESS}:{port}",
            "SLURM_NNODES": count,
            "SLURM_JOB_NUM_NODES": count,
            "SLURM_NODEID": str(node),
            "SLURM_GPUS_ON_NODE": machine[_settings.variable("gpus")],
            "SLURM_LAUNCH_NODE_IPADDR": _ADDRESS,
            "SLURMD_NODENAME": f"node{node}",
        }
        for node in range(nodes)
    ]


def run(caller: str, command: list[str], environments: list[dict[str, str]], *, goes_on: bool = False) -> int:
    """Run a command on each node, and return 0 or the exit status of the first node that failed.

    Signals that other processes send to this one are forwarded to all nodes. When a node fails, the others are ended, or go on
    and the exit status is that of the node that ends last.
    If they go on, a node that failed is started again when its mark is removed (``state_folder.ended_mark``).
    When all nodes have ended, the processes that their commands left behind are ended. If this process is killed, all end.
    The last line of stderr names the node that failed first, because the others may write much while they end.

    Args:
        caller: What runs it, such as ``python -m accelerator simulate``: messages begin with it.
        command: The program and its arguments.
        environments: The environment of each node.
        goes_on: Whether the other nodes go on when a node fails.
    """
    with guarded() as variables, processes.handle_signals() as signals, NodeOutput() as output, _end_orphans():
        nodes: dict[int, int] = {}
        failure = 0
        children = [{**child, **variables} for child in environments]
        try:
            for node, child in enumerate(children):
                nodes[_start(node, command, child, signals, output)] = node
        except processes.CannotStart as problem:
            processes.report(caller, str(problem))
            failure = problem.status
        if not goes_on or failure:
            status, cause = _wait(caller, nodes, failure, signals)
        else:
            marks = [ended_mark(Path(child[_settings.variable("state")])) for child in children]
            status, cause = _wait(
                caller, nodes, 0, signals, marks, lambda node: _start(node, command, children[node], signals, output)
            )
    if cause:
        processes.report(caller, cause)
    return status


def _free_port() -> int:
    """Return a port that no process listens on."""
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind((_ADDRESS, port))
            return port
    raise RuntimeError(f"every port from {_PORTS.start} to {_PORTS.stop - 1} is in use")


def _start(node: int, command: list[str], child: Mapping[str, str], signals: processes.Signals, output: NodeOutput) -> int:
    """Start a node's command, with its output in pipes and, except on node 0, without input."""
    with contextlib.ExitStack() as descriptors:
        files = {descriptor: output.open(node, descriptor) for descriptor in (_STDOUT, _STDERR)}
        if node > 0:
            files[_STDIN] = os.open(os.devnull, os.O_RDONLY)
        for file in files.values():
            descriptors.callback(os.close, file)
        actions = [(os.POSIX_SPAWN_DUP2, file, descriptor) for descriptor, file in files.items()]
        return processes.start(command, child, signals, actions)


def _wait(
    caller: str,
    nodes: dict[int, int],
    failure: int,
    signals: processes.Signals,
    marks: Sequence[Path] = (),
    start: Callable[[int], int] | None = None,
) -> tuple[int, str]:
    """Wait until all nodes have ended.

    Args:
        caller: What runs it.
        nodes: The number of each node's process.
        failure: A status that ends the nodes, or 0.
        signals: The blocked signals.
        marks: If the other nodes go on, the file of each node that says that it has failed.
        start: Starts a node again and returns its pid. None if the other nodes do not go on.

    Returns:
        The status of the first node that failed, or of the last if they go on, and what ended the others, if a node did.
    """
    cause = ""
    next_signal, send_at = signal.SIGTERM, None
    is_signalled = False
    failed = set[int]()
    while True:
        for pid in list(nodes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                node, code = nodes.pop(pid), processes.shell_status(status)
                if start is not None and code and nodes and not is_signalled:
                    marks[node].touch()
                    failed.add(node)
                    processes.report(caller, f"node {node} failed with status {code}; the others go on")
                    continue
                if code and not failure and nodes and not is_signalled:
                    processes.report(caller, f"node {node} failed with status {code}; ending the others")
                    cause = f"node {node} failed first, with status {code}"
                failure = failure or code
        if not nodes:
            return failure, cause
        if start is not None and not is_signalled:
            for node in [node for node in failed if not marks[node].exists()]:
                failed.remove(node)
                processes.report(caller, f"node {node} starts again")
                try:
                    nodes[start(node)] = node
                except processes.CannotStart as problem:
                    processes.report(caller, str(problem))
                    failure = problem.status
        if failure and send_at is None:
            # A signal that was forwarded has told the others to end: SIGTERM at once could end them while they tidy up.
            send_at = time.monotonic() + (_GRACE_S if is_signalled else 0.0)
        if send_at is not None and time.monotonic() >= send_at:
            _send(next_signal, nodes)
            next_signal, send_at = signal.SIGKILL, time.monotonic() + _GRACE_S
        remaining = None if send_at is None else max(send_at - time.monotonic(), 0.0)
        if failed:
            remaining = _MARKS_POLL_S if remaining is None else min(remaining, _MARKS_POLL_S)
        received = signal.sigwaitinfo(signals.awaited) if remaining is None else signal.sigtimedwait(signals.awaited, remaining)
        if received is not None and received.si_signo != signal.SIGCHLD:
            is_signalled = True
            # A positive code means that the terminal sent the signal through the kernel, and the commands have received it too.
            if received.si_code <= 0:
                _send(received.si_signo, nodes)


def _send(number: int, pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def _end_orphans() -> Generator[None, None, None]:
    """Become the parent of the processes that the commands leave behind, and end them in the end."""
    others = _children()
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        begin, told = time.monotonic(), set[int]()
        # The end of an orphan may make orphans of its children.
        while (orphans := _children() - others) and time.monotonic() - begin < 2 * _GRACE_S:
            is_patient = time.monotonic() - begin < _GRACE_S
            _send(signal.SIGTERM if is_patient else signal.SIGKILL, orphans - told if is_patient else orphans)
            told |= orphans
            time.sleep(_POLL_S)
            for pid in orphans:
                os.waitpid(pid, os.WNOHANG)
        prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _children() -> set[int]:
    """Return the pids of this process's children, ended ones that were not waited for included."""
    children: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            fields = path.read_bytes().rpartition(b")")[2].split()  # the name before it may be no text
            if int(fields[1]) == os.getpid():
                children.add(int(path.parent.name))
    return children
