"""An all-reduce as a check: across this host's devices, or among processes that a launcher started.

On one host a process for each device is forked before the accelerator is initialized.
"""

from __future__ import annotations

import os
import re
import select
import signal
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from . import acc

DEADLINE_S = 60.0

# How long to wait for the other processes once one has failed: they cannot finish without it.
_PATIENCE_S = 5.0

# Errors of a process whose peer is gone: an effect, not the cause. The watchdog of older versions of torch then aborts it.
_EFFECT = re.compile(rf"remote|peer|Connection (closed|reset)|status {-signal.SIGABRT}$", re.IGNORECASE)


class Failed(Exception):
    """An all-reduce failed; ``problems`` holds a device index and an error for each process that failed."""

    def __init__(self, problems: list[tuple[int, str]]) -> None:
        super().__init__(problems)
        self.problems = problems


def across(indices: Sequence[int]) -> str:
    """Run an all-reduce with one process for each device index.

    Raises:
        Failed: if a process got a wrong sum, or no sum by the deadline.
    """
    if not hasattr(os, "fork"):
        return "not on this platform"
    import torch.distributed as dist

    backend = acc.communication_backend_name()
    if not dist.is_available() or not dist.is_backend_available(backend):
        return f"this torch has no {backend}"
    with tempfile.TemporaryDirectory(prefix="accelerator-check-") as directory:
        path = os.path.join(directory, "store")
        ranks: list[tuple[int, int]] = []
        try:
            for rank, index in enumerate(indices):
                ranks.append(_fork(backend, path, rank, index, len(indices)))
        except BaseException:
            for pid, pipe in ranks:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                os.close(pipe)
            raise
        problems = _wait(ranks)
    if problems:
        raise Failed([(indices[rank], problem) for rank, problem in sorted(problems.items())])
    return f"{len(indices)} processes over {backend}"


def in_one_line(error: BaseException) -> str:
    """The type and first sentence of an error; errors with the same cause give the same line."""
    text = str(error).strip().partition("\n")[0].partition(". ")[0]
    if text:
        return f"{type(error).__name__}: {text}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} ({Path(frame.filename).name}:{frame.lineno})"


def reduce(backend: str, store: Any, rank: int, index: int, size: int, seconds: float) -> str | None:
    """Take part as one of the processes; return None if the sum is right, else the error in one line."""
    import torch
    import torch.distributed as dist

    from .._torch import versions

    try:
        acc.set_device_index(index)
        device = acc.device(index)
        # Without a device id the backend uses the rank as the device index.
        takes_device_id = device.type != "cpu" and (backend == "nccl" or versions.TORCH_2_7)
        device_id = device if takes_device_id else None
        limit = timedelta(seconds=seconds)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit, device_id=device_id)
        try:
            # The tensor is filled on the CPU: simulated GPUs without compute still copy.
            tensor = torch.tensor([rank + 1.0]).to(device)
            dist.all_reduce(tensor)
            total = float(tensor.cpu())
        finally:
            dist.destroy_process_group()
    except Exception as error:  # every error is a result of the check
        return in_one_line(error)
    expected = size * (size + 1) / 2
    return None if total == expected else f"the sum is {total:g}, not {expected:g}"


def _fork(backend: str, path: str, rank: int, index: int, size: int) -> tuple[int, int]:
    """Fork a process; return its id and a pipe that carries its result and closes when it exits."""
    import torch.distributed

    dist: Any = torch.distributed
    reader, writer = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        os.close(reader)
        os.close(writer)
        raise
    if pid:
        os.close(writer)
        return pid, reader
    try:
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the libraries print the same errors at length
        problem = reduce(backend, dist.FileStore(path, size), rank, index, size, DEADLINE_S)
        os.write(writer, (problem or "ok").encode())
    except BaseException as error:  # nobody reads its standard error
        os.write(writer, in_one_line(error).encode())
    finally:
        os._exit(0)


def _wait(ranks: list[tuple[int, int]]) -> dict[int, str]:
    """Wait for the processes; return the error of each that failed, by rank."""
    deadline = time.monotonic() + DEADLINE_S
    output = {rank: b"" for rank in range(len(ranks))}
    pipes = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    problems: dict[int, str] = {}
    while pipes:
        ready = select.select(list(pipes), [], [], max(deadline - time.monotonic(), 0))[0]
        if not ready:
            break
        for pipe in ready:
            part = os.read(pipe, 4096)
            output[pipes[pipe]] += part
            if not part:
                rank = pipes.pop(pipe)
                status = os.waitstatus_to_exitcode(os.waitpid(ranks[rank][0], 0)[1])
                if output[rank] != b"ok":
                    problems[rank] = output[rank].decode(errors="replace") or f"its process ended with status {status}"
                    deadline = min(deadline, time.monotonic() + _PATIENCE_S)
    silent = list(pipes.values())
    for rank in silent:
        os.kill(ranks[rank][0], 9)
        os.waitpid(ranks[rank][0], 0)
    for _, pipe in ranks:
        os.close(pipe)
    causes = {rank: problem for rank, problem in problems.items() if not _EFFECT.search(problem)}
    return causes or problems or {rank: f"no answer within {DEADLINE_S:g} s" for rank in silent}
