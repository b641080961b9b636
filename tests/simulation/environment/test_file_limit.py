"""Simulated machines in processes that may not write files (``ulimit -f``): errors with a cause, and no end by SIGXFSZ."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support import plain_environment, simulated_environment
from tests.support.simulation import DEADLINE, REPOSITORY, linux_only
from tests.support.simulation_driver import DRIVER, needs_cuda_torch

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = linux_only

LIMIT = "the file would be larger than the limit on the size of files (ulimit -f) allows"
OPERATING_SYSTEM = 304
# As in programs that are not Python's, the signal ends the process.
LIMITED = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
"""


def limited(program: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-B", "-c", DRIVER + LIMITED + program]
    return subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE)


def test_a_state_that_cannot_be_kept_is_an_error(tmp_path: Path) -> None:
    state = tmp_path / "state"
    done = limited("report(cuda.cuInit(0))", simulated_environment(gpus=1, state=state))
    message = f"accelerator: the state of the simulated machine cannot be kept in {state}: {LIMIT}\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"[{OPERATING_SYSTEM}]\n", message)


def test_memory_needs_no_file() -> None:
    done = limited("report(cuda.cuInit(0), use(0), allocate(1 << 20))", simulated_environment(gpus=1))
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 0, 0]\n", "")


def test_physical_memory_is_exhausted() -> None:
    """Of ``cuMemCreate``, which is a file: torch's expandable segments use it."""
    program = """
class Properties(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("type", "handle_types", "location_type", "device")]
    _fields_ += [("rest", ctypes.c_byte * 64)]

handle = ctypes.c_void_p()
properties = Properties(1, 0, 1, 0)
create = lambda: cuda.cuMemCreate(ctypes.byref(handle), ctypes.c_size_t(2 << 20), ctypes.byref(properties), ctypes.c_uint64(0))
report(cuda.cuInit(0), use(0), create(), create(), free() == 8 << 30)
"""
    done = limited(program, simulated_environment(gpus=1))
    message = f"accelerator: cuMemCreate of {2 << 20} bytes fails: {LIMIT}\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 0, 2, 2, true]\n", message)


def test_an_event_cannot_be_shared() -> None:
    program = """
runtime = ctypes.CDLL("libcudart.so.13")
event, handle = ctypes.c_void_p(), ctypes.create_string_buffer(64)
interprocess = 6
report(runtime.cudaEventCreateWithFlags(ctypes.byref(event), interprocess), runtime.cudaIpcGetEventHandle(handle, event))
"""
    done = limited(program, simulated_environment(gpus=1))
    assert (done.returncode, done.stdout) == (0, f"[0, {OPERATING_SYSTEM}]\n")


def test_a_log_is_left_out(tmp_path: Path) -> None:
    done = limited("report(cuda.cuInit(0))", simulated_environment(gpus=1, log=tmp_path / "log"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0]\n", "")


def test_a_command_line_without_a_folder_says_so() -> None:
    for command in ("simulate", "rehearse"):
        words = f"ulimit -f 0; exec {sys.executable} -B -m accelerator {command} -- true"
        done = subprocess.run(
            ["bash", "-c", words], env=plain_environment(), cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE
        )
        assert done.returncode == 2
        message = f"python -m accelerator {command}: cannot simulate GPUs: no folder for the state of the machine can be made: "
        assert done.stderr.startswith(message)
        assert done.stderr.count("\n") == 1


@pytest.mark.slow
@needs_cuda_torch
def test_ops_compute() -> None:
    program = "import torch; print((torch.ones(2, device='cuda') + 1).tolist())"
    words = f'ulimit -f 0; exec {sys.executable} -B -c "{program}"'
    environment = simulated_environment(gpus=1)
    done = subprocess.run(["bash", "-c", words], env=environment, capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[2.0, 2.0]\n", "")
