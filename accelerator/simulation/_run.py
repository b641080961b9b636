"""What ``python -m accelerator simulate`` does: run a command on a simulated machine."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from . import _build
from ._environment import environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["main", "run"]

_USAGE = 2
_NOT_EXECUTABLE = 126
_NO_SUCH_COMMAND = 127
_SIGNALLED = 128

_DESCRIPTION = """\
Run COMMAND on a machine with simulated GPUs, under the real CUDA build of torch.

torch's ops compute, on the CPU and in the simulated memory. An op that is not simulated raises NotImplementedError; a
kernel launched past torch's dispatcher (Triton, an extension) fails and is named. Work takes no time on a stream but for
torch.cuda._sleep. With --no-compute, kernels are launched and compute nothing: for tests of the management of devices."""
_EPILOG = """\
Values for single GPUs are separated by commas (names are not) or given by repeating the option; the last repeats:
  python -m accelerator simulate --gpus 4 --memory 80GiB,24GiB -- python -m pytest
A machine without any NVIDIA driver: --driver absent --nvml absent

Exits with the status of COMMAND, 128 + N if signal N ended it, 127 if it was not found, 2 on wrong usage or where
GPUs cannot be simulated: that takes Linux on x86-64, a torch built for CUDA, and a C compiler the first time."""


class _Parser(argparse.ArgumentParser):
    """A parser that reports wrong usage in one line."""

    def error(self, message: str) -> NoReturn:
        """Report wrong usage."""
        self.exit(_USAGE, f"{self.prog}: {message} (--help explains)\n")


def main(argv: list[str]) -> int:
    """Run a command on a simulated machine.

    Args:
        argv: What follows ``python -m accelerator simulate`` on the command line.

    Returns:
        The command's exit status, 128 + N if signal N ended it; 126 and 127 as a shell, if it cannot be started; 2 if
        the usage is wrong or GPUs cannot be simulated here.

    Example:
        >>> from accelerator.simulation._run import main
        >>> main(["--gpus", "2", "--", "true"])
        0
    """
    parser = _parser()
    try:
        options = parser.parse_args(argv)
        command: list[str] = options.command
        if command[:1] == ["--"]:
            del command[0]
        if options.build is not None:
            if command:
                parser.error("--build takes no command")
            return _build_into(options.build)
        if not command or not command[0]:
            parser.error("no command: give one after --")
    except SystemExit as stop:
        return int(stop.code or 0)
    with tempfile.TemporaryDirectory(prefix="accelerator-simulation-") as directory:
        try:
            child = environment(
                options.gpus,
                memory=_split(options.memory or ["8GiB"]),
                name=options.name or ["Simulated GPU"],
                capability=_split(options.capability or ["9.0"]),
                mig=[None if word == "off" else int(word) for word in _split(options.mig or ["off"])],
                nvlink=_groups(_split(options.nvlink or ["off"])),
                numa=[int(word) for word in _split(options.numa or ["0"])],
                driver=options.driver,
                nvml=options.nvml,
                compute=not options.no_compute,
                state=Path(directory, "state"),
            )
        except ValueError as error:
            return _complain(str(error), _USAGE)
        except RuntimeError as error:
            return _complain(f"cannot simulate GPUs: {error}", _USAGE)
        return run(command, child)


def _parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = _Parser(
        prog="python -m accelerator simulate",
        usage="%(prog)s [OPTIONS] -- COMMAND...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--gpus", type=int, default=1, metavar="N", help="number of GPUs, 0 included (1)")
    add("--memory", action="append", metavar="SIZE", help="memory of a GPU, such as 512MiB (8GiB)")
    add("--name", action="append", metavar="NAME", help='name of a GPU; give it again for the next ("Simulated GPU")')
    add("--capability", action="append", metavar="X.Y", help="compute capability of a GPU (9.0)")
    add("--mig", action="append", type=_mig, metavar="K", help="MIG instances of a GPU, or off (off)")
    add("--nvlink", action="append", type=_nvlink, metavar="GROUP", help="group of GPUs linked by NVLink, all or off (off)")
    add("--numa", action="append", type=_nodes, metavar="NODE", help="NUMA node of a GPU (0)")
    add(
        "--driver",
        choices=("present", "absent", "old", "broken"),
        default="present",
        help="the CUDA driver: there, not there, older than torch needs, or failing to start (present)",
    )
    add(
        "--nvml",
        choices=("present", "absent", "broken", "mismatch"),
        default="present",
        help="the NVML library: there, not there, failing to start, or not fitting its kernel driver (present)",
    )
    add("--no-compute", action="store_true", help="kernels are launched and compute nothing")
    add(
        "--build",
        metavar="DIR",
        help="compile the libraries into DIR and run nothing; ACCELERATOR_SIM_LIBRARIES=DIR finds them",
    )
    add("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command to run, after --")
    return parser


def _mig(text: str) -> str:
    """Check the words of --mig."""
    if re.fullmatch(r"(off|[0-9]+)(,(off|[0-9]+))*", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of instances or off")
    return text


def _nvlink(text: str) -> str:
    """Check the words of --nvlink."""
    if re.fullmatch(r"all|(off|[0-9]+)(,(off|[0-9]+))*", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not all, off, or a group for each GPU")
    return text


def _groups(words: Sequence[str]) -> bool | list[int | None]:
    """Read the words of --nvlink."""
    if list(words) == ["all"]:
        return True
    if "all" in words:
        raise ValueError("nvlink must be all, or off or a group for each GPU, not both")
    return [None if word == "off" else int(word) for word in words]


def _nodes(text: str) -> str:
    """Check the numbers of --numa."""
    if re.fullmatch(r"[0-9]+(,[0-9]+)*", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a node for each GPU")
    return text


def _split(values: Sequence[str]) -> list[str]:
    """Take apart what was separated by commas."""
    return [word.strip() for value in values for word in value.split(",")]


def _build_into(directory: str) -> int:
    """Compile the libraries for machines that have no compiler."""
    reason = _build.platform_problem()
    if reason is not None:
        return _complain(f"cannot simulate GPUs: {reason}", _USAGE)
    try:
        print(_build.build(Path(os.path.abspath(directory))))
    except (OSError, RuntimeError) as error:
        return _complain(f"cannot build into {directory}: {error}", _USAGE)
    return 0


def run(command: list[str], child: Mapping[str, str]) -> int:
    """Start the command, hand on the signals that other processes send, and wait for it."""
    if sys.platform != "linux":
        raise AssertionError("simulated GPUs are for Linux")  # `environment` has raised: this tells type checkers
    handed_on = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
    awaited = {*handed_on, signal.SIGCHLD}
    # Blocked rather than handled: what arrives while the command starts waits for us, and waiting tells who sent it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    # Ignored, as who started this process may have left it, the signal never comes and the command's status is lost.
    is_ignored = signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN
    if is_ignored:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        try:
            # The machine's own programs are on the path of the command, not on this process's.
            program = shutil.which(command[0], path=child.get("PATH")) or command[0]
            pid = os.posix_spawnp(program, command, child, setsigmask=before, setsigdef=[signal.SIGPIPE, signal.SIGXFSZ])
        except FileNotFoundError:
            return _complain(f"{command[0]}: command not found", _NO_SUCH_COMMAND)
        except OSError as error:
            return _complain(f"{command[0]}: {error.strerror}", _NOT_EXECUTABLE)
        while True:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else _SIGNALLED - code
            received = signal.sigwaitinfo(awaited)
            # A positive code is the kernel's: the terminal has sent the signal to the command as well.
            if received.si_signo != signal.SIGCHLD and received.si_code <= 0:
                os.kill(pid, received.si_signo)
    finally:
        # What came too late for the command is not to end this process before it reported and tidied up.
        while signal.sigtimedwait(awaited, 0) is not None:
            pass
        if is_ignored:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _complain(message: str, status: int) -> int:
    """Print one line about what went wrong."""
    print(f"python -m accelerator simulate: {message}", file=sys.stderr)
    return status
