"""The error of a program, such as a failed kernel, is an Xid event of NVML in all processes, and does not lose the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import simulated_environment
from tests.support.simulation import linux_only, run
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [linux_only, needs_cuda_torch, pytest.mark.xdist_group("extensions")]

# Fails on each of the GPUs 0 to 4, twice.
FAILS = """
import ctypes, torch
from tests.simulation.extensions.binaries import Binary
from tests.simulation.extensions.texts import PLANTED, SAXPY, WRONG

saxpy, wrong = Binary(SAXPY).kernel("saxpy"), Binary(WRONG)
host, n = torch.zeros(1000), ctypes.c_uint(1000)
failures = [
    lambda x: saxpy(4, 256, ctypes.c_float(2), host, x, n),
    lambda x: wrong.kernel("misaligned")(1, 1, x),
    lambda x: wrong.kernel("trap_")(1, 1),
    lambda x: x[torch.tensor([9000], device=x.device)],
    lambda x: Binary(PLANTED).kernel("deep")(1, 1, x),
]
for gpu, fail in enumerate(failures):
    with torch.cuda.device(gpu):
        x = torch.ones(1000, device="cuda")
        for _ in range(2):
            try:
                fail(x)
                torch.cuda.synchronize()
            except RuntimeError as error:
                print(error)
"""

WATCHES = """
import subprocess
n.nvmlInit()
events = n.nvmlEventSetCreate()
gpus = handles()
for gpu in gpus:
    n.nvmlDeviceRegisterEvents(gpu, n.nvmlEventTypeXidCriticalError, events)
done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
found = []
while True:
    try:
        data = n.nvmlEventSetWait_v2(events, 200)
    except n.NVMLError_Timeout:
        break
    found.append([n.nvmlDeviceGetIndex(data.device), data.eventType, data.eventData])
actions = [n.nvmlDeviceGetFieldValues(gpu, [230])[0].value.uiVal for gpu in gpus]
other = subprocess.run([sys.executable, "-c", "import torch; print(torch.ones(2, device='cuda:0').sum().item())"],
                       capture_output=True, text=True)
report([done.returncode, done.stderr, found, actions, other.stdout])
"""


@pytest.mark.slow
def test_failed_kernels_and_assertions_are_events_in_other_processes(tmp_path: Path) -> None:
    child = simulated_environment(gpus=6, state=tmp_path / "state")
    status, errors, events, actions, other = run(f"PROGRAM = {FAILS!r}\n{WATCHES}", child)
    assert status == 0, errors
    # An H100 had 43 for the stack that overflows, whose error is the one of an illegal address.
    assert events == [[0, 8, 31], [1, 8, 13], [2, 8, 43], [3, 8, 43], [4, 8, 31]]
    assert actions == [0] * 6
    assert other == "2.0\n"
    assert "NVRM" not in errors
