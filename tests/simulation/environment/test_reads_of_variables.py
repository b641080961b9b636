"""Calls that a program makes often read no environment variables after the first time.

Another thread may add variables meanwhile, and the C library moves the environment then.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import simulated_environment
from tests.support.discovery import compiled
from tests.support.simulation import linux_only, run

pytestmark = linux_only

SOURCE = Path(__file__).with_name("recorded_reads.c")

# The program defines call().
RECORD = """
recorder = ctypes.CDLL(os.environ["LD_PRELOAD"].partition(":")[0])
recorder.recorded.restype = ctypes.c_char_p
call()
recorder.start_recording()
call()
report(recorder.recorded().decode())
"""
NVML = """
n.nvmlInit()
def call():
    for gpu in handles():
        n.nvmlDeviceGetMemoryInfo(gpu)
        n.nvmlDeviceGetComputeRunningProcesses(gpu)
"""
KERNEL = """.version 6.3
.target sm_60
.address_size 64
.visible .entry nothing() {
    ret;
}
"""
# Also exports an event to other processes.
CUDA = f"""
from tests.ptx.driver import DriverKernel, _library
_library()
kernel, event = DriverKernel([{KERNEL!r}], "nothing"), ctypes.c_void_p()
runtime, handle = ctypes.CDLL("libcudart.so.13"), ctypes.create_string_buffer(64)
assert runtime.cudaEventCreateWithFlags(ctypes.byref(event), 6) == 0
def call():
    kernel.launch(1, 1)
    assert runtime.cudaIpcGetEventHandle(handle, event) == 0
"""


@pytest.mark.parametrize(
    ("program", "has_state"),
    [
        pytest.param(NVML, False, id="NVML alone"),
        pytest.param(NVML, True, id="NVML with a state"),
        pytest.param(f"allocate(1)\n{NVML}", False, id="NVML beside CUDA"),
        pytest.param(CUDA, False, id="CUDA", marks=pytest.mark.slow),  # translates a kernel
    ],
)
def test_variables_are_read_once(tmp_path: Path, program: str, has_state: bool) -> None:
    recorder = compiled(SOURCE.read_text(), tmp_path / "recorder.so", "-shared", "-fPIC")
    machine: dict[str, Any] = {"state": tmp_path / "state"} if has_state else {}
    child = simulated_environment(**machine)
    child["LD_PRELOAD"] = f"{recorder}:{child['LD_PRELOAD']}"
    assert run(program + RECORD, child) == ""
