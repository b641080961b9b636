"""Session, errors, handles and telemetry of the simulated NVML, called through NVIDIA's Python binding."""

from __future__ import annotations

import importlib.util
import re
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support import simulated_environment
from tests.support.simulation import GIB, evaluate, evaluate_uninitialized, linux_only, run

pytestmark = [linux_only, pytest.mark.torch_free]


# The session


def test_functions_require_initialization() -> None:
    assert evaluate_uninitialized("report([code(n._LoadNvmlLibrary), code(n.nvmlDeviceGetCount), code(n.nvmlShutdown)])") == [
        0,
        1,
        1,
    ]


def test_initialization_is_counted() -> None:
    program = """
        n.nvmlInit()
        codes = []
        for step in (n.nvmlShutdown, n.nvmlDeviceGetCount, n.nvmlShutdown, n.nvmlDeviceGetCount, n.nvmlShutdown):
            codes.append(code(step))
        report(codes)
    """
    assert evaluate(program) == [0, 0, 0, 1, 0]


def test_unversioned_function_names() -> None:
    program = """
        library, count = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint()
        codes = [library[name]() for name in ("nvmlInit", "nvmlInit_v2", "nvmlShutdown")]
        for name in ("nvmlDeviceGetCount", "nvmlDeviceGetCount_v2"):
            codes += [library[name](ctypes.byref(count)), count.value]
        report(codes)
    """
    assert evaluate_uninitialized(program, 3) == [0, 0, 0, 0, 3, 0, 3]


def test_initialization_in_threads() -> None:
    program = """
        import threading
        library = ctypes.CDLL("libnvidia-ml.so.1")
        def work():
            for _ in range(500):
                library.nvmlInit_v2()
                library.nvmlShutdown()
        threads = [threading.Thread(target=work) for _ in range(8)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        codes = [code(n.nvmlDeviceGetCount), library.nvmlShutdown(), code(n.nvmlDeviceGetCount)]
        report(codes)
    """
    assert evaluate(program) == [0, 0, 1]


@pytest.mark.parametrize("again", [False, True])
def test_a_forked_child_has_no_session(again: bool) -> None:
    program = f"""
        read, write = os.pipe()
        if os.fork() == 0:
            codes = [code(n.nvmlDeviceGetCount)]
            if {again}:
                n.nvmlInit()
                codes += [code(n.nvmlDeviceGetCount), code(n.nvmlDeviceGetUUID, n.nvmlDeviceGetHandleByIndex(0))]
            os.write(write, json.dumps(codes).encode())
            os._exit(0)
        os.wait()
        report([json.loads(os.read(read, 100)), code(n.nvmlDeviceGetCount)])
    """
    assert evaluate(program) == [[1, 0, 0] if again else [1], 0]


def test_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    pid = evaluate("n.nvmlInit(); n.nvmlShutdown(); report(os.getpid())", log=log)
    assert log.read_text().splitlines() == [f"{pid} nvmlInit", f"{pid} nvmlInit", f"{pid} nvmlShutdown"]


def test_delay() -> None:
    child = simulated_environment()
    child["ACCELERATOR_SIM_INIT_DELAY"] = "cuInit:600000,nvmlInit:300"
    program = "import time; start = time.monotonic(); n.nvmlInit(); report(time.monotonic() - start)"
    assert run(program, child) >= 0.3  # cuInit's delay of 600 s would exceed the deadline


# Errors


@pytest.mark.parametrize(("nvml", "expected"), [("absent", 12), ("broken", 9), ("mismatch", 18)])
def test_nvml_that_does_not_start(nvml: str, expected: int) -> None:
    assert evaluate_uninitialized("report(code(n.nvmlInit))", nvml=nvml) == expected


def test_injected_error_of_one_function() -> None:
    program = "report([code(n.nvmlDeviceGetCount), code(n.nvmlDeviceGetHandleByIndex, 0)])"
    assert evaluate(program, errors={"nvmlDeviceGetCount_v2": 999}) == [999, 0]


def test_injected_error_of_one_gpu() -> None:
    program = """
        report([[code(f, h) for h in handles()] for f in (n.nvmlDeviceGetUUID, n.nvmlDeviceGetMemoryInfo)])
    """
    errors = {"nvmlDeviceGetUUID@1": 15, "nvmlDeviceGetMemory*@2": 3}
    assert evaluate(program, 3, errors=errors) == [[0, 15, 0], [0, 0, 3]]


def test_injected_error_of_a_handle() -> None:
    program = """
        uuid = n.nvmlDeviceGetUUID(n.nvmlDeviceGetHandleByIndex(1))
        report([code(n.nvmlDeviceGetHandleByIndex, 0), code(n.nvmlDeviceGetHandleByUUID, uuid)])
    """
    assert evaluate(program, 2, errors="nvmlDeviceGetHandleByIndex_v2@0:15,nvmlDeviceGetHandleByUUID@1:4") == [15, 4]


def test_error_texts() -> None:
    program = "report([n.nvmlErrorString(c) for c in (0, 1, 3, 9, 18, 30, 999, -1)])"
    texts = ["Success", "Uninitialized", "Not Supported", "Driver Not Loaded", "Driver/library version mismatch"]
    assert evaluate(program) == [*texts, "Reset type not supported", "Unknown Error", "Unknown Error"]


def test_wrong_arguments() -> None:
    program = """
        library = ctypes.CDLL("libnvidia-ml.so.1")
        library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle := ctypes.c_void_p()))
        wild = [ctypes.c_void_p(address) for address in (None, 8, handle.value + 1, handle.value + 8)]
        out = ctypes.create_string_buffer(96)
        report([
            code(n.nvmlDeviceGetHandleByIndex, 1),
            [library.nvmlDeviceGetUUID(h, out, 96) for h in wild],
            library.nvmlDeviceGetUUID(handle, None, 96),
            library.nvmlDeviceGetUUID(handle, out, 40),
            library.nvmlDeviceGetUUID(handle, out, 41),
            library.nvmlDeviceGetCount_v2(None),
            library.nvmlDeviceGetMemoryInfo(handle, None),
            library.nvmlSystemGetDriverVersion(out, 3),
        ])
    """
    assert evaluate(program) == [2, [2, 2, 2, 2], 2, 7, 0, 2, 2, 7]


# The system


def test_versions() -> None:
    program = """
        report([n.nvmlSystemGetDriverVersion(), n.nvmlSystemGetNVMLVersion(), n.nvmlSystemGetCudaDriverVersion(),
                n.nvmlSystemGetCudaDriverVersion_v2()])
    """
    newest = ["595.45.04", "13.595.45.04", 13020, 13020]
    assert evaluate(program) == evaluate(program, driver_cuda="13.2") == newest
    assert evaluate(program, driver="old") == ["470.42.01", "11.470.42.01", 11040, 11040]
    assert evaluate(program, driver_cuda="12.4") == ["550.54.14", "12.550.54.14", 12040, 12040]


def test_memory_is_read_while_another_thread_reads_cudas_version() -> None:
    """The version's function loads the driver for a moment, and memory's finds the one that is loaded."""
    program = """
        import sys, threading
        sys.setswitchinterval(1e-5)
        gpu, versions_read, memory_read = handles()[0], set(), set()
        def read_versions():
            versions_read.update(code(n.nvmlSystemGetCudaDriverVersion_v2) for _ in range(5000))
        def read_memory():
            while versions.is_alive():
                memory_read.add(code(n.nvmlDeviceGetMemoryInfo, gpu))
        versions = threading.Thread(target=read_versions)
        readers = [threading.Thread(target=read_memory) for _ in range(2)]
        [thread.start() for thread in (versions, *readers)]
        [thread.join() for thread in (versions, *readers)]
        report([*versions_read, *memory_read])
    """
    assert evaluate(program) == [0, 0]


def test_memory_is_read_after_the_program_has_closed_the_driver() -> None:
    program = """
        import _ctypes
        driver, gpu = ctypes.CDLL("libcuda.so.1"), handles()[0]
        codes = [driver.cuInit(0), code(n.nvmlDeviceGetMemoryInfo, gpu)]
        _ctypes.dlclose(driver._handle)
        report([*codes, code(n.nvmlDeviceGetMemoryInfo, gpu)])
    """
    assert evaluate(program) == [0, 0, 0]


def test_process_name() -> None:
    program = """
        library, few = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.create_string_buffer(4)
        report([n.nvmlSystemGetProcessName(os.getpid()), library.nvmlSystemGetProcessName(os.getpid(), few, 4),
                few.value.decode(), code(n.nvmlSystemGetProcessName, 2**31 - 1)])
    """
    assert evaluate(program) == [sys.executable, 0, sys.executable[:3], 6]


# Handles and identity


def test_no_gpu() -> None:
    assert evaluate("report([n.nvmlDeviceGetCount(), code(n.nvmlDeviceGetHandleByIndex, 0)])", 0) == [0, 2]


def test_nvml_ignores_cuda_visible_devices() -> None:
    child = simulated_environment(gpus=3)
    child["CUDA_VISIBLE_DEVICES"] = "1"
    assert run("n.nvmlInit(); report(n.nvmlDeviceGetCount())", child) == 3


def test_identity() -> None:
    program = """
        report([[n.nvmlDeviceGetName(h), n.nvmlDeviceGetIndex(h), n.nvmlDeviceGetMinorNumber(h),
                 n.nvmlDeviceGetCudaComputeCapability(h), n.nvmlDeviceGetMemoryInfo(h).total] for h in handles()])
    """
    machine = {"memory": ["8GiB", "1GiB"], "name": ["Big", "Small"], "capability": ["9.0", "7.5"]}
    small = ["Small", 1, 1, [7, 5], GIB]
    assert evaluate(program, 3, **machine) == [["Big", 0, 0, [9, 0], 8 * GIB], small, ["Small", 2, 2, *small[3:]]]


def test_uuids_are_unique_and_map_to_their_gpus() -> None:
    program = """
        uuids = [n.nvmlDeviceGetUUID(h) for h in handles()]
        report([uuids, [n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(u)) for u in uuids],
                code(n.nvmlDeviceGetHandleByUUID, uuids[0][:12]), code(n.nvmlDeviceGetHandleByUUID, "GPU-ffff")])
    """
    uuids, indices, *codes = evaluate(program, 20)
    assert len(set(uuids)) == 20
    assert all(uuid.startswith("GPU-") and len(uuid) == 40 for uuid in uuids)
    assert uuids[0][4] == uuids[16][4]
    assert indices == list(range(20))
    assert codes == [6, 6]


def test_pci_addresses_map_to_their_gpus() -> None:
    program = """
        rows = []
        for handle in handles():
            info = n.nvmlDeviceGetPciInfo(handle)
            bus_id = info.busId
            ids = [bus_id, bus_id.lower(), info.busIdLegacy, bus_id.split(":", 1)[1]]
            rows.append([bus_id, info.domain, info.bus, info.device,
                          *(n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByPciBusId(i)) for i in ids)])
        report([rows, *(code(n.nvmlDeviceGetHandleByPciBusId, text) for text in ("0000:f0:00.0", "x"))])
    """
    rows, *codes = evaluate(program, 12)
    assert rows[11] == ["00000000:0C:00.0", 0, 12, 0, 11, 11, 11, 11]
    assert [entry[4:] for entry in rows] == [[gpu] * 4 for gpu in range(12)]
    assert codes == [6, 2]


def test_pci_info_of_older_structure_versions() -> None:
    program = """
        library, filled = ctypes.CDLL("libnvidia-ml.so.1"), []
        for function in (library.nvmlDeviceGetPciInfo, library.nvmlDeviceGetPciInfo_v2):
            info = (ctypes.c_char * 68)(*b"!" * 68)
            assert function(handles()[1], info) == 0
            filled.append([info.value.decode(), int.from_bytes(info.raw[20:24], "little"), info.raw.find(b"!!!!")])
        report(filled)
    """
    assert evaluate(program, 2) == [["0000:02:00.0", 2, 32], ["0000:02:00.0", 2, 52]]


def test_every_function_of_the_binding_is_exported() -> None:
    program = """
        library = ctypes.CDLL("libnvidia-ml.so.1")
        report([name for name in names if not hasattr(library, name)])
    """
    source = Path(importlib.util.find_spec("pynvml").origin).read_text()
    names = sorted(set(re.findall(r"""_nvmlGetFunctionPointer\(\s*["'](nvml\w+)["']""", source)))
    assert len(names) >= 350
    assert evaluate(f"names = {names}\n" + textwrap.dedent(program)) == [], (
        "run tests/simulation/exported_names.py with newer headers"
    )


def test_unsimulated_functions_return_not_supported() -> None:
    program = """
        library, gpus = ctypes.CDLL("libnvidia-ml.so.1"), handles()
        calls = [(n.nvmlDeviceGetSerial, gpus[0]), (n.nvmlDeviceGetSerial, gpus[1]), (n.nvmlDeviceGetSerial, None),
                 (n.nvmlUnitGetCount,), (n.nvmlDeviceGetHandleBySerial, "7"), (n.nvmlDeviceGetNumaNodeId, gpus[0]),
                 (n.nvmlDeviceGetGpuFabricInfoV, gpus[0], ctypes.byref(n.c_nvmlGpuFabricInfoV_t()))]
        codes = [code(*call) for call in calls]
        n.nvmlShutdown()
        report([codes, code(n.nvmlDeviceGetSerial, gpus[0]), library.nvmlUnitGetCount()])
    """
    assert evaluate(program, 2, errors={"nvmlDeviceGetSerial@1": 15}) == [[3, 15, 2, 3, 3, 3, 0], 1, 1]


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [("7.0", 5), ("7.5", 6), ("8.0", 7), ("8.9", 8), ("9.0", 9), ("12.0", 10), ("4.0", 2**32 - 1)],
)
def test_architecture(capability: str, architecture: int) -> None:
    assert evaluate("report(n.nvmlDeviceGetArchitecture(handles()[0]))", capability=capability) == architecture


# Telemetry


def test_telemetry_differs_between_gpus() -> None:
    program = """
        report([[n.nvmlDeviceGetUtilizationRates(h).gpu, n.nvmlDeviceGetUtilizationRates(h).memory,
                 n.nvmlDeviceGetTemperature(h, 0), n.nvmlDeviceGetTemperatureV(h, 0), n.nvmlDeviceGetPowerUsage(h),
                 n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_SM), n.nvmlDeviceGetMaxClockInfo(h, n.NVML_CLOCK_SM)]
                for h in handles()])
    """
    assert evaluate(program, 3) == [
        [13, 7, 30, 30, 60000, 1000, 1500],
        [20, 12, 31, 31, 61000, 1015, 1515],
        [27, 17, 32, 32, 62000, 1030, 1530],
    ]


def test_modes_and_limits() -> None:
    program = """
        h = n.nvmlDeviceGetHandleByIndex(0)
        report([n.nvmlDeviceGetComputeMode(h), n.nvmlDeviceGetPersistenceMode(h), n.nvmlDeviceGetEnforcedPowerLimit(h),
                n.nvmlDeviceGetPowerManagementLimit(h), n.nvmlDeviceGetClockInfo(h, n.NVML_CLOCK_MEM),
                code(n.nvmlDeviceGetClockInfo, h, 4), code(n.nvmlDeviceGetTemperature, h, 1),
                code(n.nvmlDeviceGetTemperatureV, h, 1)])
    """
    assert evaluate(program) == [0, 1, 700000, 700000, 2600, 2, 2, 2]


def test_versioned_structures() -> None:
    program = """
        h, library = n.nvmlDeviceGetHandleByIndex(0), ctypes.CDLL("libnvidia-ml.so.1")
        degrees, memory = n.c_nvmlTemperature_v1_t(), n.c_nvmlMemory_v2_t()
        report([library.nvmlDeviceGetTemperatureV(h, ctypes.byref(degrees)),
                library.nvmlDeviceGetMemoryInfo_v2(h, ctypes.byref(memory))])
    """
    assert evaluate(program) == [25, 25]


def test_fan_and_field_values_differ_between_gpus() -> None:
    program = """
        fields = [n.NVML_FI_DEV_MEMORY_TEMP, n.NVML_FI_DEV_POWER_INSTANT, n.NVML_FI_DEV_POWER_CURRENT_LIMIT, 299]
        report([[n.nvmlDeviceGetFanSpeed(h), n.nvmlDeviceGetFanSpeed_v2(h, 0), n.nvmlDeviceGetNumFans(h),
                 *([v.value.uiVal, v.nvmlReturn] for v in n.nvmlDeviceGetFieldValues(h, fields))] for h in handles()])
    """
    assert evaluate(program, 2) == [
        [25, 25, 1, [40, 0], [60000, 0], [700000, 0], [0, 3]],
        [26, 26, 1, [41, 0], [61000, 0], [700000, 0], [0, 3]],
    ]


def test_clock_event_reasons() -> None:
    program = """
        report([[n.nvmlDeviceGetCurrentClocksEventReasons(h), n.nvmlDeviceGetCurrentClocksThrottleReasons(h)]
                for h in handles()])
    """
    assert evaluate(program, 2, clock_reasons=[0, 0x44]) == [[0, 0], [0x44, 0x44]]


def test_errors_can_be_injected_into_each_newer_function() -> None:
    program = """
        g, h = handles()
        report([code(f, *a) for f, a in [
            (n.nvmlDeviceGetFanSpeed, [h]), (n.nvmlDeviceGetFieldValues, (h, [82])), (n.nvmlDeviceGetNumFans, [h]),
            (n.nvmlDeviceGetCurrentClocksEventReasons, [h]), (n.nvmlDeviceGetCurrentClocksThrottleReasons, [h]),
            (n.nvmlDeviceGetMemoryAffinity, (h, 1, 0)), (n.nvmlDeviceGetCpuAffinity, (h, 1)),
            (n.nvmlDeviceGetP2PStatus, (h, g, 2)), (n.nvmlDeviceGetNvLinkState, (h, 0)),
            (n.nvmlDeviceGetNvLinkRemotePciInfo, (h, 0)), (n.nvmlDeviceGetTopologyCommonAncestor, (h, g)),
            (n.nvmlDeviceGetBAR1MemoryInfo, [h]), (n.nvmlDeviceGetEnforcedPowerLimit, [h]),
            (n.nvmlDeviceGetPowerManagementLimit, [h]), (n.nvmlDeviceGetMPSComputeRunningProcesses_v3, [h]),
            (n.nvmlDeviceGetFanSpeed, [g]),
        ]])
    """
    assert evaluate(program, 2, nvlink=True) == [0] * 16
    failing = (
        "Fan",
        "Field",
        "Num",
        "Current",
        "Memory",
        "Cpu",
        "P2P",
        "NvLink",
        "Topology",
        "BAR1",
        "Enforced",
        "Power",
        "MPS",
    )
    assert evaluate(program, 2, nvlink=True, errors={f"nvmlDeviceGet{name}*@1": 15 for name in failing}) == [15] * 15 + [0]


def test_power_limits() -> None:
    program = """
        names = ["POWER_MIN_LIMIT", "POWER_MAX_LIMIT", "POWER_DEFAULT_LIMIT", "POWER_CURRENT_LIMIT"]
        fields = [getattr(n, "NVML_FI_DEV_" + name) for name in names]
        report([[value.nvmlReturn, value.value.uiVal] for value in n.nvmlDeviceGetFieldValues(handles()[0], fields)])
    """
    assert evaluate(program) == [[0, 200_000], [0, 700_000], [0, 700_000], [0, 700_000]]


def test_a_mig_instance_has_memory_and_no_telemetry() -> None:
    program = """
        gpu = n.nvmlDeviceGetHandleByIndex(0)
        instance = next(iter(instances(gpu).values()))
        report([n.nvmlDeviceGetBAR1MemoryInfo(instance).bar1Total, n.nvmlDeviceGetMPSComputeRunningProcesses_v3(instance),
                [code(f, instance) for f in (n.nvmlDeviceGetFanSpeed, n.nvmlDeviceGetCurrentClocksEventReasons)],
                n.nvmlDeviceGetFieldValues(instance, [n.NVML_FI_DEV_MEMORY_TEMP])[0].nvmlReturn,
                code(n.nvmlDeviceGetP2PStatus, instance, gpu, 2)])
    """
    assert evaluate(program, mig=2) == [GIB, [], [3, 3], 3, 3]
