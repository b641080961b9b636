"""The simulated CUDA in separate processes: initialization, forks, failures, allocators, memory of several processes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from accelerator import simulation
from tests import support
from tests.support import run, simulated_environment
from tests.support.discovery import compiled
from tests.support.simulation import allocator_variables, linux_only
from tests.support.simulation_driver import DRIVER, evaluate, needs_cuda_torch

pytestmark = linux_only

GIB = 2**30
MIB = 2**20
HELD_LOCK = Path(__file__).with_name("held_lock.c")


def events(log: Path) -> list[str]:
    """Return the events in a log of initializations, without process ids."""
    return [line.partition(" ")[2] for line in log.read_text().splitlines()] if log.exists() else []


class TestInitialization:
    def test_count_before_initialization_is_an_error(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        assert evaluate("report(count(), count(), cuda.cuInit(0), count())", gpus=2, log=log) == [[3, -1], [3, -1], 0, [0, 2]]
        assert events(log) == ["cuInit"]

    def test_second_cu_init_has_no_effect(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        assert evaluate("report(cuda.cuInit(0), cuda.cuInit(0), cuda.cuInit(1))", log=log) == [0, 0, 1]
        assert events(log) == ["cuInit"]

    def test_no_gpu_is_an_error(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        assert evaluate("report(cuda.cuInit(0), count())", gpus=0, log=log) == [100, [3, -1]]
        assert events(log) == []

    def test_delay(self) -> None:
        program = "import time; begin = time.monotonic(); cuda.cuInit(0); report(time.monotonic() - begin)"
        (seconds,) = evaluate(program, {"ACCELERATOR_SIM_INIT_DELAY": "nvmlInit:600000,cuInit:300"})
        assert seconds >= 0.3  # NVML's delay of 600 s would exceed the deadline

    def test_visible_devices_are_read_once(self) -> None:
        program = "cuda.cuInit(0); os.environ['CUDA_VISIBLE_DEVICES'] = '0'; cuda.cuInit(0); report(count())"
        assert evaluate(program, gpus=3) == [[0, 3]]

    @needs_cuda_torch
    def test_importing_torch_initializes_nothing(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        run("import torch", simulated_environment(log=log))
        assert events(log) == []

    @needs_cuda_torch
    def test_device_queries_create_no_context(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        program = "import torch; torch.cuda.is_available(); torch.cuda.init(); torch.cuda.get_device_properties(1)"
        run(program, simulated_environment(gpus=2, log=log))
        assert Counter(events(log))["cuInit"] == Counter(events(log))["cudart"] == 1
        assert not [event for event in events(log) if event.startswith("context")]

    @needs_cuda_torch
    @pytest.mark.parametrize(
        ("program", "contexts"),
        [
            ("torch.empty(3, device='cuda:1')", ["context 1"]),
            ("torch.cuda.set_device(1)", ["context 1"]),
            ("torch.ones(3).to('cuda:1').cpu()", ["context 1"]),
            ("torch.cuda.Stream(device=1)", ["context 1"]),
            (
                "import threading; event = torch.cuda.Event(); event.record(torch.cuda.Stream(1));"
                " threading.Thread(target=event.query).start()",
                ["context 1"],
            ),
            ("torch.empty(3, device='cuda:1').to('cuda:0')", ["context 1", "context 0"]),
        ],
    )
    def test_contexts_are_created_only_on_used_devices(self, tmp_path: Path, program: str, contexts: list[str]) -> None:
        log = tmp_path / "log"
        run(f"import torch; {program}", simulated_environment(gpus=2, log=log))
        assert [event for event in events(log) if event.startswith("context")] == contexts


class TestFork:
    CHILD = "from tests.programs import in_child\n"

    def test_driver_fails_in_child_of_an_initialized_process(self) -> None:
        program = "cuda.cuInit(0); report(in_child(lambda: (cuda.cuInit(0), count(), allocate(1))), count())"
        assert evaluate(self.CHILD + program, gpus=2) == [[3, [3, -1], 3], [0, 2]]

    @pytest.mark.parametrize("major", [12, 13])
    def test_runtime_fails_in_child_of_an_initialized_process(self, major: int) -> None:
        program = f"""
runtime = ctypes.CDLL("libcudart.so.{major}")
device = ctypes.c_int()
def calls():
    return runtime.cudaGetDevice(ctypes.byref(device)), runtime.cudaDeviceSynchronize(), runtime.cudaGetLastError()
runtime.cudaSetDevice(0)
report(calls(), in_child(calls))
"""
        assert evaluate(self.CHILD + program) == [[0, 0, 0], [3, 3, 3]]

    def test_driver_works_in_child_forked_before_initialization(self) -> None:
        assert evaluate(self.CHILD + "report(in_child(lambda: (cuda.cuInit(0), count())))", gpus=2) == [[0, [0, 2]]]

    def test_cu_init_without_devices_does_not_break_fork(self) -> None:
        program = "cuda.cuInit(0); report(in_child(lambda: cuda.cuInit(0)))"
        assert evaluate(self.CHILD + program, gpus=0) == [100]

    @pytest.mark.parametrize(
        ("library", "call", "locks"),
        [
            ("libnccl.so.2", "ncclGetLastError", 1),
            ("libcudart.so.12", "__cudaRegisterFunction", 1),
            ("libcudart.so.13", "__cudaRegisterVar", 1),
            ("libcudart.so.13", "interrupt", 1),
            ("libcudart.so.13", "place", 1),
            ("libcudart.so.13", "cudaGetDeviceCount", 3),
            ("libcuda.so.1", "cuInit", 2),
            ("libnvidia-ml.so.1", "nvmlDeviceGetHandleByIndex_v2", 1),
        ],
    )
    def test_locks_held_during_fork_are_free_in_the_child(self, tmp_path: Path, library: str, call: str, locks: int) -> None:
        native = Path(simulation.__file__).parent / "native"
        program = compiled(HELD_LOCK.read_text(), tmp_path / "held_lock", "-rdynamic", "-pthread", f"-I{native}")
        for lock in range(1, locks + 1):
            child = simulated_environment(races="report", state=tmp_path / f"state{lock}")
            assert subprocess.run([program, library, call, str(lock)], env=child, check=False).returncode == 0, lock

    @needs_cuda_torch
    def test_torch_raises_in_child_of_an_initialized_process(self) -> None:
        program = """
            import os, sys, torch
            torch.empty(1, device="cuda")
            if os.fork() == 0:
                try:
                    torch.empty(1, device="cuda")
                except RuntimeError as error:
                    print(error, flush=True)
                    os._exit(0)
                os._exit(1)
            sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
        """
        assert "Cannot re-initialize CUDA in forked subprocess" in run(program, simulated_environment())

    @needs_cuda_torch
    def test_runtime_device_count_breaks_fork(self) -> None:
        program = """
            import os, sys, torch
            assert torch._C._cuda_getDeviceCount() == 2
            if os.fork() == 0:
                print(torch._C._cuda_getDeviceCount(), flush=True)
                try:
                    torch.empty(1, device="cuda")
                except RuntimeError as error:
                    print(error, flush=True)
                os._exit(0)
            os.wait()
        """
        count, _, error = run(program, simulated_environment(gpus=2)).partition("\n")
        assert count == "2", "torch keeps its count"
        assert "initialization error" in error or "Cannot re-initialize" in error

    @needs_cuda_torch
    def test_torch_works_in_child_forked_before_initialization(self) -> None:
        program = """
            import os, sys, torch
            assert torch.cuda.device_count() == 1
            if os.fork() == 0:
                assert torch.ones(3).cuda().cpu().sum() == 3
                os._exit(0)
            sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
        """
        run(program, simulated_environment())

    @needs_cuda_torch
    def test_first_ops_of_two_threads_in_forked_children(self) -> None:
        """torch renews its CPU threads in the first op after a fork, and two threads that do so at once get an error."""
        program = """
            import os, sys, threading, torch
            torch.set_num_threads(2)

            def work(results, start):
                start.wait()
                results.append((torch.arange(4.0, device="cuda") + 1).sum().item())

            for _ in range(20):
                if os.fork() == 0:
                    results, start = [], threading.Barrier(2)
                    threads = [threading.Thread(target=work, args=(results, start)) for _ in range(2)]
                    for thread in threads:
                        thread.start()
                    for thread in threads:
                        thread.join()
                    os._exit(0 if results == [10.0, 10.0] else 1)
                status = os.waitstatus_to_exitcode(os.wait()[1])
                assert status == 0, status
        """
        run(program, simulated_environment())


class TestFailures:
    @pytest.mark.parametrize(("errors", "code"), [("cuInit:999", 999), ("cuI*:802", 802), ("cuInitialize:1", 0)])
    def test_injected_cu_init_errors(self, errors: str, code: int, tmp_path: Path) -> None:
        log = tmp_path / "log"
        assert evaluate("report(cuda.cuInit(0))", errors=errors, log=log) == [code]
        assert events(log) == ([] if code else ["cuInit"])

    def test_error_of_one_gpu(self) -> None:
        program = "cuda.cuInit(0); report(use(0), allocate(1), use(1), allocate(1))"
        assert evaluate(program, gpus=2, errors="cuMemAlloc_v2@1:2") == [0, 0, 0, 2]
        assert evaluate(program, gpus=2, errors="cuDevicePrimaryCtxRetain@1:46") == [0, 0, 46, 0]

    def test_errors_name_physical_gpus(self) -> None:
        program = "cuda.cuInit(0); report(use(0), use(1))"
        assert evaluate(program, {"CUDA_VISIBLE_DEVICES": "1,0"}, gpus=2, errors="cuDevicePrimaryCtxRetain@1:2") == [2, 0]

    @needs_cuda_torch
    @pytest.mark.parametrize(
        ("errors", "program", "message"),
        [
            ("cuMemAlloc_v2@1:2", "torch.empty(3, device='cuda:0'); torch.empty(3, device='cuda:1')", "out of memory"),
            ("cuDevicePrimaryCtxRetain:46", "torch.empty(3, device='cuda')", "busy or unavailable"),
            ("cudaStreamSynchronize:719", "torch.ones(3).cuda().cpu()", "unspecified launch failure"),
            ("cudaDeviceSynchronize@1:700", "torch.cuda.synchronize(0); torch.cuda.synchronize(1)", "illegal memory"),
        ],
    )
    def test_torch_reports_injected_errors(self, errors: str, program: str, message: str) -> None:
        source = f"import torch\ntry: {program}\nexcept RuntimeError as error: print(error)"
        assert message in run(source, simulated_environment(gpus=2, errors=errors))

    DRIVERS = (
        ({"driver": "absent"}, "Found no NVIDIA driver on your system"),
        ({"driver": "old"}, "(found version 11040)"),
        ({"driver": "broken"}, "unknown error"),
        ({"gpus": 0}, "No CUDA GPUs are available"),
    )

    @needs_cuda_torch
    @pytest.mark.parametrize(("machine", "message"), DRIVERS)
    def test_torch_reports_driver_problems(self, machine: dict[str, Any], message: str) -> None:
        program = """
            import warnings, torch
            warnings.simplefilter("ignore")
            assert not torch.cuda.is_available()
            try:
                torch.empty(1, device="cuda")
            except RuntimeError as error:
                print(error)
        """
        assert message in run(program, simulated_environment(**machine))

    @needs_cuda_torch
    def test_failed_initialization_is_not_retried(self) -> None:
        program = """
            import ctypes, os, torch
            runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}")
            count = ctypes.c_int()
            print(runtime.cudaGetDeviceCount(ctypes.byref(count)))
            ctypes.CDLL("libcuda.so.1")
            print(runtime.cudaGetDeviceCount(ctypes.byref(count)))
        """
        assert run(program, simulated_environment(driver="broken")).split() == ["999", "999"]


class TestSharedMachine:
    """Processes that share a state file share the memory of the machine."""

    @pytest.mark.parametrize("is_killed", [False, True])
    def test_memory_of_another_process_counts_until_it_ends(self, tmp_path: Path, is_killed: bool) -> None:
        environment = simulated_environment(memory="1GiB", state=tmp_path / "state")

        def called(calls: str) -> list[int]:
            figures: list[int] = json.loads(run(DRIVER + f"cuda.cuInit(0); use(0); report({calls})", environment))
            return figures

        source = DRIVER + f"cuda.cuInit(0); report(use(0), allocate({600 * MIB}), free())\nsys.stdin.read()"
        command = [sys.executable, "-c", source]
        with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout
            assert other.stdin
            assert json.loads(other.stdout.readline()) == [0, 0, 424 * MIB]
            assert called(f"free(), allocate({600 * MIB}), allocate({400 * MIB})") == [424 * MIB, 2, 0]
            if is_killed:
                other.send_signal(signal.SIGKILL)
            else:
                other.stdin.close()
            # An ended process is a zombie until it is waited for, and must not hold memory. An allocation would look for ended
            # processes, so the free memory is read without one.
            deadline = time.monotonic() + 10
            while called("free()") != [GIB] and time.monotonic() < deadline:
                pass
            assert called("free()") == [GIB]
        assert called(f"free(), allocate({GIB})") == [GIB, 0]

    def test_processes_without_state_file_do_not_share_memory(self) -> None:
        assert evaluate(f"cuda.cuInit(0); report(use(0), allocate({GIB}), allocate(1))", memory="1GiB") == [0, 0, 2]


class TestVirtualMemory:
    PROGRAM = """
MIB = 2**20
def size(number): return ctypes.c_size_t(number)
def at(offset): return ctypes.c_size_t(base.value + offset)
properties = (ctypes.c_int * 8)(1, 1, 1, 0)  # pinned, shared as a descriptor, on device 0
access = (ctypes.c_int * 3)(1, 0, 3)  # device 0 reads and writes
base, handle, imported, descriptor = ctypes.c_size_t(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
word = ctypes.c_int()
cuda.cuInit(0)
use(0)

def create(bytes):
    return cuda.cuMemCreate(ctypes.byref(handle), size(bytes), properties, size(0))

def map(handle, offset):
    return (cuda.cuMemMap(at(offset), size(4 * MIB), size(0), handle, size(0)),
            cuda.cuMemSetAccess(at(offset), size(4 * MIB), access, size(1)))

def read(offset):
    return cuda.cuMemcpyDtoH_v2(ctypes.byref(word), at(offset), size(4)), word.value

cuda.cuMemAddressReserve(ctypes.byref(base), size(16 * MIB), size(0), size(0), size(0))
"""

    def test_physical_memory_is_counted_once_until_last_unmap(self) -> None:
        program = """
report(base.value % (2 * MIB), create(MIB), create(4 * MIB), free(), map(handle, 0), map(handle, 4 * MIB), free(),
       cuda.cuMemsetD32Async(at(0), 7, size(MIB), None), read(8 * MIB - 4), map(handle, 0)[0],
       cuda.cuMemRelease(handle), free(), cuda.cuMemUnmap(at(0), size(8 * MIB)), free(),
       create(2**30), create(4 * MIB), cuda.cuMemAddressFree(base, size(16 * MIB)))
"""
        used = GIB - 4 * MIB
        mapped = [0, 0]
        assert evaluate(self.PROGRAM + program, memory="1GiB") == [
            *(0, 1, 0, used, mapped, mapped, used),
            *(0, [0, 7], 1),
            *(0, used, 0, GIB),
            *(0, 2, 0),
        ]

    def test_imported_descriptor_is_the_same_memory(self) -> None:
        program = """
report(create(4 * MIB), cuda.cuMemExportToShareableHandle(ctypes.byref(descriptor), handle, 1, size(0)),
       cuda.cuMemImportFromShareableHandle(ctypes.byref(imported), ctypes.c_void_p(descriptor.value), 1), free(),
       map(handle, 0), map(imported, 4 * MIB), cuda.cuStreamWriteValue32(None, at(8), 5, 0), read(4 * MIB + 8))
"""
        mapped = [0, 0]
        assert evaluate(self.PROGRAM + program, memory="1GiB") == [0, 0, 0, GIB - 4 * MIB, mapped, mapped, 0, [0, 5]]

    def test_failed_import_leaves_no_descriptor(self) -> None:
        program = """
empty = os.memfd_create("empty")
before = os.listdir("/proc/self/fd")
report(cuda.cuMemImportFromShareableHandle(ctypes.byref(imported), ctypes.c_void_p(empty), 1),
       cuda.cuMemImportFromShareableHandle(None, ctypes.c_void_p(empty), 1), os.listdir("/proc/self/fd") == before)
"""
        assert evaluate(self.PROGRAM + program, memory="1GiB") == [1, 1, True]


@needs_cuda_torch
class TestAllocators:
    ROUND_TRIP = """
        import torch
        MIB = 2**20
        free = torch.cuda.mem_get_info()[0]
        data = torch.randint(0, 256, (10 * MIB,), dtype=torch.uint8)
        there = data.cuda()
        assert torch.equal(there.to("cuda:1").cpu(), data)
        assert torch.cuda.memory_allocated() == 10 * MIB
        try:
            torch.empty(9 * 1024 * MIB, dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError:
            print("out of memory")
        more = [torch.zeros(10 * MIB, dtype=torch.uint8).cuda() for _ in range(10)]
        assert free - torch.cuda.mem_get_info()[0] >= 110 * MIB
        assert torch.equal(there.cpu(), data)
        del there, more
        torch.cuda.empty_cache()
        assert torch.cuda.mem_get_info()[0] == free, (free, torch.cuda.mem_get_info()[0])
        print(torch.cuda.get_allocator_backend(), torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    """

    @pytest.mark.parametrize(
        ("setting", "backend"),
        [
            ("", "native"),
            ("expandable_segments:True", "native"),
            pytest.param("backend:cudaMallocAsync", "cudaMallocAsync", marks=pytest.mark.slow),
        ],
    )
    def test_round_trip(self, setting: str, backend: str) -> None:
        output = run(self.ROUND_TRIP, simulated_environment(allocator_variables(setting), gpus=2))
        assert output.splitlines() == ["out of memory", f"{backend} 0 0"]

    def test_expandable_segments_grow_in_place(self) -> None:
        program = """
            import torch
            MIB = 2**20
            small = torch.empty(20 * MIB, dtype=torch.uint8, device="cuda")
            large = torch.empty(60 * MIB, dtype=torch.uint8, device="cuda")
            segments = torch.cuda.memory_snapshot()
            print(len(segments), segments[0]["is_expandable"], segments[0]["total_size"] // MIB)
            data = torch.randint(0, 256, (60 * MIB,), dtype=torch.uint8)
            large.copy_(data)
            assert torch.equal(large.cpu(), data)
        """
        variables = allocator_variables("expandable_segments:True")
        assert run(program, simulated_environment(variables)).split() == ["1", "True", "80"]


@needs_cuda_torch
class TestBetweenProcesses:
    PROGRAM = """
        import sys
        import torch
        import torch.multiprocessing as mp

        def child(commands, results):
            tensor, handle = commands.get()
            assert tensor.device == torch.device("cuda:0")
            results.put(tensor.cpu().tolist())
            tensor.copy_(torch.arange(100.0))
            event = torch.cuda.Event.from_ipc_handle(0, handle)
            results.put(event.query())
            assert commands.get() == "recorded"
            results.put(event.query())
            event.synchronize()
            results.put(event.query())
            results.put(tensor.cpu().tolist())

        if __name__ == "__main__":
            context = mp.get_context("spawn")
            commands, results = context.Queue(), context.Queue()
            process = context.Process(target=child, args=(commands, results))
            process.start()
            tensor = torch.full((100,), 5.0).cuda()
            event = torch.cuda.Event(interprocess=True)
            commands.put((tensor, event.ipc_handle()))
            assert results.get(timeout=60) == [5.0] * 100
            print(results.get(timeout=60))
            assert torch.equal(tensor.cpu(), torch.arange(100.0))
            tensor.copy_(torch.full((100,), 8.0))
            torch.cuda._sleep(1_000_000_000)
            event.record()
            commands.put("recorded")
            print(results.get(timeout=60), results.get(timeout=60))
            assert results.get(timeout=60) == [8.0] * 100
            process.join()
            sys.exit(process.exitcode)
    """

    @pytest.mark.slow
    @pytest.mark.parametrize("setting", ["", "expandable_segments:True"])
    def test_tensors_and_events(self, tmp_path: Path, setting: str) -> None:
        # Spawned processes import the program from a file.
        script = tmp_path / "share.py"
        script.write_text(textwrap.dedent(self.PROGRAM))
        environment = simulated_environment(allocator_variables(setting))
        program = f"import torch, runpy\nrunpy.run_path({str(script)!r}, run_name='__main__')"
        done = support.python(program, environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["True", "False", "True"]
