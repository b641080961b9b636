"""Which tests this process can run.

``tests/simulated`` needs two simulated GPUs in this process, ``tests/cpu`` needs the CPU to stand in; all other tests need
neither, as they start processes of their own. ``python -m tests`` starts one pytest for each.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import accelerator as acc

TESTS = Path(__file__).parent


# What these test depends on no torch: one run of them is enough where several builds are tested one after the other.
TORCH_FREE = (
    "test_launching.py",
    "test_readme.py",
    "test_rocm.py",
    "test_simulation_command.py",
    "test_simulation_environment.py",
    "test_simulation_nvml.py",
    "test_simulation_nvml_memory.py",
    "test_simulation_visible_devices.py",
    "test_visible.py",
)


def pytest_report_header() -> str:
    where = "on simulated GPUs" if acc.simulation.is_simulated() else "without simulation"
    return f"accelerator: {where}, {acc.device_count()} device(s) visible, from {Path(acc.__file__).parent}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    simulated = acc.simulation.is_simulated() and acc.device_count() == 2
    reasons = {
        TESTS / "simulated": None if simulated else "needs: python -m accelerator simulate --gpus 2 -- python -m pytest",
        TESTS / "cpu": None if acc.device_count() == 0 else "needs a process without a usable accelerator",
    }
    for item in items:
        reason = reasons.get(item.path.parent)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.path.name in TORCH_FREE:
            item.add_marker(pytest.mark.torch_free)


_skipped: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and report.nodeid.startswith("tests/simulated/"):
        _skipped.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    # In CI a test on simulated GPUs that does not run has failed.
    if _skipped and os.environ.get("CI") and not hasattr(session.config, "workerinput"):
        print(f"\n{len(_skipped)} tests on simulated GPUs were skipped, the first {_skipped[0]}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
