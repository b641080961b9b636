"""The exit status of a process, which it writes to a file at its end if it is told to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import support
from tests.support import simulated_environment
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = needs_cuda_torch

ENDS = """
import torch
import ctypes, os, sys
libc = ctypes.CDLL(None)
libc.accelerator_simulation_report_exit(os.fsencode(sys.argv[1]) + b".first")
libc.accelerator_simulation_report_exit(os.fsencode(sys.argv[1]))  # the last file counts
if os.fork() == 0:
    libc.exit(7)  # a forked child has another file, or none
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7 and not os.path.exists(sys.argv[1])
libc.exit({status})
"""


@pytest.mark.parametrize("status", support.sample([0, 3, 255, 256 + 44], 3, 256 + 44))
def test_exit_writes_the_status(status: int, tmp_path: Path) -> None:
    file = tmp_path / "status"
    done = support.python(ENDS.format(status=status), simulated_environment(gpus=1, compute=False), str(file))
    assert done.returncode == status % 256, done.stderr
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"status": str(status % 256)}
