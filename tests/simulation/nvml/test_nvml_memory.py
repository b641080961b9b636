"""Memory, processes and MIG instances in the simulated NVML, called through NVIDIA's Python binding."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support import sample, simulated_environment, with_prelude
from tests.support.simulation import GIB, MIB, PRELUDE, evaluate, linux_only, python, run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [linux_only, pytest.mark.torch_free]


# Memory and processes


def test_memory_of_an_idle_gpu() -> None:
    program = """
        h = n.nvmlDeviceGetHandleByIndex(0)
        one, two = n.nvmlDeviceGetMemoryInfo(h), n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2)
        report([one.total, one.free, one.used, two.total, two.reserved, two.free, two.used])
    """
    assert evaluate(program, memory="8GiB") == [8 * GIB, 8 * GIB, 0, 8 * GIB, 0, 8 * GIB, 0]
    memory, total = 15102 * MIB, 15360 * MIB
    reserve = total - memory
    assert evaluate(program, name="T4") == [total, memory, reserve, total, reserve, memory, 0]


def test_memory_in_use() -> None:
    program = f"""
        h = n.nvmlDeviceGetHandleByIndex(1)
        def used():
            one, two = n.nvmlDeviceGetMemoryInfo(h), n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2)
            assert one.used + one.free == one.total == two.reserved + two.used + two.free
            return one.used - two.reserved, two.used
        before = used()
        cuda, pointer = allocate({GIB}, 1)
        during = used()
        cuda.cuMemFree_v2(pointer)
        other = n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(0), n.nvmlMemory_v2).used
        report([before, during, used(), other])
    """
    before, during, after, other = evaluate(program, 2, name="T4")
    assert before == [0, 0]
    assert other == 0
    assert during[0] == during[1] == after[0] + GIB


def test_programs_can_use_all_memory_but_the_reserve() -> None:
    program = f"""
        kept = allocate({15102 * MIB})
        info = n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(0), n.nvmlMemory_v2)
        report([info.total, info.used, info.free, info.reserved])
    """
    assert evaluate(program, name="T4") == [15360 * MIB, 15102 * MIB, 0, (15360 - 15102) * MIB]


def test_processes_of_an_idle_gpu() -> None:
    program = """
        h = n.nvmlDeviceGetHandleByIndex(0)
        report([n.nvmlDeviceGetComputeRunningProcesses(h), n.nvmlDeviceGetGraphicsRunningProcesses(h)])
    """
    assert evaluate(program) == [[], []]


def test_every_version_of_the_process_list() -> None:
    program = f"""
        kept = allocate({100 * MIB})
        h, library = n.nvmlDeviceGetHandleByIndex(0), ctypes.CDLL("libnvidia-ml.so.1")
        class Old(ctypes.Structure):
            _fields_ = [("pid", ctypes.c_uint), ("memory", ctypes.c_ulonglong)]
        count, rows = ctypes.c_uint(0), (Old * 4)()
        first = library.nvmlDeviceGetComputeRunningProcesses(h, ctypes.byref(count), None), count.value
        count.value = 4
        second = library.nvmlDeviceGetComputeRunningProcesses(h, ctypes.byref(count), rows), count.value
        new = [f(h) for f in (n.nvmlDeviceGetComputeRunningProcesses_v2, n.nvmlDeviceGetComputeRunningProcesses_v3)]
        report([os.getpid(), first, second, rows[0].pid, rows[0].memory,
                [[(p.pid, p.usedGpuMemory, p.gpuInstanceId, p.computeInstanceId) for p in rows] for rows in new]])
    """
    pid, first, second, old_pid, memory, new = evaluate(program)
    assert first == [7, 1]
    assert second == [0, 1]
    assert old_pid == pid
    assert memory >= 100 * MIB
    assert new == [[[pid, memory, 2**32 - 1, 2**32 - 1]]] * 2


@pytest.mark.parametrize("version", ["", "_v2", "_v3"])
@pytest.mark.parametrize("processes", sample([1, 2, 3], 1))
def test_process_list_of_every_capacity(tmp_path: Path, version: str, processes: int) -> None:
    program = f"""
        kept, children = allocate({MIB}), []
        for _ in range({processes - 1}):
            command = [sys.executable, "-c", sys.argv[1] + "kept = allocate({MIB}); report(1); sys.stdin.read()", ""]
            children.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert children[-1].stdout.readline() == b"1\\n"
        class Row(ctypes.Structure):
            _fields_ = [("pid", ctypes.c_uint), ("memory", ctypes.c_ulonglong)]
            _fields_ += [("instances", ctypes.c_uint * 2)] if {version!r} else []
        h, library = n.nvmlDeviceGetHandleByIndex(0), ctypes.CDLL("libnvidia-ml.so.1")
        pids = sorted([os.getpid(), *(child.pid for child in children)])
        reports = []
        for capacity in range(5):
            count, rows = ctypes.c_uint(capacity), (Row * 5)()
            code = library.nvmlDeviceGetComputeRunningProcesses{version}(h, ctypes.byref(count), rows)
            listed = sorted(row.pid for row in rows if row.pid)
            reports.append([code, count.value, "all" if listed == pids else len(listed)])
        for child in children:
            child.communicate(b"")
        report(reports)
    """
    child = simulated_environment(state=tmp_path / "state")
    text = with_prelude("import subprocess\n" + PRELUDE + "n.nvmlInit()", program)
    done = python(text, PRELUDE, env=child)
    assert done.returncode == 0, done.stderr
    too_small, enough = [7, processes, 0], [0, processes, "all"]
    assert json.loads(done.stdout) == [enough if capacity >= processes else too_small for capacity in range(5)]


def test_processes_of_one_machine_are_listed_to_each_other(tmp_path: Path) -> None:
    child = simulated_environment(gpus=2, state=tmp_path / "state")
    program = PRELUDE + f"kept = allocate({GIB}, 1); report(os.getpid()); sys.stdout.flush(); sys.stdin.read()"
    program_of_observer = """
        n.nvmlInit()
        def users(h):
            return [(p.pid, p.usedGpuMemory) for p in n.nvmlDeviceGetComputeRunningProcesses(h)]
        report([[n.nvmlDeviceGetMemoryInfo(h).used, *users(h)] for h in handles()])
    """
    with subprocess.Popen(
        [sys.executable, "-c", program], env=child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as user:
        assert user.stdout is not None
        pid = json.loads(user.stdout.readline())
        idle, used = run(program_of_observer, child)
        user.kill()
    assert idle == [0]
    assert used[0] >= GIB
    assert used[1:] == [[pid, used[0]]]
    assert run(program_of_observer, child) == [[0], [0]]


def test_nvml_queries_do_not_load_the_driver() -> None:
    program = """
        h = n.nvmlDeviceGetHandleByIndex(0)
        n.nvmlDeviceGetMemoryInfo(h), n.nvmlDeviceGetComputeRunningProcesses(h)
        report("libcuda.so" in open("/proc/self/maps").read())
    """
    assert evaluate(program) is False


# MIG


def test_mig_modes() -> None:
    """On with two instances, on without any, off, and of a GPU that has no MIG."""
    program = """
        report([[code(n.nvmlDeviceGetMigMode, h) or n.nvmlDeviceGetMigMode(h), n.nvmlDeviceGetMaxMigDeviceCount(h),
                 code(n.nvmlDeviceGetMigDeviceHandleByIndex, h, 0)] for h in handles()])
    """
    expected = [[[1, 1], 7, 0], [[1, 1], 7, 6], [[0, 0], 0, 6], [3, 0, 3]]
    assert evaluate(program, 4, mig=[2, 0, None], capability=["9.0", "9.0", "9.0", "7.5"]) == expected


@pytest.mark.parametrize(
    ("mig", "indices"),
    [(0, []), (1, [0]), (3, [0, 2, 4]), (4, [0, 2, 4, 6]), (5, [0, 1, 2, 3, 4]), (7, list(range(7)))],
)
def test_mig_instance_indices_and_ids(mig: int, indices: list[int]) -> None:
    program = """
        gpu = n.nvmlDeviceGetHandleByIndex(0)
        devices = instances(gpu)
        report([list(devices), [n.nvmlDeviceGetIndex(h) for h in devices.values()],
                [n.nvmlDeviceGetGpuInstanceId(h) for h in devices.values()],
                [n.nvmlDeviceGetComputeInstanceId(h) for h in devices.values()],
                code(n.nvmlDeviceGetMigDeviceHandleByIndex, gpu, 7)])
    """
    assert evaluate(program, mig=mig) == [indices, indices, [k + 1 for k in range(mig)], [0] * mig, 2]


def test_identity_of_instances() -> None:
    program = """
        gpu = n.nvmlDeviceGetHandleByIndex(1)
        devices = list(instances(gpu).values())
        uuids = [n.nvmlDeviceGetUUID(h) for h in devices]
        older = [f"MIG-{n.nvmlDeviceGetUUID(gpu)}/{k + 1}/0" for k in range(2)]
        report([uuids, [n.nvmlDeviceGetName(h) for h in devices],
                [n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByUUID(u)) for u in uuids + older],
                [n.nvmlDeviceGetIndex(n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(h)) for h in devices],
                [n.nvmlDeviceIsMigDeviceHandle(h).value for h in [gpu, *devices]],
                n.nvmlDeviceGetMemoryInfo(devices[0], n.nvmlMemory_v2).total,
                code(n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, gpu), code(n.nvmlDeviceGetGpuInstanceId, gpu),
                n.nvmlDeviceGetCudaComputeCapability(devices[0])])
    """
    uuids, names, by_uuid, gpus, are_instances, *rest = evaluate(program, 2, mig=[None, 2], name="Big", memory="8GiB")
    assert all(uuid.startswith("MIG-") for uuid in uuids)
    assert names == ["Big MIG 1g"] * 2
    assert by_uuid == uuids * 2
    assert gpus == [1, 1]
    assert are_instances == [0, 1, 1]
    assert rest == [GIB, 2, 2, [9, 0]]


def test_instances_have_memory_and_no_telemetry() -> None:
    program = """
        gpu = n.nvmlDeviceGetHandleByIndex(0)
        instance = instances(gpu)[2]
        fields = [n.nvmlDeviceGetUtilizationRates, lambda h: n.nvmlDeviceGetTemperature(h, 0),
                  n.nvmlDeviceGetPowerUsage, lambda h: n.nvmlDeviceGetTemperatureV(h, 0),
                  lambda h: n.nvmlDeviceGetClockInfo(h, 1), lambda h: n.nvmlDeviceGetMaxClockInfo(h, 1),
                  n.nvmlDeviceGetMigMode, n.nvmlDeviceGetMemoryInfo]
        report([[code(f, h) for f in fields] for h in (gpu, instance)])
    """
    assert evaluate(program, mig=2) == [[3, 0, 0, 0, 0, 0, 0, 0], [3, 3, 3, 3, 3, 3, 3, 0]]


def test_an_instance_has_no_reserve() -> None:
    program = """
        gpu = n.nvmlDeviceGetHandleByIndex(0)
        memory = [n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2) for h in [gpu, *instances(gpu).values()]]
        report([[info.total, info.reserved, info.free] for info in memory])
    """
    memory, total = 42_298_834_944, 40960 * MIB
    whole, instance = [total, total - memory, memory], [memory // 8, 0, memory // 8]
    assert evaluate(program, mig=2, name="A100-40GB") == [whole, instance, instance]


def test_memory_and_processes_of_an_instance() -> None:
    program = f"""
        kept = allocate({100 * MIB})
        gpu = n.nvmlDeviceGetHandleByIndex(0)
        devices = [gpu, *instances(gpu).values()]
        rows = [[[p.pid, p.usedGpuMemory, p.gpuInstanceId, p.computeInstanceId]
                 for p in n.nvmlDeviceGetComputeRunningProcesses(h)] for h in devices]
        report([os.getpid(), rows, [n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2).used for h in devices]])
    """
    pid, processes, used = evaluate(program, mig=2)
    assert used[0] == used[1] >= 100 * MIB
    assert used[2] == 0
    assert processes == [[[pid, used[0], 1, 0]], [[pid, used[0], 1, 0]], []]


@pytest.mark.parametrize("bytes", [MIB, 8 * GIB - MIB])
def test_free_memory_equals_the_drivers(bytes: int) -> None:
    program = f"""
        cuda, _ = allocate({bytes})
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        assert cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
        memory = n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(0))
        report([free.value, total.value, memory.free, memory.total])
    """
    free, total, *nvml = evaluate(program)
    assert [free, total] == nvml == [8 * GIB - bytes, 8 * GIB]
