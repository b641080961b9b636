"""``python -m tests.mutants [--part N] [WORD ...]``: do the tests notice when the code is wrong?

Each fault listed in this folder is put into a copy of the tree, in which the tests that must notice it run; a fault that all
of them overlook is a survivor, and fails the run. ``--part 20`` takes twenty by rotation, others every day; words choose those
whose file or text contains one of them.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from accelerator._machine import torch_build

from . import checkpointing, command, kernels, machine, queries, runtime
from .mutant import Mutant

MUTANTS = (
    *queries.MUTANTS,
    *runtime.MUTANTS,
    *checkpointing.MUTANTS,
    *kernels.MUTANTS,
    *machine.MUTANTS,
    *command.MUTANTS,
)
ROOT = Path(__file__).parents[2]
DEADLINE_S = 300


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--part", type=int, metavar="N", help="only N of them, by rotation")
    parser.add_argument("words", nargs="*", metavar="WORD")
    options = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if _can_run(mutant) and _is_meant(mutant, options.words)]
    if options.part is not None:
        chosen = _rotated(chosen, options.part, datetime.date.today().toordinal())
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        copy = Path(scratch)
        for mutant in chosen:
            start = time.monotonic()
            verdict = _run(mutant, copy)
            survivors += verdict != "caught"
            first = mutant.new.strip().partition("\n")[0] or "nothing"
            print(f"{verdict}: {mutant.file}: {first!r} ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"{len(chosen) - survivors} passed, {survivors} failed")
    return int(survivors > 0)


def _is_meant(mutant: Mutant, words: Sequence[str]) -> bool:
    return not words or any(word in text for word in words for text in (mutant.file, mutant.old, mutant.new))


def _rotated(mutants: list[Mutant], number: int, day: int) -> list[Mutant]:
    """The day's share: consecutive days take consecutive ones, so that all have their turn."""
    start = day * number % max(len(mutants), 1)
    return (mutants[start:] + mutants[:start])[:number]


def _machine(mutant: Mutant) -> str:
    """Which machine the tests need, "simulated", "cpu" or "any", as the names of the test files say."""
    machines = {Path(test.partition("::")[0]).stem.rpartition("_")[2] for test in mutant.tests} & {"simulated", "cpu"}
    return machines.pop() if machines else "any"


def _can_run(mutant: Mutant) -> bool:
    build = torch_build.read()
    return bool(build and build.cuda) or _machine(mutant) != "simulated"


def _run(mutant: Mutant, copy: Path) -> str:
    for folder in ("accelerator", "tests"):
        shutil.rmtree(copy / folder, ignore_errors=True)
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, copy / name)
    path = copy / "accelerator" / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        return f"outdated, as its text occurs {text.count(mutant.old)} times"
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    tests = [f"tests/{test}" for test in mutant.tests]
    command = [sys.executable, *_simulated(mutant), "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = dict(os.environ)
    if path.suffix in (".c", ".h"):
        environment["XDG_CACHE_HOME"] = str(copy / "cache")  # faulty libraries go with the copy
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "caught"  # a fault that hangs a test is noticed
    if done.returncode == 0:
        return "SURVIVED"
    # Tests must have failed, or the process have died: a fault that breaks their import shows nothing about them.
    return "caught" if done.returncode == 1 or done.returncode < 0 else f"no verdict\n{done.stdout[-2000:]}{done.stderr[-500:]}"


def _simulated(mutant: Mutant) -> list[str]:
    """The command that simulates the machine, with the copy's own libraries."""
    build = torch_build.read()
    if not (build and build.cuda):
        return []
    gpus = ["--gpus", "0", "--driver", "absent", "--nvml", "absent"] if _machine(mutant) == "cpu" else ["--gpus", "2"]
    return ["-m", "accelerator", "simulate", *gpus, "--", sys.executable]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
