"""``--late-copies``: the target of a copy to pinned memory has NaN until the host has synchronized."""

from __future__ import annotations

from typing import Any

import pytest

from tests import support
from tests.support import simulated_environment
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = needs_cuda_torch

_PROGRAM = """
import torch
x, host = torch.ones(100, device="cuda"), torch.zeros(100).pin_memory()
numbers = torch.zeros(3, dtype=torch.int64).pin_memory()
event = torch.cuda.Event()
host.copy_(x, non_blocking=True)
event.record()
numbers.copy_(torch.full((3,), 7, device="cuda"), non_blocking=True)
print(host.sum().item(), numbers.tolist())
event.synchronize()
print(host.sum().item(), numbers.tolist())
torch.cuda.synchronize()
print(numbers.tolist())
print((x * 2).cpu().sum().item())

host.copy_(x * 3, non_blocking=True)
again = torch.empty(100, device="cuda").copy_(host, non_blocking=True)  # the same stream: no synchronization is needed
print(again.sum().item())
host.copy_(x * 4, non_blocking=True)
while not torch.cuda.current_stream().query():
    pass
print(host.sum().item())
"""

_FORK = """
import os, torch
x, host = torch.ones(100, device="cuda"), torch.zeros(100).pin_memory()
host.copy_(x, non_blocking=True)
process = os.fork()
if process == 0:
    print(host.sum().item(), flush=True)
    os._exit(0)
os.waitpid(process, 0)
print(host.sum().item())
torch.cuda.synchronize()
print(host.sum().item())
"""

_COLUMNS = """
import torch, ctypes
from tests.support.simulation_driver import loaded_runtime
x, table = torch.ones(4, 2, device="cuda"), torch.zeros(4, 6).pin_memory()
arguments = (table.data_ptr(), 24, x.data_ptr(), 8, 8, 4, 2, torch.cuda.current_stream().cuda_stream)
assert loaded_runtime().cudaMemcpy2DAsync(*map(ctypes.c_size_t, arguments)) == 0
table[:, 2:] = 5  # another part of the same memory
torch.cuda.synchronize()
print(table.tolist() == [[1, 1, 5, 5, 5, 5]] * 4)
"""


@pytest.mark.parametrize("compute", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_target_is_late(compute: bool) -> None:
    done = support.python(_PROGRAM, simulated_environment(gpus=1, late_copies=True, compute=compute))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[0] == "nan [-1, -1, -1]"
    if compute:
        assert lines[1:] == ["100.0 [-1, -1, -1]", "[7, 7, 7]", "200.0", "300.0", "400.0"]
    else:
        assert "nan" not in "".join(lines[1:])


def test_the_host_writes_beside_the_columns_of_a_target() -> None:
    done = support.python(_COLUMNS, simulated_environment(gpus=1, late_copies=True))
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_the_copy_ends_in_a_forked_process() -> None:
    done = support.python(_FORK, simulated_environment(gpus=1, late_copies=True))
    assert (done.stdout, done.stderr) == ("100.0\nnan\n100.0\n", "")


_WAITS = """
import torch, ctypes, errno, math, os, struct
x, host = torch.ones(100, device="cuda"), torch.zeros(100).pin_memory()
y, other, side = torch.ones(100, device="cuda:1"), torch.zeros(100).pin_memory(), torch.cuda.Stream()
write = ctypes.CDLL(None, use_errno=True).write
def written(host):
    received, sent = os.pipe()
    if write(sent, ctypes.c_void_p(host.data_ptr()), ctypes.c_size_t(400)) != 400:
        return errno.errorcode[ctypes.get_errno()]
    return set(map(str, struct.unpack("100f", os.read(received, 400))))
host.copy_(x, non_blocking=True)
other.copy_(y, non_blocking=True)
side.synchronize()
print(written(host), written(other))
torch.cuda.synchronize(0)
print(written(host), written(other))
torch.cuda.synchronize(1)
print(written(host), written(other))
host.copy_(x * 2)
pageable = torch.zeros(100).copy_(x * 3, non_blocking=True)
print(written(host), written(pageable))
"""


@pytest.mark.parametrize(
    ("machine", "pending"), [({"late_copies": True}, "{'nan'}"), ({"races": "report"}, "EFAULT")], ids=["late", "races"]
)
def test_system_calls_before_and_after_each_wait(machine: dict[str, Any], pending: str) -> None:
    done = support.python(_WAITS, simulated_environment(gpus=2, **machine))
    one = "{'1.0'}"
    expected = [f"{pending} {pending}", f"{one} {pending}", f"{one} {one}", "{'2.0'} {'3.0'}"]
    assert (done.stdout.splitlines(), done.stderr) == (expected, "")


@pytest.mark.slow
def test_together_with_races() -> None:
    program = """
import torch
from accelerator import simulation
x, host = torch.ones(100, device="cuda"), torch.zeros(100).pin_memory()
host.copy_(x, non_blocking=True)
print(host.sum().item(), len(simulation.races()))
torch.cuda.synchronize()
print(host.sum().item())
"""
    done = support.python(program, simulated_environment(gpus=1, late_copies=True, races="report"))
    assert done.stdout == "nan 1\n100.0\n"
