"""nvidia-resiliency-ext on simulated GPUs: each of its own faults ends, and its restart within the process, as it documents."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT, simulated_environment
from tests.support.simulation import linux_only
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [
    linux_only,
    needs_cuda_torch,
    pytest.mark.slow,
    pytest.mark.exhaustive,
    pytest.mark.skipif(importlib.util.find_spec("nvidia_resiliency_ext") is None, reason="needs nvidia-resiliency-ext"),
]

# Which ranks train in attempt 1.
BOTH = ["attempt 1: rank 0 of 2 has trained", "attempt 1: rank 1 of 2 has trained"]
ONE = ["attempt 1: rank 0 of 1 has trained"]
FAULTS = {
    **dict.fromkeys(("WORKLOAD_EXC", "ASYNC_EXC", "SIGNAL_EXC"), BOTH),
    **dict.fromkeys(("GPU_ERROR", "GPU_SLEEP", "LOCK_GIL", "OS_ABORT", "SEGFAULT"), ONE),
    **dict.fromkeys(("SIGINT", "SIGTERM", "SIGSTOP", "SIGKILL"), ONE),
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The program of the guide, and the variables of its command."""
    page = (ROOT / "docs/faults.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"<!-- run: file in_process.py -->\n```python\n(.*?)```", page, re.DOTALL)
    (command,) = re.findall(r"test_in_process.py runs it -->\n```sh\n(.*?)```", page, re.DOTALL)
    file = tmp_path_factory.mktemp("in_process") / "in_process.py"
    file.write_text(code, encoding="utf-8")
    return file, dict(re.findall(r"\b([A-Z_]+)=(\S+)", command.partition("python -m")[0]))


def test_every_fault_is_expected() -> None:
    from nvidia_resiliency_ext.inprocess.tools.inject_fault import Fault

    assert {fault.name for fault in Fault} == set(FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_program_goes_on(fault: str, program: tuple[Path, dict[str, str]]) -> None:
    file, variables = program
    environment = {**simulated_environment(gpus=2, memory="1GiB"), **variables, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(file), fault],
            env={**environment, "RANK": str(rank), "CUDA_VISIBLE_DEVICES": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=250)[0] for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
    trained = sorted(line for text in printed for line in text.splitlines() if line.startswith("attempt"))
    assert trained == FAULTS[fault], "\n".join(printed)
    assert ranks[0].returncode == 0, printed[0]
