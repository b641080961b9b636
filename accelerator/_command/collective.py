"""An all-reduce: across the devices of this host, with a process for each that is forked before the accelerator is initialized,
or among processes that others have started.
"""

from __future__ import annotations

import os
import select
import tempfile
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import accelerator as acc

DEADLINE_S = 60.0


class Failed(Exception):
    """An all-reduce failed; the message says where."""


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
        problems = _wait(ranks, [acc.device_name(index) for index in indices])
    if problems:
        together = {problem: ", ".join(device for device, other in problems if other == problem) for _, problem in problems}
        raise Failed("; ".join(f"{devices}: {problem}" for problem, devices in together.items()))
    return f"{len(indices)} processes over {backend}"


def reduce(backend: str, store: Any, rank: int, index: int, size: int, seconds: float) -> str | None:
    """Be one of the processes: give None if the sum is right, else what went wrong."""
    import torch
    import torch.distributed as dist

    try:
        acc.set_device_index(index)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))
        try:
            # Filled on the CPU, as a copy copies on simulated GPUs that compute nothing too.
            number = torch.tensor([rank + 1.0]).to(acc.device(index))
            dist.all_reduce(number)
            total = float(number.cpu())
        finally:
            dist.destroy_process_group()
    except Exception as error:  # what went wrong is what this is to report
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
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
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _wait(ranks: list[tuple[int, int]], devices: list[str]) -> list[tuple[str, str]]:
    """The devices on which something went wrong, and what."""
    deadline = time.monotonic() + DEADLINE_S
    problems: list[tuple[str, str]] = []
    for (pid, pipe), device in zip(ranks, devices, strict=True):
        said = b""
        while select.select([pipe], [], [], max(deadline - time.monotonic(), 0))[0]:
            part = os.read(pipe, 4096)
            if not part:
                break
            said += part
        else:
            os.kill(pid, 9)
            said = f"no answer within {DEADLINE_S:g} s".encode()
        os.close(pipe)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if said != b"ok":
            problems.append((device, said.decode(errors="replace") or f"its process ended with status {status}"))
    return problems
