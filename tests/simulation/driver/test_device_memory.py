"""Device memory of the simulated driver: handles for other processes, contents of new memory, limits of pinned memory.

The programs call the driver and the runtime through ctypes, each in its own process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.driver.test_memory_misuse import PRELUDE, evaluate
from tests.support import run, simulated_environment
from tests.support.simulation import DEADLINE, MIB, allocator_variables, linux_only
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = linux_only

INVALID_HANDLE, OUT_OF_MEMORY = 400, 2

IMPORT = """
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]

def export(address):
    handle = Handle()
    assert cuda("cudaIpcGetMemHandle", byref(handle), address) == 0
    return bytes(handle.bytes).hex()

def open_exported(text):
    handle, address = Handle((ctypes.c_ubyte * 64)(*bytes.fromhex(text))), c_void_p()
    return runtime.cudaIpcOpenMemHandle(byref(address), handle, 1), address.value
"""


def export_and_import(exporter: str, importer: str) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the exporter's first report, the importer's report and the exporter's second report.

    The importer gets the first report as ``handles``. The exporter waits for the importer's end before its second report.
    """
    child = simulated_environment()
    command = [sys.executable, "-c", PRELUDE + IMPORT + textwrap.dedent(exporter), "13"]
    with subprocess.Popen(command, env=child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        program = PRELUDE + IMPORT + f"handles = {first!r}\n" + textwrap.dedent(importer)
        second = json.loads(run(program, child, "13"))
        last, _ = process.communicate("go on\n", timeout=DEADLINE)
    return first, second, json.loads(last)


def test_ipc_handle_of_freed_memory_is_invalid() -> None:
    exporter = """
        freed = made(cuda, "cudaMalloc", MIB)
        stale = export(freed)
        assert cuda("cudaFree", freed) == 0
        live = made(cuda, "cudaMalloc", MIB)
        assert cuda("cudaMemset", live, 7, MIB) == 0
        report(stale, export(live), export(live))
        sys.stdin.readline()
        report(bytes_at(live, MIB) == b"\\x07" * MIB)
    """
    importer = """
        codes = [open_exported(handle)[0] for handle in handles]
        report(codes, open_exported("00" * 64)[0], open_exported(handles[0][:24] + handles[1][24:])[0])
    """
    _, (codes, empty, _), (kept,) = export_and_import(exporter, importer)
    assert codes == [INVALID_HANDLE, 0, 0]
    assert empty == 1
    assert kept


def test_stale_ipc_handle_does_not_open_another_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"kept" * MIB)
    exporter = f"""
        block = made(cuda, "cudaMalloc", 2 * MIB)
        handle = export(block)
        assert cuda("cudaFree", block) == 0
        for descriptor in range(3, 64):  # all of them, because one holds the memory
            os.close(descriptor) if os.path.exists(f"/proc/self/fd/{{descriptor}}") else None
        files = [os.open({str(file)!r}, os.O_RDWR) for _ in range(40)]
        report(handle)
        sys.stdin.readline()
        another = made(cuda, "cudaMalloc", 2 * MIB)
        assert cuda("cudaMemset", another, 7, 2 * MIB) == 0
        report(open({str(file)!r}, "rb").read() == b"kept" * MIB, len(export(another)))
    """
    importer = """
        code, address = open_exported(handles[0])
        if code == 0:
            assert cuda("cudaMemset", address, 7, 2 * MIB) == 0
        report(code)
    """
    _, (code,), (is_kept, size) = export_and_import(exporter, importer)
    assert (code, is_kept, size) == (INVALID_HANDLE, True, 128)
    assert file.read_bytes() == b"kept" * MIB


@pytest.mark.slow
def test_ipc_export_keeps_concurrent_writes() -> None:
    program = (
        IMPORT
        + """
import threading
lost, stop, addresses = [], False, []

def write():
    value = 0
    while not stop:
        if addresses:
            value += 1
            place = c_uint64.from_address(addresses[-1])
            place.value = value
            for _ in range(20):
                if place.value != value:
                    lost.append(value)
                    break

thread = threading.Thread(target=write)
thread.start()
for _ in range(10):
    block = made(cuda, "cudaMalloc", 64 * MIB)
    assert cuda("cudaMemset", block, 7, 64 * MIB) == 0
    addresses.append(block)
    export(block)
stop = True
thread.join()
report(len(lost))
"""
    )
    assert evaluate(program) == [0]


def test_ipc_memory_is_shared_in_both_directions() -> None:
    exporter = """
        block = made(cuda, "cudaMalloc", MIB)
        assert cuda("cudaMemset", block, 1, MIB) == 0
        handle = export(block)
        assert cuda("cudaMemset", block, 2, MIB) == 0
        report(handle)
        sys.stdin.readline()
        report(bytes_at(block, 4).hex())
    """
    importer = """
        code, address = open_exported(handles[0])
        content = bytes_at(address, 4).hex()
        assert cuda("cudaMemset", address, 3, MIB) == 0
        report(code, content, cuda("cudaIpcCloseMemHandle", address), cuda("cudaIpcCloseMemHandle", address))
    """
    _, second, last = export_and_import(exporter, importer)
    assert second == [0, "02020202", 0, 1]
    assert last == ["03030303"]


@pytest.mark.parametrize("limit", ["RLIMIT_NOFILE", "RLIMIT_FSIZE"])
def test_memory_without_a_heap_file(limit: str) -> None:
    program = (
        IMPORT
        + f"""
import resource
_, hard = resource.getrlimit(resource.{limit})
resource.setrlimit(resource.{limit}, (3 if {limit == "RLIMIT_NOFILE"} else 4096, hard))
block = made(cuda, "cudaMalloc", 4 * MIB)
codes = [cuda("cudaMemset", block, 7, 4 * MIB), cuda("cudaMemset", block, 0, 4 * MIB), cuda("cudaMemset", block, 5, 16)]
content = bytes_at(block, 32).hex()
report(codes, content, cuda("cudaIpcGetMemHandle", byref(Handle()), block), cuda("cudaFree", block))
"""
    )
    assert evaluate(program) == [[0, 0, 0], "05" * 16 + "00" * 16, 304, 0]


def test_freed_memory_is_returned_to_the_host() -> None:
    program = """
        def resident():
            return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) << 10
        before = resident()
        block = made(cuda, "cudaMalloc", 64 * MIB)
        assert cuda("cudaMemset", block, 7, 64 * MIB) == 0
        during = resident()
        files = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        heaps = [name for name in files if os.path.lexists(name) and "cuda-memory" in os.readlink(name)]
        (descriptor,) = [int(name.rsplit("/")[-1]) for name in heaps]
        used = os.fstat(descriptor).st_blocks * 512
        assert cuda("cudaFree", block) == 0
        report(during - before > 60 * MIB, resident() - before < 8 * MIB, used >= 64 * MIB, os.fstat(descriptor).st_blocks)
    """
    assert evaluate(program) == [True, True, True, 0]


@pytest.mark.parametrize(("fill", "content"), [("zero", "00"), ("nan", "ff")])
def test_fill_setting_initializes_new_memory(fill: str, content: str) -> None:
    program = """
        blocks = [made(cuda, "cudaMalloc", MIB), made(cuda, "cudaMallocAsync", MIB, None)]
        blocks.append(made(cu, "cuMemAddressReserve", 2 * MIB, 0, 0, 0))
        handle = made(cu, "cuMemCreate", 2 * MIB, byref(properties()), 0)
        assert cu("cuMemMap", blocks[2], 2 * MIB, 0, handle, 0) == 0
        assert cu("cuMemSetAccess", blocks[2], 2 * MIB, byref(Access(1, 0, 3)), 1) == 0
        report([sorted({byte for byte in bytes_at(block, MIB)}) for block in blocks])
    """
    environment = simulated_environment({"ACCELERATOR_SIM_FILL": fill})
    assert json.loads(run(PRELUDE + textwrap.dedent(program), environment, "13")) == [[[int(content, 16)]] * 3]


@needs_cuda_torch
@pytest.mark.parametrize(
    "settings", ["", "expandable_segments:True", pytest.param("backend:cudaMallocAsync", marks=pytest.mark.slow)]
)
def test_fresh_tensors_are_nan(settings: str) -> None:
    program = """
        import torch
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            tensor = torch.empty(5 << 20, dtype=dtype, device="cuda")
            print(tensor.cpu().isnan().all().item(), torch.ones(3, dtype=dtype, device="cuda").sum().item())
    """
    child = simulated_environment({"ACCELERATOR_SIM_FILL": "nan", **allocator_variables(settings)})
    assert run(program, child) == "True 3.0\n" * 4


def test_pinned_memory_is_limited_by_host_memory() -> None:
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    program = f"""
        half, most = {size} // 2, {size} - 16 * MIB
        blocks = [made(cuda, "cudaHostAlloc", half, c_uint(0))]
        other = c_void_p()
        codes = [cuda("cudaHostAlloc", byref(other), most - half, c_uint(0)),
                 cuda("cudaHostAlloc", byref(c_void_p()), half, c_uint(0)),
                 cuda("cudaMallocHost", byref(c_void_p()), half), cu("cuMemHostAlloc", byref(c_void_p()), half, c_uint(0))]
        before = free_bytes()
        codes += [cuda("cudaFreeHost", blocks[0]), cuda("cudaFreeHost", other)]
        codes.append(cuda("cudaHostAlloc", byref(other), most, c_uint(0)))
        report(codes, before - free_bytes())
    """
    assert evaluate(program) == [[0, 2, 2, 2, 0, 0, 0], 0]


def test_processes_share_the_pinned_memory_limit(tmp_path: Path) -> None:
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    program = f"""
        most = {size} - 16 * MIB
        kept = made(cuda, "cudaHostAlloc", most, c_uint(0))
        import subprocess
        program = sys.argv[2] + "report(cuda('cudaHostAlloc', byref(c_void_p()), int(sys.argv[2]), c_uint(0)))"
        second = [sys.executable, "-c", program, "13", str(most)]
        print(subprocess.run(second, capture_output=True, text=True, check=True).stdout.strip())
        assert cuda("cudaFreeHost", kept) == 0
        print(subprocess.run(second, capture_output=True, text=True, check=True).stdout.strip())
    """
    child = simulated_environment(state=tmp_path / "state")
    assert run(PRELUDE + textwrap.dedent(program), child, "13", PRELUDE) == f"[{OUT_OF_MEMORY}]\n[0]\n"
