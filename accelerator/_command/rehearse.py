"""The command line of ``python -m accelerator rehearse``: run on GPUs that compute nothing, say if it fits, write files."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any, NamedTuple

from ..simulation import _settings, environment
from ..simulation._outside.processes import run
from ..simulation._outside.state_folder import state_folder
from ..simulation._settings import known_gpus, rehearsal_record
from . import memory_plot, rehearse_report
from .run_parser import RunParser, report_error, report_unknown_names

_PROGRESS_S = 1.0
_DESCRIPTION = """\
Run COMMAND at full size on simulated GPUs that compute nothing, and print what
memory it needs. torch's own allocator decides: what is printed is what a GPU
of that size would have reserved, out of memory included.

Ranks that COMMAND starts itself (torchrun, mp.spawn, an engine's workers) run
together, and all are reported. With --world-size each named rank runs alone,
one after the other, as that rank of a larger world."""
_EPILOG = """\
  python -m accelerator rehearse --name H100 --gpus 8 --world-size 128 \\
      --rank 0,127 -- python train.py

A known --name sets memory and capability:
{names}

The exit status is COMMAND's; with several ranks the first that is not 0. It is
2 on wrong usage, or if GPUs cannot be simulated here or with this torch."""


def main(argv: list[str]) -> int:
    """Rehearse a command.

    Args:
        argv: What follows ``python -m accelerator rehearse`` on the command line.

    Returns:
        The command's exit status, or that of the first rank that failed; 2 if the usage is wrong.

    Example:
        >>> from accelerator._command.rehearse import main
        >>> main(["--gpus", "2", "--", "true"])
        0
    """
    parser = _parser()
    try:
        options, command = parser.parse(argv)
        parser.require(command)
        options.gpus = 1 if options.gpus is None else options.gpus
        ranks = _ranks(parser, options)
        machine = _machine(parser, options)
    except SystemExit as stop:
        return int(stop.code or 0)
    if options.capability is None:
        report_unknown_names("rehearse", options.name or ())
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(state_folder())
            runs = [_rehearse(rank, folder, parser.prog, command, options, machine) for rank in ranks]
        except (ValueError, OSError) as error:
            return report_error("rehearse", str(error))
        except RuntimeError as error:
            return report_error("rehearse", f"cannot simulate GPUs: {error}")
        return _report(runs, options)


class _Run(NamedTuple):
    """What one run of the command has left: its status, the figures of its ranks, and why the kernels are missing, if so."""

    status: int
    ranks: list[rehearsal_record.Rank]
    problem: str


def _rehearse(
    rank: int | None, folder: Path, caller: str, command: list[str], options: argparse.Namespace, machine: dict[str, Any]
) -> _Run:
    """Run the command, as one rank alone or as all of them.

    Raises:
        ValueError, OSError, RuntimeError: the run cannot be prepared.
    """
    reports = folder / f"reports-{rank}"
    reports.mkdir()
    base = {**os.environ, **_world(options, rank)}
    child = environment(**machine, compute=False, state=folder / f"rehearsed-{rank}", base=base)
    _prepare(options, child, reports, is_alone=rank is not None)
    with _Progress(rank, reports):
        status = run(caller, command, child)
    # Processes that go on find their folder gone, and so write nothing while this one reads it and removes it.
    found = rehearsal_record.read_ranks(reports.rename(folder / f"read-{rank}"))
    return _Run(status, found, _read_problem(folder / f"rehearsed-{rank}"))


def _report(runs: list[_Run], options: argparse.Namespace) -> int:
    """Print the table, write the files, and return the first status that is not 0."""
    entries = [entry for each in runs for entry in rehearse_report.entries_of(each.ranks, each.status)]
    found = [rank for each in runs for rank in each.ranks]
    statuses = [each.status for each in runs]
    problem = next((each.problem for each in runs if each.problem), "")
    values = rehearse_report.values_of(found)
    if entries or not problem:
        sys.stderr.write(rehearse_report.format_table(entries, values))
    if problem:
        statuses.append(report_error("rehearse", problem))
    try:
        _write_files(options, found, entries, values)
    except OSError as error:
        statuses.append(report_error("rehearse", str(error)))
    return next(filter(None, statuses), 0)


def _write_files(
    options: argparse.Namespace,
    ranks: list[rehearsal_record.Rank],
    entries: list[rehearse_report.Entry],
    values: list[rehearsal_record.MissingValue],
) -> None:
    """Write the files that were asked for."""
    if options.json:
        Path(options.json).write_text(rehearse_report.format_json(entries, values), encoding="utf-8")
    if options.plot:
        memory_plot.write(Path(options.plot), ranks)
    for rank in ranks:
        if rank.snapshot is not None:
            shutil.move(rank.snapshot, os.path.join(options.snapshot, f"rank{rank.rank}.pickle"))


def _parser() -> RunParser:
    names = textwrap.fill(known_gpus.names(), 79, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return RunParser("rehearse", _DESCRIPTION, _EPILOG.format(names=names))


def _machine(parser: RunParser, options: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters of `environment`, which takes memory and capability from a known name."""
    [name] = options.name or [""]
    if name and known_gpus.find(name) is None and options.memory is None:
        parser.error(f"no GPU named {name!r} is known: give --memory, or one of the names {known_gpus.names()}")
    return parser.parameters(options)


def _read_problem(state: Path) -> str:
    """Return why the processes of a machine could not be rehearsed, or nothing."""
    file = state.with_name(f"{state.name}{_settings.PROBLEM_SUFFIX}")
    return file.read_text(encoding="utf-8") if file.exists() else ""


def _ranks(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[int] | list[None]:
    """Return the ranks to run, or None for a command that starts its own."""
    if options.world_size is None:
        if options.rank is not None:
            parser.error("--rank needs --world-size")
        return [None]
    try:
        ranks = [int(word) for word in (options.rank or "0").split(",")]
    except ValueError:
        parser.error(f"--rank must be numbers separated by commas, not {options.rank!r}")
    wrong = next((rank for rank in ranks if not 0 <= rank < options.world_size), None)
    if wrong is not None:
        parser.error(f"rank {wrong} is not in a world of {options.world_size}")
    if len(set(ranks)) < len(ranks):
        parser.error(f"--rank names a rank twice: {options.rank}")
    if options.gpus < 1:
        parser.error("a rank needs a GPU: --gpus must be at least 1")
    return ranks


def _world(options: argparse.Namespace, rank: int | None) -> dict[str, str]:
    """Return the variables that torchrun would set for a rank."""
    if rank is None:
        return {}
    local = min(options.gpus, options.world_size)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(options.world_size),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(rank // local),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }


def _prepare(options: argparse.Namespace, child: dict[str, str], reports: Path, is_alone: bool) -> None:
    """Tell the processes of the command to record themselves, and a rank that runs alone not to wait for other ranks."""
    if is_alone:
        child[_settings.variable("without_peers")] = "1"
    child[_settings.variable("rehearse")] = str(reports)
    if options.snapshot:
        os.makedirs(options.snapshot, exist_ok=True)
    for name in ("snapshot", "plot"):
        if getattr(options, name):
            child[_settings.variable(name)] = "1"


class _Progress:
    """Shows on a terminal which rank runs, for how long, and its memory so far."""

    def __init__(self, rank: int | None, reports: Path) -> None:
        self._label = "rehearsal" if rank is None else f"rank {rank}"
        self._reports = reports
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True) if sys.stderr.isatty() else None

    def __enter__(self) -> None:
        if self._thread is not None:
            # `run` waits for the command by its signals, which this thread would receive in its place.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            try:
                self._thread.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __exit__(self, *exception: object) -> None:
        self._has_ended.set()
        if self._thread is not None:
            self._thread.join()

    def _show(self) -> None:
        seconds = 0
        while not self._has_ended.wait(_PROGRESS_S):
            seconds += 1
            ranks = rehearsal_record.read_ranks(self._reports)
            devices = [device for rank in ranks for device in rank.record.devices]
            reserved = max((device.statistics.reserved for device in devices), default=0)
            sys.stderr.write(f"\r\x1b[K{self._label}: {seconds} s, {rehearse_report.format_size(reserved)} reserved so far")
            sys.stderr.flush()
        sys.stderr.write("\r\x1b[K")
