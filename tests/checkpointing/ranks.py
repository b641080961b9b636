"""Run the ranks of a world, each in a separate process."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests import support

# Seconds after which a rank that still runs is killed.
SECONDS = 150


class Ended(NamedTuple):
    """The exit status of a rank (negative for a signal, None if it was killed because it hung) and the end of its output."""

    status: int | None
    output: str


def run(module: str, size: int, folder: Path, environment: Mapping[str, str]) -> list[Ended]:
    """Run ``python -m MODULE RANK SIZE FOLDER`` for each rank of a world, and kill the ranks that hang."""

    def run_rank(rank: int) -> Ended:
        arguments = map(str, (rank, size, folder))
        try:
            done = support.module(module, dict(environment), *arguments, timeout=SECONDS)
        except subprocess.TimeoutExpired as expired:
            return Ended(None, f"{expired.stdout}{expired.stderr}"[-3000:])
        return Ended(done.returncode, (done.stdout + done.stderr)[-3000:])

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run_rank, range(size)))
