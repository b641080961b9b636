"""Tests the exit of processes on simulated GPUs."""

from __future__ import annotations

import sys

import pytest

from tests.support import simulated_environment
from tests.support.simulation import linux_only, python

pytestmark = linux_only

# Two threads keep requesting the GIL while the interpreter is finalized. The program prints which of them still exist.
LATE_THREADS = """
import ctypes, os, threading, time

libc = ctypes.CDLL(None)
started = threading.Barrier(3)

def late(name):
    libc.prctl(15, name, 0, 0, 0)
    started.wait()
    while True:
        time.sleep(0.01)

class RunAtExit:
    def __init__(self):
        self.me = self  # a reference cycle, which the finalization collects
    def __del__(self):
        names = ["pt_other"]
        until = time.monotonic() + 60
        while "pt_other" in names and time.monotonic() < until:
            time.sleep(0.1)  # releases the GIL, so that both threads can request it
            names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
        os.write(1, ascii([name for name in names if name.startswith("pt_")]).encode())

for name in (b"pt_autograd_0", b"pt_other"):
    threading.Thread(target=late, args=[name], daemon=True).start()
started.wait()
RunAtExit()
"""


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="from 3.14 on Python lets every such thread sleep")
def test_autograd_thread_at_exit_sleeps_instead_of_unwinding() -> None:
    done = python(LATE_THREADS, env=simulated_environment())
    assert (done.returncode, done.stdout, done.stderr) == (0, "['pt_autograd_0']", "")
