"""``--late-copies``: the target of a copy to pinned memory has NaN until the host has synchronized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import support
from tests.support import simulated_environment
from tests.support.discovery import compiled
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = needs_cuda_torch
LATE_LOCKS = Path(__file__).with_name("late_locks.c")

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

_HOST_FUNCTION = """
import torch, ctypes
from accelerator import simulation
from tests.support.simulation_driver import loaded_runtime
x, host, seen = torch.ones(100, device="cuda"), torch.zeros(100).pin_memory(), []
function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: seen.append(ctypes.c_float.from_address(host.data_ptr()).value))
stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
host.copy_(x * 2, non_blocking=True)
assert loaded_runtime().cudaLaunchHostFunc(stream, function, None) == 0
before = len(simulation.races())
print(seen, before, host.sum().item(), len(simulation.races()))
torch.cuda.synchronize()
print(host.sum().item())
"""

# The preloaded library lets the other thread guard the page that both copies to `host` use, before the second one is late.
_TWO_THREADS = """
import ctypes, threading, torch
from ctypes import c_void_p
from accelerator import simulation
from tests.support.simulation_driver import loaded_runtime
x, host, other, is_over = torch.ones(16, device="cuda"), torch.zeros(16).pin_memory(), torch.zeros(16).pin_memory(), False
stream, side, preloaded = torch.cuda.current_stream(), torch.cuda.Stream(), ctypes.CDLL(None)
torch.cuda.synchronize()
def copy():
    with torch.cuda.stream(side):
        while not is_over:
            other.copy_(x, non_blocking=True)
            preloaded.count_copy()
thread = threading.Thread(target=copy)
host[:8].copy_(x[:8], non_blocking=True)
thread.start()
target, source = c_void_p(host[8:].data_ptr()), c_void_p(x.data_ptr())
function = ctypes.cast(loaded_runtime().cudaMemcpyAsync, c_void_p)
assert preloaded.copy_late(function, target, source, ctypes.c_size_t(32), c_void_p(stream.cuda_stream)) == 0
is_over = True
thread.join()
stream.synchronize()
print(host.tolist() == [1] * 16, len(simulation.races()))
"""

# What race detection allocates lies on the page of the registered memory.
_SMALL_REGISTERED_MEMORY = """
import ctypes, torch
from accelerator import simulation
from tests.support.simulation_driver import loaded_runtime
libc, runtime, size = ctypes.CDLL(None), loaded_runtime(), ctypes.c_size_t(32)
libc.malloc.restype = ctypes.c_void_p
x, stream = torch.ones(8, device="cuda"), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
torch.cuda.synchronize()
blocks = [libc.malloc(ctypes.c_size_t(size)) for _ in range(200) for size in range(48, 288, 16)]
host = blocks[len(blocks) // 2]
assert runtime.cudaHostRegister(ctypes.c_void_p(host), size, 0) == 0
def copy():
    assert runtime.cudaMemcpyAsync(ctypes.c_void_p(host), ctypes.c_void_p(x.data_ptr()), size, 4, stream) == 0
copy()
torch.cuda.synchronize()
for block in blocks:
    if block != host and block // 4096 == host // 4096:
        libc.free(ctypes.c_void_p(block))
for _ in range(20):
    copy()
torch.cuda.synchronize()
print((ctypes.c_float * 8).from_address(host)[:] == [1] * 8, len(simulation.races()))
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


@pytest.mark.parametrize(
    ("machine", "pending"),
    [
        pytest.param({"late_copies": True}, "nan 0", id="late"),
        pytest.param({"races": "report"}, "200.0 1", id="races"),
        pytest.param({"late_copies": True, "races": "report"}, "nan 1", id="both", marks=pytest.mark.slow),
    ],
)
def test_a_host_function_of_the_stream_reads_the_target(machine: dict[str, Any], pending: str) -> None:
    done = support.python(_HOST_FUNCTION, simulated_environment(gpus=1, **machine))
    assert done.stdout == f"[2.0] 0 {pending}\n200.0\n", done.stderr


@pytest.mark.slow
def test_another_thread_guards_the_page_of_a_late_copy(tmp_path: Path) -> None:
    machine = simulated_environment(gpus=1, races="report", late_copies=True)
    library = compiled(LATE_LOCKS.read_text(), tmp_path / "late_locks.so", "-shared", "-fPIC")
    done = support.python(_TWO_THREADS, {**machine, "LD_PRELOAD": f"{library}:{machine['LD_PRELOAD']}"}, timeout=60)
    assert (done.stdout, done.stderr) == ("True 0\n", "")


def test_race_detections_own_memory_is_beside_registered_memory() -> None:
    done = support.python(_SMALL_REGISTERED_MEMORY, simulated_environment(gpus=1, races="report"), timeout=60)
    assert (done.stdout, done.stderr) == ("True 0\n", "")


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
