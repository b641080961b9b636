"""Select the tests that this process can run, and clean up after every test.

The suffix of a file names the process that it needs: ``test_*_simulated.py`` runs in a process with two simulated GPUs,
``test_*_cpu.py`` in one without a usable accelerator. Other tests start processes of their own and run anywhere.
The suffix is not a mark, because a mark is known only after the import, and a file must not be imported by the wrong process.
``python -m tests`` starts the processes.

Other properties are marks: ``slow``, ``torch_free``, and ``xdist_group`` for files whose tests share an expensive setup or
start several processes that compute.
"""

from __future__ import annotations

import ast
import atexit
import functools
import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import pytest

import accelerator as acc
from accelerator._machine import torch_build

collect_ignore = ["miniature"]  # the tests of a small library, which test_miniature.py runs

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Background processes of a shell ignore SIGINT, and the programs that tests interrupt would inherit this.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same commit runs the same examples. ``--hypothesis-profile default`` looks for others.
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.load_profile("same")

LIMITS_S = {"exhaustive": 3600, "slow": 900}
"""After these seconds a test with the mark fails. ``pyproject.toml`` has the limit of all others."""


def pytest_report_header() -> str:
    where = "on simulated GPUs" if acc.simulation.is_simulated() else "without simulation"
    return f"accelerator: {where}, {acc.device_count()} device(s) visible, from {Path(acc.__file__).parent}"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without torch, collect only files with the mark ``torch_free``. Importing the others may need torch."""
    if torch_build.read() is not None:
        return None
    files = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
    return None if any("mark.torch_free" in file.read_text(encoding="utf-8") for file in files) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_two_simulated_gpus = acc.simulation.is_simulated() and acc.device_count() == 2
    reasons = {
        "simulated": None if has_two_simulated_gpus else "needs: python -m accelerator simulate --gpus 2 -- python -m pytest",
        "cpu": None if acc.device_count() == 0 else "needs a process without a usable accelerator",
    }
    for item in items:
        limit = next((seconds for mark, seconds in LIMITS_S.items() if item.get_closest_marker(mark)), None)
        if limit is not None:
            item.add_marker(pytest.mark.timeout(limit))
        if _is_simulated(item.path):
            # Check the reason even if the condition is false, because it may be true with another torch.
            for mark in item.iter_markers("skipif"):
                if not _concerns_torch(reason := mark.kwargs.get("reason", "")):
                    raise pytest.UsageError(f"{item.nodeid}: {_NO_REASON}: {reason}")
        reason = reasons.get(item.path.stem.rpartition("_")[2])
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


_frozen = 0  # the number of modules that garbage collections leave out


def freeze_modules() -> None:
    """Exclude imported modules from garbage collections. Many tests collect garbage, and torch's modules make this slow."""
    global _frozen
    gc.collect()
    gc.freeze()
    _frozen = len(sys.modules)


def pytest_collection_finish() -> None:
    freeze_modules()
    atexit.register(gc.unfreeze)  # otherwise extensions report leaks when the interpreter ends


def pytest_runtest_logfinish() -> None:
    if len(sys.modules) > _frozen + 100:  # the test has imported torch._dynamo, for example
        freeze_modules()


_NO_REASON = "a test on simulated GPUs is skipped only for what torch lacks, with a reason that starts with 'torch '"


def _is_simulated(file: Path) -> bool:
    return file.stem.endswith("_simulated")


def _concerns_torch(reason: str) -> bool:
    """Return whether a skip is due to a feature that torch lacks. Other skips on simulated GPUs may hide a defect."""
    return reason.removeprefix("Skipped: ").startswith("torch ")


_Report = TypeVar("_Report", pytest.TestReport, pytest.CollectReport)


def forbid_skip(report: _Report, file: Path) -> _Report:
    """Fail a skip on simulated GPUs, unless torch lacks a feature or (outside CI) the machine lacks what it needs."""
    if report.skipped and _is_simulated(file) and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        lacks_need = reason.startswith("Skipped: needs: ") and not os.environ.get("CI")
        if not lacks_need and not _concerns_torch(reason):
            report.outcome = "failed"
            report.longrepr = f"{_NO_REASON}: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return forbid_skip((yield), item.path)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return forbid_skip((yield), collector.path)


@functools.cache
def read_group(file: Path) -> str | None:
    """Return the ``xdist_group`` that marks all tests of a file.

    xdist's ``--dist loadgroup`` appends the group to ``item._nodeid``, which pytest 9.2 no longer reads. The process that
    schedules tests does not import them, so it reads the mark from the source.
    """
    text = file.read_text(encoding="utf-8")
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)) if "xdist_group" in text else ()
    groups = [call.args[0] for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "xdist_group"]
    return next((str(group.value) for group in groups if isinstance(group, ast.Constant)), None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class GroupScheduling(LoadScopeScheduling):
        """Run the tests of one group in one worker and distribute all others one by one."""

        def _split_scope(self, nodeid: str) -> str:
            return read_group(config.rootpath / nodeid.partition("::")[0]) or nodeid

        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            super().mark_test_complete(node, item_index, duration)
            # xdist counts the pending tests of all scopes of a node after each test, so those that are complete leave.
            scope = self._split_scope(self.registered_collections[node][item_index])
            if all(self.assigned_work[node][scope].values()):
                del self.assigned_work[node][scope]

    return GroupScheduling(config, log)


@pytest.fixture(autouse=True)
def _reset_simulated_gpus(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test on simulated GPUs, make device 0 and the default streams current, wait for the GPUs and empty the caches."""
    if not _is_simulated(request.path):
        yield
        return
    gc.disable()  # a collection would free what earlier tests left in cycles, and change the figures that a test compares
    yield
    gc.enable()
    import torch

    if not torch.cuda.is_initialized():
        return
    for index in reversed(range(torch.cuda.device_count())):
        torch.cuda.set_stream(torch.cuda.default_stream(index))
        torch.cuda.synchronize(index)
    torch.cuda.set_device(0)
    if "_accelerator_simulation" in sys.modules:
        # Otherwise the next capture would free what the computations of destroyed graphs hold, in the middle of a measurement.
        sys.modules["_accelerator_simulation._inside.ops.capture"]._drop_unused()
    torch._C._cuda_clearCublasWorkspaces()
    # Before 2.13 torch makes it on the GPU of the first capture, also if that capture has a stream of its own.
    torch.cuda.graph.default_capture_stream = None
    try:
        torch.cuda.empty_cache()
    except RuntimeError:  # the test has failed in a capture, of which torch before 2.13 does not end the allocations
        from tests.support.simulation_driver import end_invalidated_capture

        for number in range(1, 2000):
            end_invalidated_capture((number, 0))
            end_invalidated_capture((0, number))
        torch.cuda.empty_cache()
