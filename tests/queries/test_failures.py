"""Failures of a machine are reported as failures, not as zeros or as figures of another device, and only while they last."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests import support
from tests.support import simulated_environment
from tests.support.discovery import DRIVER, evaluate, evaluate_simulated, noisy_library, on_simulated_gpus

pytestmark = on_simulated_gpus

GIB = 2**30

PRELUDE = textwrap.dedent("""
    import time
    import accelerator as acc

    def outcome(call):
        try:
            return call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def children(log):
        return len({line.split()[0] for line in open(log) if "cuInit" in line})
    """)


def run_program(program: str, *arguments: str, **machine: Any) -> Any:
    return evaluate_simulated(support.with_prelude(PRELUDE, program), *arguments, **machine)


MEMORY = """
    def read():
        return [outcome(acc.get_memory_info), outcome(acc.total_memory), outcome(acc.available_memory),
                acc.visible_devices()[0].total_memory]
    print(json.dumps([read(), in_child(read), "torch" in sys.modules]))
"""


def test_unknown_gpu_memory_raises_instead_of_host_memory() -> None:
    """Without NVML the driver reports the total memory only. If a function of NVML fails, the error names it."""
    here, forked, torch = run_program(MEMORY, nvml="absent")
    assert here == forked
    assert here[0].startswith("RuntimeError: The memory of device 0, Simulated GPU, is unknown: only the driver knows it")
    assert here[1:] == [8 * GIB, here[0], 8 * GIB]
    assert not torch
    failed, _, _ = run_program(MEMORY, errors={"nvmlDeviceGetMemoryInfo*": 15})
    assert [text.endswith("NVML's nvmlDeviceGetMemoryInfo returned NVML_ERROR_GPU_IS_LOST, 15") for text in failed[:3]] == [
        True
    ] * 3
    assert failed[3] is None
    fine, _, torch = run_program(MEMORY)
    assert fine[0][1] == fine[1] == fine[3] == 8 * GIB
    assert fine[0][0] == fine[2] == 8 * GIB
    assert not torch


NVML_PROBLEM = """
    from accelerator._command import report
    device = acc.PhysicalDevice(0, "GPU-another", "Another", None, None, None, None, None)
    calls = [lambda f=getattr(acc, name): f(0) for name in (
        "utilization", "memory_usage", "temperature", "power_draw", "clock_rate", "device_memory_used", "processes",
        "list_gpu_processes", "get_memory_info", "mem_get_info", "available_memory")]
    errors = [outcome(call) for call in (*calls, lambda: acc.temperature(device))]
    print(json.dumps([report.collect()["nvml"]["problem"], errors, acc.driver_cuda_version(), acc.driver_version(),
                      acc.is_fork_safe(), "torch" in sys.modules]))
"""
NVML_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "absent": ({"nvml": "absent"}, "no NVIDIA driver is installed, or the container was started without it (NVML's nvmlInit"),
    "broken": ({"nvml": "broken"}, "the kernel's NVIDIA driver is not loaded (NVML's nvmlInit"),
    "mismatch": ({"nvml": "mismatch"}, "the kernel's NVIDIA driver and its libraries differ"),
    "no count": ({"errors": {"nvmlDeviceGetCount*": 999}}, "the driver gave no reason; in a container"),
    "binding": ({}, "the package nvidia-ml-py does not work (KeyError: 'planet')"),
}


@pytest.mark.parametrize("fault", NVML_FAULTS)
def test_errors_name_the_problem_of_nvml(fault: str, tmp_path: Path) -> None:
    machine, cause = NVML_FAULTS[fault]
    if fault == "binding":
        (tmp_path / "pynvml.py").write_text("raise KeyError('planet')\n")
    environment = simulated_environment(gpus=2, **machine)
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), environment["PYTHONPATH"]))
    program = PRELUDE + textwrap.dedent(NVML_PROBLEM)
    problem, errors, cuda, version, safe, torch = evaluate(program, environment)
    assert problem.startswith(cause)
    assert [error for error in errors if not error.startswith("RuntimeError: ") or not error.endswith(problem)] == []
    assert (len(errors), cuda) == (12, [13, 2])
    assert (version is None) == (fault != "no count")
    assert (safe, torch) == (True, False)


INITIALIZE = "torch.cuda.init()"


@pytest.mark.parametrize(
    ("first", "capability", "floats"),
    [
        ("pass", "9.0", [True, True, True]),
        pytest.param("pass", "8.9", [True, True, True], marks=pytest.mark.slow),
        pytest.param("pass", "7.5", [False, True, False], marks=pytest.mark.slow),
        pytest.param(INITIALIZE, "9.0", [True, True, True], marks=pytest.mark.slow),
        pytest.param(INITIALIZE, "7.5", [False, True, False], marks=pytest.mark.slow),
    ],
)
def test_capability_that_nvml_cannot_report(first: str, capability: str, floats: list[bool]) -> None:
    program = f"""
        import torch
        {first}
        print(json.dumps([acc.compute_capability(), acc.visible_devices()[1].compute_capability,
                          acc.is_bf16_supported(including_emulation=False), acc.is_fp16_supported(), acc.is_fp8_supported()]))
    """
    errors = {"nvmlDeviceGetCudaComputeCapability": 999}
    version = [int(part) for part in capability.split(".")]
    assert run_program(program, gpus=2, errors=errors, capability=capability) == [version, version, *floats]


def test_each_query_restarts_nvml_after_a_foreign_shutdown() -> None:
    program = """
        import pynvml
        def read():
            return [list(map(list, acc.visible_devices())), acc.utilization(1), acc.driver_version(), acc.get_memory_info(1),
                    acc.numa_node(1), acc.is_nvlink_connected(0, 1), [list(d) for d in acc.physical_devices()],
                    acc.telemetry(0)]
        reads = [read()]
        for refreshed in (False, True):
            pynvml.nvmlShutdown()
            if refreshed:
                acc.refresh()
            reads.append(read())
        for index in range(8):  # each query runs first once
            pynvml.nvmlShutdown()
            reads.append([query() for query in (
                lambda: list(map(list, acc.visible_devices())), lambda: acc.utilization(1), acc.driver_version,
                lambda: acc.get_memory_info(1), lambda: acc.numa_node(1), lambda: acc.is_nvlink_connected(0, 1),
                lambda: [list(d) for d in acc.physical_devices()], lambda: acc.telemetry(0))[index:]])
            reads[-1] = reads[0][:index] + reads[-1]
        print(json.dumps(reads))
    """
    reads = run_program(program, gpus=2, nvlink=True)
    assert reads[0][1:3] == [20, "595.45.04"]
    assert reads[0][5] is True
    assert [read == reads[0] for read in reads] == [True] * len(reads)


def test_versions_that_nvml_does_not_report() -> None:
    """The driver, in a child process, reports the newest CUDA version too, but not its own version."""
    program = """
        print(json.dumps([outcome(acc.device_count), outcome(acc.driver_cuda_version), outcome(acc.driver_version)]))
    """
    assert run_program(program, gpus=2, errors={"nvmlSystemGetCudaDriverVersion*": 13}) == [2, [13, 2], "595.45.04"]
    assert run_program(program, gpus=2, errors={"nvmlSystemGetDriverVersion": 999}) == [2, [13, 2], None]


@pytest.mark.parametrize("error", ["nvmlDeviceGetHandleByIndex*@1:15", "nvmlDeviceGetMigMode@1:999"])
def test_failing_gpu_does_not_affect_other_gpus(error: str) -> None:
    program = """
        print(json.dumps([acc.device_count(), [outcome(lambda: acc.utilization(i)) for i in range(3)],
                          [d.name for d in acc.visible_devices()], [d.physical_index for d in acc.visible_devices()],
                          len(acc.physical_devices()), acc.telemetry(2).temperature]))
    """
    count, busy, names, physical, listed, celsius = run_program(program, gpus=3, errors=error)
    assert (count, listed, celsius) == (3, 3, 32)
    assert (busy[0], busy[2]) == (13, 27)
    assert names == ["Simulated GPU"] * 3
    assert physical == [0, 1, 2]
    if "Handle" in error:
        assert "NVML_ERROR_GPU_IS_LOST, 15" in busy[1]


def test_strict_queries_do_not_change_other_results() -> None:
    program = """
        first = acc.device_count()
        devices = [d.name for d in acc.visible_devices()]
        print(json.dumps([first, devices, acc.device_count(), acc.is_available(strict=True), acc.is_available(),
                          acc.usable_devices(), acc.unavailable_reason(), acc.device_count()]))
    """
    results = run_program(program, gpus=2, name=["A", "B"], driver="broken")
    assert results == [2, ["A", "B"], 2, False, True, [], None, 2]


RECOVERS = """
    import resource, subprocess  # imported with the real clock
    from accelerator._machine import limits
    now = [0.0]
    time.monotonic = lambda: now[0]
    if sys.argv[1] == "deadline":
        limits.DRIVER_DEADLINE_S = 0.01
    elif sys.argv[1] == "files":
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        acc.device_count, acc.refresh()  # imports their modules
        held = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1] + 1 + int(sys.argv[2]), hard))
    first, reason = acc.device_count(), acc.unavailable_reason()
    limits.DRIVER_DEADLINE_S = 60
    if sys.argv[1] == "files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    left = True
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        left = False
    now[0] = 0.9
    at_once = acc.device_count()
    now[0] = 1.1
    print(json.dumps([first, reason, at_once, acc.device_count(), left]))
"""


@pytest.mark.parametrize(
    ("cause", "spare", "says"),
    [
        ("deadline", 0, "did not answer a child process within"),
        ("files", 0, "whether torch is installed is unknown: Too many open files"),
        ("files", 3, "could be started"),
    ],
)
def test_failed_probe_is_retried_after_one_second(cause: str, spare: int, says: str) -> None:
    first, reason, at_once, later, left = run_program(RECOVERS, cause, str(spare), gpus=2, nvml="absent")
    assert (first, at_once, later, left) == (0, 0, 2, False)
    assert says in reason


def test_environment_changed_during_a_probe() -> None:
    """The environment changes while another thread waits for a slow child process."""
    program = """
        import threading
        from accelerator._machine import driver_child, driver_probe
        slow = driver_probe._source().replace("def main(", "import time; time.sleep(0.3)\\ndef main(", 1)
        source, has_started, results = driver_probe._source, threading.Event(), []
        driver_probe._source = lambda: has_started.set() or slow
        thread = threading.Thread(target=lambda: results.append(len(acc.visible_devices())))
        thread.start()
        assert has_started.wait(60)
        driver_probe._source = source
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        thread.join()
        print(json.dumps([results, acc.device_count(), len(acc.visible_devices()), acc.device_count()]))
    """
    assert run_program(program, gpus=3, nvml="absent") == [[3], 1, 1, 1]


@pytest.mark.parametrize("seconds", [0.5, pytest.param(10, marks=pytest.mark.slow)])
def test_concurrent_queries_raise_no_unexpected_error(seconds: float) -> None:
    program = """
        import threading
        sys.setswitchinterval(1e-5)
        stop, wrong = time.monotonic() + float(sys.argv[1]), []
        def change():
            while time.monotonic() < stop:
                os.environ["CUDA_VISIBLE_DEVICES"] = "0"
                os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
        def refresh():
            while time.monotonic() < stop:
                acc.refresh()
        def evaluate():
            while time.monotonic() < stop:
                for query in (lambda: acc.utilization(1), lambda: acc.get_device_name(1), acc.physical_devices,
                                 acc.visible_devices, lambda: acc.telemetry(0)):
                    result = outcome(query)
                    if isinstance(result, str) and "Error" in result and "out of range: 1 cuda device is visible" not in result:
                        wrong.append(result)
        threads = [threading.Thread(target=work) for work in (change, refresh, evaluate, evaluate, evaluate)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        print(json.dumps(wrong[:3]))
    """
    assert run_program(program, str(seconds), gpus=2) == []


def test_bad_fork_known_to_torch_only() -> None:
    program = """
        import torch
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.cuda.is_available()
        def child():
            os.environ["CUDA_VISIBLE_DEVICES"] = "0"
            return [acc.is_in_bad_fork(), acc.is_available(), acc.device_count(), acc.unavailable_reason() is None,
                    outcome(lambda: torch.zeros(1, device="cuda")).partition(":")[0]]
        print(json.dumps(in_child(child)))
    """
    assert run_program(program, gpus=1) == [True, False, 1, False, "RuntimeError"]


def test_busy_device_is_not_cached() -> None:
    program = """
        def errors(code):
            os.environ["ACCELERATOR_SIM_ERRORS"] = f"cuDevicePrimaryCtxRetain:{code}" if code else ""
        errors(46)
        results = [acc.is_available(strict=True), acc.unavailable_reason(), acc.is_available()]
        errors(0)
        results.append(acc.is_available(strict=True))
        acc.refresh()
        errors(2)
        results.append(len(acc.usable_devices()))
        errors(0)
        results += [len(acc.usable_devices()), acc.is_available(strict=True)]
        errors(2)
        results.append(len(acc.usable_devices()))
        print(json.dumps(results))
    """
    assert run_program(program, gpus=2) == [False, None, True, True, 0, 2, True, 0]


def test_exclusive_device_of_this_process_is_usable() -> None:
    """A GPU in exclusive mode is usable in the process that holds it."""
    program = """
        library, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        assert library.cuInit(0) == 0 and library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 1) == 0
        os.environ["ACCELERATOR_SIM_ERRORS"] = "cuDevicePrimaryCtxRetain:46"
        print(json.dumps([acc.unavailable_reason(strict=True), [d.index for d in acc.usable_devices()]]))
    """
    reason, usable = run_program(program, gpus=2)
    assert reason.startswith("cuda:0 (Simulated GPU) is busy")
    assert usable == [1]


@pytest.mark.parametrize(
    "broken",
    support.sample(
        ["def broken(:\n", "raise AttributeError('x')\n", "nvmlInit = 5\n", "import ctypes\n", "raise KeyError\n"],
        *("def broken(:\n", "nvmlInit = 5\n"),
    ),
)
def test_broken_pynvml_module(broken: str, tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text(broken)
    environment = simulated_environment(gpus=2)
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), environment["PYTHONPATH"]))
    program = """
        print(json.dumps([outcome(acc.device_count), outcome(lambda: acc.utilization(0)), outcome(acc.driver_version)]))
    """
    count, busy, version = evaluate(PRELUDE + textwrap.dedent(program), environment)
    assert (count, version) == (2, None)
    assert busy.startswith("RuntimeError: The utilization of device 0, Simulated GPU, cannot be read: ")


def test_probe_ignores_output_of_libraries(tmp_path: Path) -> None:
    environment = simulated_environment(gpus=2, nvml="absent")
    environment["LD_PRELOAD"] += f":{noisy_library(tmp_path)}"
    program = """
        results = [outcome(acc.device_count), outcome(lambda: [d.name for d in acc.visible_devices()])]
        os.environ["ACCELERATOR_SIM_ERRORS"] = "cuInit:999"
        acc.refresh()
        results += [outcome(acc.device_count), outcome(acc.unavailable_reason)]
        from accelerator._machine import driver
        driver.NAME = "libnot-a-driver.so"
        acc.refresh()
        sys.stdout.flush()
        os.write(1, b"\\n")
        print(json.dumps(results))
    """
    code = PRELUDE + textwrap.dedent(program)
    child = subprocess.run([sys.executable, "-c", DRIVER + code], env=environment, capture_output=True, timeout=100, check=True)
    *_, last = [line for line in child.stdout.splitlines() if line.startswith(b"[2")]
    results = json.loads(last.decode(errors="ignore").partition("buffered")[0])
    assert results[:3] == [2, ["Simulated GPU"] * 2, 0]
    assert results[3].startswith("the CUDA driver failed: cuInit returned CUDA_ERROR_UNKNOWN (999); ")


def test_concurrent_queries_share_one_probe(tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = """
        import threading
        results = []
        barrier = threading.Barrier(32)
        def evaluate():
            barrier.wait()
            results.append(acc.device_count())
        threads = [threading.Thread(target=evaluate) for _ in range(32)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        in_parent = children(sys.argv[1])
        forked = [in_child(acc.device_count) for _ in range(4)]
        print(json.dumps([results, in_parent, forked, children(sys.argv[1])]))
    """
    results, in_parent, forked, in_all = run_program(program, str(log), gpus=3, nvml="absent", log=log)
    assert results == [3] * 32
    assert forked == [3] * 4
    assert in_parent == in_all == 1


def test_no_probe_if_the_variable_hides_every_device() -> None:
    program = """
        from accelerator._machine import driver_probe
        values = ["", "-1", "x", "0,0", "GPU-a,GPU-a"]
        observed = [acc.visible_devices({"CUDA_VISIBLE_DEVICES": value}) for value in values]
        hidden = len(driver_probe._results)
        print(json.dumps([observed, hidden, len(acc.visible_devices()), len(driver_probe._results)]))
    """
    for nvml in ("present", "absent"):
        assert run_program(program, gpus=2, name=["A", "B"], nvml=nvml) == [[[]] * 5, 0, 2, 1]


def test_traceback_of_cached_failure_does_not_grow() -> None:
    program = """
        import traceback
        from accelerator._machine import nvml
        depths = []
        for _ in range(50):
            try:
                nvml.gpus()
            except Exception as error:
                depths.append(len(traceback.extract_tb(error.__traceback__)))
        print(json.dumps(depths))
    """
    depths = run_program(program, nvml="absent")
    assert depths[1:] == [depths[1]] * 49


@pytest.mark.slow
def test_arch_list_with_a_pathlib_entry_in_sys_path() -> None:
    program = """
        import pathlib
        sys.path.append(pathlib.Path("/nowhere"))
        print(json.dumps([bool(acc.get_arch_list()), acc.is_fork_safe()]))
    """
    assert run_program(program) == [True, True]


def test_arch_list_in_a_frozen_program() -> None:
    """In a frozen program, sys.executable is the program itself, which must not be started in place of Python."""
    program = """
        import torch
        executable, sys.executable, sys.frozen = sys.executable, "/nowhere/program", True
        results = []
        def evaluate():
            try:
                results.append(acc.get_arch_list() == torch.cuda.get_arch_list())
            except RuntimeError as error:
                results.append(str(error))
        evaluate()
        sys.executable = ""
        del sys.frozen
        evaluate()
        sys.executable = "/nowhere/program"
        evaluate()
        results.append(acc.is_fork_safe())
        acc.init()
        evaluate()
        print(json.dumps(results))
    """
    frozen, nameless, missing, safe, after = run_program(program)
    assert frozen == nameless
    assert missing.startswith("the architectures of this torch could not be read: no child process could be started")
    assert "/nowhere/program" in missing
    assert "there is no Python executable to start one" in frozen
    assert safe
    assert after is True


WRONG_TYPES = """
    wrong = {
        "visible_devices": [lambda: acc.visible_devices(3), lambda: acc.visible_devices([("A", "B")])],
        "set_visible_devices_envs": [
            lambda: acc.set_visible_devices_envs(None, [0]), lambda: acc.set_visible_devices_envs("x", [0]),
            lambda: acc.set_visible_devices_envs({}, 3), lambda: acc.set_visible_devices_envs({}, "01")],
    }
    for name in ("compute_capability", "get_device_name", "numa_node", "get_device_index", "device_name", "get_memory_info",
                 "total_memory", "available_memory", "mem_get_info", "utilization", "memory_usage", "temperature", "power_draw",
                 "clock_rate", "device_memory_used", "processes", "list_gpu_processes", "telemetry"):
        wrong[name] = [lambda f=getattr(acc, name), d=d: f(d) for d in (1.5, b"cuda", [], {}, True, object(), (0,))]
    wrong["is_nvlink_connected"] = [lambda: acc.is_nvlink_connected(0, 1.5), lambda: acc.is_nvlink_connected([], 0)]
    outcomes = {name: [outcome(call) for call in calls] for name, calls in wrong.items()}
    print(json.dumps([outcomes, "torch" in sys.modules, acc.is_fork_safe()]))
"""


def test_wrong_types() -> None:
    outcomes, torch, safe = run_program(WRONG_TYPES, gpus=2)
    bad = {
        name: texts
        for name, texts in outcomes.items()
        for text in texts
        if not str(text).startswith("TypeError: ") or "\n" in text
    }
    assert bad == {}
    assert len(outcomes) == 21
    assert (torch, safe) == (False, True)


@pytest.mark.parametrize(
    "value",
    [
        *("0," * 4_999 + "0", "\udcff\udc80", "9" * 10_000),
        *(pytest.param(value, marks=pytest.mark.slow) for value in ("x" * 10_000, "GPU-" + "a" * 10_000)),
    ],
)
def test_long_and_undecodable_values_hide_every_device(value: str) -> None:
    program = f"""
        os.environ["CUDA_VISIBLE_DEVICES"] = {value!r}
        strict = acc.is_available(strict=True)
        print(json.dumps([acc.device_count(), acc.unavailable_reason(), len(acc.visible_devices()), strict]))
    """
    for nvml in ("present", "absent"):
        count, reason, listed, strict = run_program(program, gpus=2, nvml=nvml)
        assert (count, listed, strict) == (0, 0, False)
        assert len(reason) < 700
        assert reason.isprintable()


def test_values_that_no_environment_can_hold() -> None:
    program = """
        values = "0\\0", "\\ud800", "0," + "1" * 300_000
        print(json.dumps([len(acc.visible_devices({"CUDA_VISIBLE_DEVICES": value})) for value in values]))
    """
    assert run_program(program, gpus=2, nvml="absent") == [0, 0, 0]


# The functions of NVML that the queries call, by their names in the simulation's errors: without and with a device.
OF_MACHINE = ("nvmlInit*", "nvmlDeviceGetCount*", "nvmlSystemGetCudaDriverVersion*", "nvmlSystemGetDriverVersion")
OF_DEVICE = (
    *("nvmlDeviceGetHandleByIndex*", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMigMode", "nvmlDeviceGetUUID"),
    *("nvmlDeviceGetName", "nvmlDeviceGetPciInfo*", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetMemoryInfo*"),
    *("nvmlDeviceGetUtilizationRates", "nvmlDeviceGetTemperature*", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetClockInfo"),
    *("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetFanSpeed*", "nvmlDeviceGetFieldValues", "nvmlDeviceGetP2PStatus"),
    *("nvmlDeviceGetMemoryAffinity", "nvmlDeviceGetCurrentClocks*", "nvmlDeviceGetComputeRunningProcesses*"),
)
CODES = (1, 2, 3, 4, 6, 7, 9, 12, 13, 15, 16, 17, 18, 19, 25, 999)

EACH_ERROR = """
    queries = {
        "count": acc.device_count, "available": acc.is_available, "reason": acc.unavailable_reason,
        "memory": lambda: acc.get_memory_info(1)[1], "total": lambda: acc.total_memory(1),
        "visible": lambda: [d.total_memory for d in acc.visible_devices()], "physical": lambda: len(acc.physical_devices()),
        "capability": lambda: acc.compute_capability(1), "name": lambda: acc.get_device_name(1),
        "numa": lambda: acc.numa_node(1), "link": lambda: acc.is_nvlink_connected(0, 1), "driver": acc.driver_version,
        "cuda": acc.driver_cuda_version, "utilization": lambda: acc.utilization(1), "processes": lambda: acc.processes(1),
        "healthy": lambda: acc.telemetry(0), "telemetry": lambda: acc.telemetry(1), "safe": acc.is_fork_safe,
        "listed": lambda: [acc.temperature(device) for device in acc.physical_devices()[:1]],
    }
    acc.export_envs, acc.get_memory_info, acc.telemetry
    def read(error):
        os.environ["ACCELERATOR_SIM_ERRORS"] = error
        return {**{name: outcome(query) for name, query in queries.items()}, "torch": "torch" in sys.modules}
    print(json.dumps([in_child(read, error) for error in sys.argv[1:]]))
"""


# 17 is one more than the number of codes, so the sample of every 17th cell covers every function and every code.
@pytest.mark.parametrize("step", [17, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_every_nvml_function_with_every_error_code(step: int) -> None:
    """A query returns the correct value or None, or its error names the device. The other GPU is not affected."""
    cells = [(f"{name}:{code}", name, False) for name in (*OF_MACHINE, *OF_DEVICE) for code in CODES]
    cells += [(f"{name}@1:{code}", name, True) for name in OF_DEVICE for code in CODES]
    # Code 12 of that function says that there is no driver. No handle is "not supported" (3).
    impossible = {"nvmlSystemGetCudaDriverVersion*:12", "nvmlDeviceGetHandleByIndex*:3", "nvmlDeviceGetHandleByIndex*@1:3"}
    cells = [cell for cell in cells if cell[0] not in impossible][::step]
    wrong: list[Any] = []
    healthy = run_program(EACH_ERROR, "none:0", gpus=2)[0]
    assert healthy["count"] == 2
    assert healthy["visible"] == [8 * GIB] * 2
    for start in range(0, len(cells), 60):
        part = cells[start : start + 60]
        for (error, name, one), results in zip(part, run_program(EACH_ERROR, *(cell[0] for cell in part), gpus=2), strict=True):
            escaped = [
                text for text in map(str, results.values()) if "Error: " in text and not text.startswith("RuntimeError: ")
            ]
            wrong += [(error, text) for text in escaped]
            for key in ("count", "available", "reason", "safe", "torch", "name"):
                if results[key] != healthy[key] and (key, name) != ("name", "nvmlDeviceGetName"):
                    wrong.append((error, key, results[key]))
            for key in ("memory", "total"):
                # "Not supported" (3) means that the device shares the host's memory.
                shared = error.endswith(":3") and "Memory" in name
                refused = str(results[key]).startswith("RuntimeError: The memory of device 1, ")
                if results[key] != 8 * GIB and not refused and not shared:
                    wrong.append((error, key, results[key]))
            if not error.endswith(":3") and set(results["visible"]) - {8 * GIB, None}:
                wrong.append((error, "visible", results["visible"]))
            if results["capability"] not in ([9, 0], None):
                wrong.append((error, "capability", results["capability"]))
            if one and [results["healthy"], results["listed"]] != [healthy["healthy"], healthy["listed"]]:
                wrong.append((error, "the other GPU", results["healthy"], results["listed"]))
    assert wrong == []
    assert len(cells) >= 35
