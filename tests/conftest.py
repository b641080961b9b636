"""Which tests this process can run, told by a test file's name.

``test_*_simulated.py`` needs two simulated GPUs in this process, ``test_*_cpu.py`` needs the CPU to stand in; all other
tests need neither, as they start processes of their own. ``python -m tests`` starts one pytest for each.
"""

from __future__ import annotations

import datetime
import os
import signal
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import accelerator as acc
from accelerator._machine import torch_build

# These tests depend on no torch: one run of them is enough where several builds are tested one after the other.
TORCH_FREE = (
    "queries/test_grammar.py",
    "queries/test_launching.py",
    "queries/test_rocm.py",
    "simulation/test_command.py",
    "simulation/test_environment.py",
    "simulation/test_nvml.py",
    "simulation/test_nvml_memory.py",
    "simulation/test_visible_devices.py",
    "test_readme.py",
)

# Files whose tests share what is dear to set up, or several processes that all compute: one worker runs all of a group.
TOGETHER = {
    "tests/runtime/test_capability.py": "machines",
    "tests/runtime/test_devices_streams_memory.py": "machines",
    "tests/checkpointing/test_distributed.py": "worlds",
    "tests/checkpointing/test_nccl.py": "worlds",
    "tests/command/test_cluster.py": "cluster",
    "tests/simulation/test_nccl.py": "nccl",
    "tests/simulation/test_rank_trainings.py": "rank trainings",
}

# Somebody else's suite, which test_miniature.py runs.
collect_ignore = ["miniature"]
if torch_build.read() is None:
    collect_ignore += ["checkpointing"]
    collect_ignore += [
        str(file) for file in Path(__file__).parent.rglob("test_*.py") if not file.as_posix().endswith(TORCH_FREE)
    ]


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # What a shell starts in the background ignores it, and so would the programs that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header() -> str:
    where = "on simulated GPUs" if acc.simulation.is_simulated() else "without simulation"
    return f"accelerator: {where}, {acc.device_count()} device(s) visible, from {Path(acc.__file__).parent}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    parts = int(os.environ.get("ACCELERATOR_TEST_PARTS", "1"))
    if parts > 1:
        # Of the tests that start processes, which take the time, one part, and another one each day.
        today = datetime.date.today().toordinal()
        shared_out: tuple[list[pytest.Item], list[pytest.Item]] = [], []
        for item in items:
            stays = item.path.stem.endswith(("_simulated", "_cpu")) or (zlib.crc32(_unit(item)) - today) % parts == 0
            shared_out[stays].append(item)
        left, items[:] = shared_out
        config.hook.pytest_deselected(items=left)
    simulated = acc.simulation.is_simulated() and acc.device_count() == 2
    reasons = {
        "simulated": None if simulated else "needs: python -m accelerator simulate --gpus 2 -- python -m pytest",
        "cpu": None if acc.device_count() == 0 else "needs a process without a usable accelerator",
    }
    for item in items:
        reason = reasons.get(item.path.stem.rpartition("_")[2])
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.path.as_posix().endswith(TORCH_FREE):
            item.add_marker(pytest.mark.torch_free)


def _unit(item: pytest.Item) -> bytes:
    """What is run or left as a whole: tests that share a fixture, and the cases of one test."""
    file, _, test = item.nodeid.partition("::")
    return (TOGETHER.get(file) or f"{file}::{test.partition('[')[0]}").encode()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # xdist's own groups name tests anew, which pytest 9.2 does not let it
        def _split_scope(self, nodeid: str) -> str:
            return TOGETHER.get(nodeid.partition("::")[0], nodeid)

    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def _as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test on simulated GPUs begins and ends on device 0, with idle GPUs, default streams current, and no tensors."""
    yield
    if not request.path.stem.endswith("_simulated"):
        return
    import torch

    if not torch.cuda.is_initialized():
        return
    for index in reversed(range(torch.cuda.device_count())):
        torch.cuda.set_stream(torch.cuda.default_stream(index))
        torch.cuda.synchronize(index)
    torch.cuda.set_device(0)
    torch.cuda.empty_cache()


_skipped: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and report.nodeid.partition("::")[0].endswith("_simulated.py"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        # What this torch has not, or does not take, no GPU would show.
        if not reason.startswith("Skipped: torch "):
            _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    # In CI a test on simulated GPUs that does not run has failed.
    if _skipped and os.environ.get("CI") and not hasattr(session.config, "workerinput"):
        print(f"\n{len(_skipped)} tests on simulated GPUs were skipped, the first {_skipped[0]}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
