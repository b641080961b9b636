"""An all-reduce: across the devices of this host, with a process for each that is forked before the accelerator is initialized,
or among processes that others have started.
"""

from __future__ import annotations

import os
import re
import select
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from . import acc

DEADLINE_S = 60.0

# How long the others are waited for once one has failed, without which they cannot come to an end.
_PATIENCE_S = 5.0

# What a process says whose partner is gone: no cause, but the effect of one.
_EFFECT = re.compile(r"remote|peer|Connection (closed|reset)", re.IGNORECASE)


class Failed(Exception):
    """An all-reduce failed: what went wrong on which devices."""

    def __init__(self, problems: list[tuple[int, str]]) -> None:
        super().__init__(problems)
        self.problems = problems


def across(indices: Sequence[int]) -> str:
    """Add up a number of each device on all of them.

    Raises:
        Failed: if a process did not get the sum, or none by the deadline.
    """
    if not hasattr(os, "fork"):
        return "not on this platform"
    import torch.distributed as dist

    backend = acc.communication_backend_name()
    if not dist.is_available() or not dist.is_backend_available(backend):
        return f"this torch has no {backend}"
    with tempfile.TemporaryDirectory(prefix="accelerator-check-") as directory:
        path = os.path.join(directory, "store")
        ranks = [_fork(backend, path, rank, index, len(indices)) for rank, index in enumerate(indices)]
        problems = _wait(ranks)
    if problems:
        raise Failed([(indices[rank], problem) for rank, problem in sorted(problems.items())])
    return f"{len(indices)} processes over {backend}"


def in_one_line(error: BaseException) -> str:
    """An error by its first sentence, which is the same wherever it comes from the same cause."""
    text = str(error).strip().partition("\n")[0].partition(". ")[0]
    if text:
        return f"{type(error).__name__}: {text}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} ({Path(frame.filename).name}:{frame.lineno})"


def reduce(backend: str, store: Any, rank: int, index: int, size: int, seconds: float) -> str | None:
    """Be one of the processes: give None if the sum is right, else what went wrong."""
    import torch
    import torch.distributed as dist

    try:
        acc.set_device_index(index)
        device = acc.device(index)
        # Named, for otherwise the backend takes the rank for the device.
        named = None if device.type == "cpu" else device
        limit = timedelta(seconds=seconds)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit, device_id=named)
        try:
            # Filled on the CPU, as a copy copies on simulated GPUs that compute nothing too.
            number = torch.tensor([rank + 1.0]).to(device)
            dist.all_reduce(number)
            total = float(number.cpu())
        finally:
            dist.destroy_process_group()
    except Exception as error:  # what went wrong is what this is to report
        return in_one_line(error)
    expected = size * (size + 1) / 2
    return None if total == expected else f"the sum is {total:g}, not {expected:g}"


def _fork(backend: str, path: str, rank: int, index: int, size: int) -> tuple[int, int]:
    """Start a process; gives its id, and a pipe on which it says what went wrong and that it has ended."""
    import torch.distributed

    dist: Any = torch.distributed
    ours, its = os.pipe()
    pid = os.fork()
    if pid:
        os.close(its)
        return pid, ours
    try:
        os.close(ours)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the libraries' own words on what is said in one line
        problem = reduce(backend, dist.FileStore(path, size), rank, index, size, DEADLINE_S)
        os.write(its, (problem or "ok").encode())
    except BaseException as error:  # its standard error leads nowhere by now
        os.write(its, in_one_line(error).encode())
    finally:
        os._exit(0)


def _wait(ranks: list[tuple[int, int]]) -> dict[int, str]:
    """What went wrong in which of these processes."""
    deadline = time.monotonic() + DEADLINE_S
    said = {rank: b"" for rank in range(len(ranks))}
    pipes = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    problems: dict[int, str] = {}
    while pipes:
        ready = select.select(list(pipes), [], [], max(deadline - time.monotonic(), 0))[0]
        if not ready:
            break
        for pipe in ready:
            part = os.read(pipe, 4096)
            said[pipes[pipe]] += part
            if not part:
                rank = pipes.pop(pipe)
                status = os.waitstatus_to_exitcode(os.waitpid(ranks[rank][0], 0)[1])
                if said[rank] != b"ok":
                    problems[rank] = said[rank].decode(errors="replace") or f"its process ended with status {status}"
                    deadline = min(deadline, time.monotonic() + _PATIENCE_S)
    silent = list(pipes.values())
    for rank in silent:
        os.kill(ranks[rank][0], 9)
        os.waitpid(ranks[rank][0], 0)
    for _, pipe in ranks:
        os.close(pipe)
    causes = {rank: problem for rank, problem in problems.items() if not _EFFECT.search(problem)}
    return causes or problems or {rank: f"no answer within {DEADLINE_S:g} s" for rank in silent}
