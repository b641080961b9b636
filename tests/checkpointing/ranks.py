"""Run the ranks of a world, each in a separate process."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.support import ROOT

# Seconds after which the ranks that still run are killed.
SECONDS = 150


class Ended(NamedTuple):
    """The exit status of a rank (negative for a signal) and the end of its output."""

    status: int
    output: str


def run(module: str, size: int, folder: Path, environment: Mapping[str, str]) -> list[Ended]:
    """Run ``python -m MODULE RANK SIZE FOLDER`` for each rank of a world, and kill the ranks that hang."""
    until = time.monotonic() + SECONDS
    logs = [(folder / f"{rank}.log").open("w+") for rank in range(size)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(size), str(folder)],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        for process in processes:
            process.wait(max(until - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            process.kill()
            process.wait()
    ended: list[Ended] = []
    for process, log in zip(processes, logs, strict=True):
        with log:
            log.seek(0)
            ended.append(Ended(process.returncode, log.read()[-3000:]))
    return ended
