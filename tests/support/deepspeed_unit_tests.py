"""``python -m tests.support.deepspeed_unit_tests CHECKOUT``: DeepSpeed's own unit tests, on its accelerator and on this module.

Needs DeepSpeed installed and a checkout of its sources at that version, as its distributions carry no tests. Of those, the ones
of accelerators, pinned memory, offload and activation checkpoints run three times: as they are, after ``use_in_deepspeed()`` in
every process, and with ``accelerator.checkpointing`` in the place of ``deepspeed.checkpointing`` too. Prints what passed, and
fails where a test that passes as it is does not pass on this module. On the CPU over gloo; on simulated GPUs
(``python -m accelerator simulate --gpus 2 -- python -m ...``) over nccl.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.support import ROOT

TEST_S = 90
MODULE_S = 480
BUILD_S = 900

# Paths below the checkout's tests/unit.
MODULES = (
    "v1/accelerator/test_accelerator.py",
    "v1/pin_memory/test_pin_memory.py",
    "v1/pin_memory/test_pin_memory_op.py",
    "v1/pin_memory/test_destroy_unpin.py",
    "utils/test_pin_memory_tracker.py",
    "runtime/activation_checkpointing/test_activation_checkpointing.py",
    "runtime/activation_checkpointing/test_activation_checkpointing_non_reentrant.py",
    "runtime/activation_checkpointing/test_offload_activations.py",
    "v1/zero/test_offload_states.py",
    "v1/zero/test_zero2_offload_multi_backward.py",
    "v1/zero/test_zero_cpu_offload_grad_accum.py",
    "v1/zero/test_zero_activation_checkpoint_lifecycle.py",
)
# What the tests' trainings compile where it is not built yet, for minutes: not while a test's time runs.
BUILD = """
from deepspeed.accelerator import get_accelerator
for name in ("CPUAdamBuilder", "PinMemoryBuilder", "ShareMemCommBuilder"):
    builder = get_accelerator().create_op_builder(name)
    try:
        builder is not None and builder.is_compatible() and builder.load()
    except Exception as error:
        print(f"{name} cannot be built, so that tests will fail or be skipped: {error}")
"""
STANDS_ON = {"own": "", "accelerator": "accelerator", "and checkpointing": "accelerator checkpointing"}


# What pytest calls in the process that runs a module, whose plug-in this file is.


def _note(name: str, outcome: str, said: Any) -> None:
    text = said[2] if isinstance(said, tuple) else str(said or "")
    with open(os.environ["DEEPSPEED_OUTCOMES"], "a") as file:
        file.write(json.dumps((name, outcome, text[-1500:])) + "\n")


def pytest_configure(config: Any) -> None:
    import multiprocessing

    # Tests start their ranks anew; what they import is imported once.
    multiprocessing.set_forkserver_preload(["deepspeed"])


def pytest_collection_modifyitems(items: list[Any]) -> None:
    for item in items:
        # Tests of one rank take turns in one process.
        if getattr(item.cls, "is_dist_test", False) and item.cls.world_size == 1:
            item.cls.reuse_dist_env = True


def pytest_runtest_logstart(nodeid: str, location: Any) -> None:
    _note(nodeid, "failed", "did not end")


def pytest_runtest_logreport(report: Any) -> None:
    if report.when == "call" or report.outcome != "passed":
        _note(report.nodeid, report.outcome, report.longrepr)


def pytest_collectreport(report: Any) -> None:
    if report.outcome != "passed":
        _note(report.nodeid, report.outcome, report.longrepr)


def run(tests: Path, module: str, stands_on: str) -> dict[str, tuple[str, str]]:
    """Run a module; return the outcome of each of its tests, and what was said of it."""
    outcomes: dict[str, tuple[str, str]] = {}
    deadline = time.monotonic() + MODULE_S
    while True:
        before = len(outcomes)
        ended = _session(tests, module, stands_on, [*outcomes], outcomes, deadline)
        # A test that hangs ends DeepSpeed's session; the others have their turn in another one.
        if ended or len(outcomes) == before or time.monotonic() > deadline:
            return outcomes


def _session(
    tests: Path, module: str, stands_on: str, done: list[str], outcomes: dict[str, tuple[str, str]], deadline: float
) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "outcomes")
        notes.touch()
        path = (str(ROOT / "tests" / "support" / "deepspeed_in_place"), str(ROOT), os.environ.get("PYTHONPATH"))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "DEEPSPEED_STANDS_ON": stands_on,
            "DEEPSPEED_OUTCOMES": str(notes),
            "DS_UNITTEST_TIMEOUT": str(TEST_S),
            "OMP_NUM_THREADS": "1",
        }
        program = [sys.executable, "-m", "pytest", "-q", "-p", "tests.support.deepspeed_unit_tests", "-p", "no:cacheprovider"]
        program += [f"unit/{module}", *(f"--deselect={name}" for name in done), f"--basetemp={folder}/tests"]
        with open(f"{folder}/log", "w") as log:
            child = subprocess.Popen(
                program, cwd=tests, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status = child.wait(max(deadline - time.monotonic(), 1))
            except subprocess.TimeoutExpired:
                status = None
            finally:
                # The ranks are its children, and their server outlives a session that hangs.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        for line in notes.read_text().splitlines():
            name, outcome, said = json.loads(line)
            outcomes[name] = outcome, said
        if status not in (0, 1, 5) and not outcomes:
            raise RuntimeError(f"pytest ended with {status}\n{Path(folder, 'log').read_text()[-3000:]}")
        return status in (0, 5) or (status == 1 and not any(said == "did not end" for _, said in outcomes.values()))


def compare(module: str, tests: Path) -> int:
    """Run a module in each way, print what came of it, and return how many tests are worse on this module."""
    found = {whose: run(tests, module, stands_on) for whose, stands_on in STANDS_ON.items()}
    cells: list[str] = []
    for outcomes in found.values():
        numbers = Counter(outcome for outcome, _ in outcomes.values())
        cells.append(" / ".join(str(numbers[outcome]) for outcome in ("passed", "failed", "skipped")))
    _print_row(module, cells)
    worse = 0
    own = found.pop("own")
    for whose, outcomes in found.items():
        for name in sorted({*own, *outcomes}):
            expected, (outcome, said) = own.get(name, _NOT_RUN)[0], outcomes.get(name, _NOT_RUN)
            if outcome == expected:
                continue
            print(f"    {name}: {outcome} on {whose}, {expected} on its own")
            if expected == "passed":
                worse += 1
                print("".join(f"        {line}\n" for line in said.splitlines()[-12:]), end="", flush=True)
    return worse


_NOT_RUN = "not run", ""


def _print_row(module: str, cells: Iterable[str]) -> None:
    print(f"{module:<82}{''.join(f'{cell:>20}' for cell in cells)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="the root of a checkout of DeepSpeed")
    parser.add_argument("words", nargs="*", metavar="WORD", help="only the modules whose path contains one of them")
    options = parser.parse_args()
    subprocess.run([sys.executable, "-c", BUILD], timeout=BUILD_S, check=True)
    worse = 0
    with tempfile.TemporaryDirectory() as folder:
        # Without the checkout's own packages beside them: what is installed is tested.
        tests = Path(folder, "tests")
        shutil.copytree(options.checkout / "tests", tests)
        _print_row("passed / failed / skipped", STANDS_ON)
        for module in MODULES:
            if not options.words or any(word in module for word in options.words):
                worse += compare(module, tests)
    print(f"{worse} tests pass on DeepSpeed's own and not on this module")
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
