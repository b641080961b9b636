"""ROCm builds, with a stand-in torch build, a stand-in ``amdsmi`` package and a stand-in ROCm runtime."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support import plain_environment
from tests.support.discovery import evaluate

pytestmark = [
    pytest.mark.torch_free,
    pytest.mark.skipif(
        sys.platform != "linux" or not (shutil.which("cc") or shutil.which("gcc")), reason="needs a C compiler on Linux"
    ),
]

TORCH = "__version__ = '9.0+rocm7.0'\ncuda = None\nhip = '7.0.1'\n"

# Three GPUs, which HIP enumerates in reverse order. Functions fail in a process that did not initialize the library.
AMDSMI = """
import os

class AmdSmiException(Exception):
    pass

class AmdSmiTemperatureType:
    JUNCTION = 1

class AmdSmiTemperatureMetric:
    CURRENT = 0

class AmdSmiClkType:
    GFX = 0

_owner = None
_broken = os.environ.get("STAND_IN_BROKEN", "").split(",")

if "import" in _broken:
    raise KeyError("ROCM_HOME")

def amdsmi_init():
    global _owner
    if "init" in _broken:
        raise AmdSmiException("AMDSMI_STATUS_NOT_INIT")
    _owner = os.getpid()

def _of(handle, what):
    if _owner != os.getpid():
        raise AmdSmiException("AMDSMI_STATUS_NOT_INIT")
    if what in _broken:
        raise AmdSmiException("AMDSMI_STATUS_NOT_SUPPORTED")
    return int(handle.removeprefix("handle "))

def amdsmi_get_processor_handles():
    _of("handle 0", "list")
    return ["handle 0", "handle 1", "handle 2"]

def amdsmi_get_gpu_enumeration_info(handle):
    return {"hip_id": 2 - _of(handle, "enumeration")}

def amdsmi_get_gpu_asic_info(handle):
    i = _of(handle, "asic")
    return {"market_name": f"AMD Instinct {i}", "asic_serial": f"0x{i}A00000000000000"}

def amdsmi_get_gpu_vram_usage(handle):
    i = _of(handle, "vram")
    return {"vram_total": 1024 * (i + 1), "vram_used": 10 * i}

def amdsmi_get_gpu_device_bdf(handle):
    return f"0000:c{_of(handle, 'bdf')}:00.0"

def amdsmi_get_gpu_activity(handle):
    i = _of(handle, "activity")
    return {"gfx_activity": 10 + i, "umc_activity": "N/A" if i == 1 else 20 + i}

def amdsmi_get_temp_metric(handle, sensor, metric):
    assert (sensor, metric) == (1, 0)
    return 40 + _of(handle, "temperature")

def amdsmi_get_power_info(handle):
    i = _of(handle, "power")
    return {"average_socket_power": "N/A", "current_socket_power": "N/A" if i == 2 else 300 + i}

def amdsmi_get_clock_info(handle, kind):
    return {"clk": 1500 + _of(handle, "clock")}

def amdsmi_get_gpu_process_list(handle):
    i = _of(handle, "processes")
    actual = [{"name": "N/A", "pid": 7, "mem": 1, "memory_usage": {"vram_mem": 5}}]
    return actual if i == 0 else []
"""

# Two devices, unless HIP_VISIBLE_DEVICES hides some. hipInit writes a line into the log.
HIP = r"""
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int current;

static int count(void)
{
    const char *visible = getenv("HIP_VISIBLE_DEVICES");
    return !visible ? 2 : *visible == '\0' || *visible == '-' ? 0 : visible[1] ? 2 : 1;
}

int hipInit(unsigned flags)
{
    const char *log = getenv("STAND_IN_LOG");
    int file = log ? open(log, O_WRONLY | O_APPEND | O_CREAT, 0666) : -1;
    if (file >= 0) {
        dprintf(file, "%d hipInit\n", (int)getpid());
        close(file);
    }
    return flags || getenv("STAND_IN_NO_HIP") ? 101 : count() ? 0 : 100;
}

int hipGetDeviceCount(int *answer) { *answer = count(); return 0; }
int hipDeviceGetUuid(char *uuid, int device) { memcpy(uuid, device ? "1B00000000000000" : "0B00000000000000", 16); return 0; }
int hipDeviceGetName(char *name, int size, int device) { snprintf(name, size, "Stand-in %d", device); return 0; }
int hipDeviceGetPCIBusId(char *bus, int size, int device) { snprintf(bus, size, "0000:0%d:00.0", device); return 0; }
int hipDeviceTotalMem(size_t *bytes, int device) { *bytes = (size_t)(device + 1) << 30; return 0; }
int hipSetDevice(int device) { current = device; return 0; }
int hipFree(void *pointer) { return pointer ? 1 : getenv("STAND_IN_BUSY") && current == 1 ? 2 : 0; }
const char *hipGetErrorName(int code) { return code == 2 ? "hipErrorOutOfMemory" : "hipErrorInvalidDevice"; }
"""


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rocm")
    (root / "torch/lib").mkdir(parents=True)
    (root / "torch/__init__.py").write_text("raise ImportError('not a torch to import')")
    (root / "torch/version.py").write_text(TORCH)
    (root / "amd").mkdir()
    (root / "amd/amdsmi.py").write_text(AMDSMI)
    (root / "hip.c").write_text(HIP)
    compiler = shutil.which("cc") or "gcc"
    library = root / "torch/lib/libamdhip64.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, root / "hip.c"], check=True, timeout=60)
    return root


def run_on_rocm(code: str, fakes: Path, *, amdsmi: bool = True, **variables: str) -> Any:
    environment = plain_environment(**variables)
    folders = [environment["PYTHONPATH"].split(os.pathsep)[0], str(fakes), *([str(fakes / "amd")] if amdsmi else [])]
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    return evaluate(FIRST + textwrap.dedent(code), environment, python=(sys.executable, "-S"))


FIRST = textwrap.dedent("""
    import accelerator as acc
    def outcome(call):
        try:
            return call()
        except RuntimeError as error:
            return str(error)
    def seen(env=None):
        return [device.physical_index for device in acc.visible_devices(env)]
    """)

VISIBLE: list[tuple[dict[str, str], list[int]]] = [
    ({}, [2, 1, 0]),
    ({"HIP_VISIBLE_DEVICES": "0"}, [2]),
    ({"HIP_VISIBLE_DEVICES": "2,0"}, [0, 2]),
    ({"HIP_VISIBLE_DEVICES": ""}, []),
    ({"HIP_VISIBLE_DEVICES": "-1"}, []),
    ({"HIP_VISIBLE_DEVICES": "0,7,1"}, [2]),
    ({"HIP_VISIBLE_DEVICES": "GPU-0a"}, [0]),
    ({"HIP_VISIBLE_DEVICES": "GPU-0a00000000000000,GPU-2a"}, [0, 2]),
    ({"CUDA_VISIBLE_DEVICES": "1"}, [1]),
    ({"CUDA_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, [2]),
    ({"ROCR_VISIBLE_DEVICES": "1,2"}, [1, 0]),
    ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, [0]),
    ({"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1,0"}, [0, 1]),
    ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0,1,2"}, [1]),
    ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, []),
    ({"ROCR_VISIBLE_DEVICES": "GPU-0a"}, [0]),
    ({"ROCR_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "0"}, []),
    ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [2, 1, 0]),
]


def test_visible_devices_through_amdsmi(fakes: Path) -> None:
    program = f"""
        import itertools
        cases = {[case for case, _ in VISIBLE]!r}
        given = [seen(case) for case in cases]
        followed = []
        for case in cases:
            for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
                put({{name: case.get(name)}})
            followed.append([seen(), acc.device_count(), acc.is_available(), acc.unavailable_reason()])
        print(json.dumps([given, followed, "torch" in sys.modules]))
    """
    given, followed, torch = run_on_rocm(program, fakes)
    expected = [devices for _, devices in VISIBLE]
    assert given == expected
    for (case, devices), (observed, count, available, reason) in zip(VISIBLE, followed, strict=True):
        assert (observed, count, available) == (devices, len(devices), bool(devices)), case
        assert (reason is None) is available
        assert reason is None or reason.partition("=")[0] in case
    assert not torch


def test_telemetry_through_amdsmi(fakes: Path, tmp_path: Path) -> None:
    program = """
        names = ["utilization", "memory_usage", "device_memory_used", "temperature", "power_draw", "clock_rate"]
        def query(i):
            return [outcome(lambda: getattr(acc, name)(i)) for name in names]
        output = [query(0), query("cuda:1"), query(2), acc.telemetry(0), acc.telemetry(2), acc.list_gpu_processes(2)]
        os.environ["HIP_VISIBLE_DEVICES"] = "2"
        output += [query(0), in_child(lambda: [query(0), acc.device_count()])]
        output += [acc.visible_devices()[0], acc.get_device_name(), acc.driver_version(), acc.visible_devices_envs()]
        output += [acc.set_visible_devices_envs({"CUDA_VISIBLE_DEVICES": "4,5"}, [1])]
        output += [acc.set_visible_devices_envs({"HIP_VISIBLE_DEVICES": "6,7", "CUDA_VISIBLE_DEVICES": "4,5"}, [1])]
        from accelerator._command import report, report_text
        output.append(report_text.format_report(report.collect()))
        print(json.dumps(output))
    """
    output = run_on_rocm(program, fakes, STAND_IN_LOG=str(tmp_path / "log"))
    missing = "Device {}, AMD Instinct {}, does not report its {}: amdsmi returned 'N/A'"
    # HIP's device 0 is amdsmi's 2. The power is in milliwatts, as on other accelerators.
    assert output[0] == [12, 22, 20 << 20, 42, missing.format(0, 2, "power draw"), 1502]
    assert output[1] == [11, missing.format(1, 1, "memory usage"), 10 << 20, 41, 301000, 1501]
    assert output[2] == output[6] == output[7][0] == [10, 20, 0, 40, 300000, 1500]
    assert output[3] == [12, 22, 20 << 20, 42, None, 1502, [], *[None] * 6]
    assert output[4] == [10, 20, 0, 40, 300000, 1500, [[7, None, 5]], *[None] * 6]
    assert output[5].startswith("GPU:2\nprocess          7 uses ")
    assert output[7][1] == 1
    assert output[8] == [0, "GPU-0a00000000000000", "AMD Instinct 0", "00000000:C0:00.0", None, 2**30, 0, None]
    assert output[9:12] == ["AMD Instinct 0", None, ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"]]
    assert output[12] == {"CUDA_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "5"}
    assert output[13] == {"CUDA_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "7"}
    assert "torch 9.0+rocm7.0 built for ROCm 7.0.1" in output[14]
    assert "HIP_VISIBLE_DEVICES='2': read by amdsmi and the environment" in output[14]
    # No process initialized the ROCm runtime.
    assert not (tmp_path / "log").exists()


def test_memory_through_amdsmi(fakes: Path) -> None:
    program = """
        def query(i):
            return [outcome(lambda: f(i)) for f in (acc.get_memory_info, acc.total_memory, acc.available_memory)]
        print(json.dumps([query(0), query(2), "torch" in sys.modules]))
    """
    first, last, torch = run_on_rocm(program, fakes)
    assert first == [[3052 << 20, 3072 << 20], 3072 << 20, 3052 << 20]
    assert last == [[1024 << 20, 1024 << 20], 1024 << 20, 1024 << 20]
    assert not torch
    # Unknown memory is not replaced by the host's.
    failed, _, _ = run_on_rocm(program.replace("query(2)", "query(1)"), fakes, amdsmi=False)
    assert failed[0].startswith("The memory of device 0, Stand-in 0, is unknown: only the driver knows it")
    assert failed[1:] == [2**30, failed[0]]


@pytest.mark.parametrize("types", ["AmdSmiLinkType", "AmdSmiIoLinkType", None])
def test_links_numa_nodes_and_fan_speeds_through_amdsmi(types: str | None, fakes: Path) -> None:
    program = f"""
        import amdsmi

        def link(handle, peer):
            ends = {{amdsmi._of(handle, "link"), amdsmi._of(peer, "link")}}
            return {{"hops": 1, "type": 2 if ends == {{0, 2}} else 1}}

        if {types!r}:
            setattr(amdsmi, {types!r}, type("Kinds", (), {{"AMDSMI_LINK_TYPE_XGMI": 2, "AMDSMI_LINK_TYPE_PCIE": 1}}))
        amdsmi.amdsmi_topo_get_link_type = link
        amdsmi.amdsmi_topo_get_numa_node_number = lambda handle: amdsmi._of(handle, "node") - 1
        amdsmi.amdsmi_get_gpu_fan_speed_max = lambda handle, sensor: 255 if amdsmi._of(handle, "fan") else 0
        amdsmi.amdsmi_get_gpu_fan_speed = lambda handle, sensor: 51 * amdsmi._of(handle, "fan")
        linked = [acc.is_nvlink_connected(one, other) for one, other in ((0, 1), (0, 2), (1, 2), (2, 0))]
        nodes, fans = zip(*[(acc.numa_node(i), acc.telemetry(i).fan_speed) for i in range(3)])
        amdsmi._broken.append("link")
        print(json.dumps([linked, nodes, fans, acc.is_nvlink_connected(0, 2)]))
    """
    linked, nodes, fans, unsupported = run_on_rocm(program, fakes)
    # HIP's device 0 is amdsmi's 2.
    assert linked == [False, True, False, True]
    assert nodes == [1, 0, None]
    assert fans == [40, 20, None]
    assert unsupported is None


@pytest.mark.parametrize("broken", ["missing", "import", "init", "list"])
def test_probe_replaces_failing_amdsmi(broken: str, fakes: Path, tmp_path: Path) -> None:
    program = """
        output = []
        for value in (None, "1", None, "1", "-1"):
            put({"HIP_VISIBLE_DEVICES": value})
            output.append([acc.device_count(), [device[:6] for device in acc.visible_devices()], acc.unavailable_reason()])
        put({"HIP_VISIBLE_DEVICES": None})
        output.append(outcome(lambda: acc.temperature(1)))
        print(json.dumps([output, os.getpid()]))
    """
    log = tmp_path / "log"
    output, pid = run_on_rocm(program, fakes, amdsmi=broken != "missing", STAND_IN_BROKEN=broken, STAND_IN_LOG=str(log))
    both = [
        [0, "GPU-0b00000000000000", "Stand-in 0", "00000000:00:00.0", None, 2**30],
        [1, "GPU-1b00000000000000", "Stand-in 1", "00000000:01:00.0", None, 2 * 2**30],
    ]
    assert output[0] == output[2] == [2, both, None]
    assert output[1] == output[3] == [1, both[:1], None]
    assert output[4][:2] == [0, []]
    assert output[4][2].startswith("HIP_VISIBLE_DEVICES='-1' hides every GPU; amdsmi ")
    assert output[5].startswith("The temperature of device 1, Stand-in 1, cannot be read: only the driver knows it")
    pids = [line.split()[0] for line in log.read_text().splitlines()]
    assert len(pids) == 3
    assert str(pid) not in pids


def test_reason_without_amdsmi_and_hip(fakes: Path) -> None:
    program = "print(json.dumps([acc.device_count(), acc.unavailable_reason(), acc.is_available()]))"
    count, reason, available = run_on_rocm(program, fakes, amdsmi=False, STAND_IN_NO_HIP="1")
    assert (count, available) == (0, False)
    assert reason.startswith("the ROCm runtime failed: hipInit returned hipErrorInvalidDevice (101); amdsmi does not work (")


def test_strict_availability_on_rocm(fakes: Path) -> None:
    program = """
        output = [acc.is_available(), acc.is_available(strict=True), acc.unavailable_reason(strict=True)]
        os.environ["STAND_IN_BUSY"] = "1"
        acc.refresh()
        print(json.dumps([*output, acc.is_available(strict=True), acc.unavailable_reason(strict=True)]))
    """
    first, strict, reason, busy, why = run_on_rocm(program, fakes, amdsmi=False)
    assert (first, strict, reason, busy) == (True, True, None, False)
    assert why == (
        "cuda:1 (Stand-in 1) is busy: full, or another process uses it exclusively: hipFree returned hipErrorOutOfMemory (2)"
    )
    # amdsmi lists GPUs that the runtime does not know.
    first, strict, reason, *_ = run_on_rocm(program, fakes)
    assert (first, strict) == (True, False)
    assert reason == "AMD Instinct 2 (GPU-2a00000000000000) cannot be used: it is listed, but the driver does not know it"


# A stand-in torch.cuda of ROCm, first uninitialized, then initialized. Its devices are amdsmi's GPUs 2 and 0, HIP's 0 and 2.
INITIALIZED = """
    import accelerator as acc
    import torch

    def properties(serial, has_uuid):
        class Properties:
            name, total_memory = f"AMD Instinct {serial}", 1024 * (serial + 1) << 20
        if has_uuid:
            Properties.uuid = f"{serial}a00000000000000".encode().hex()
        else:
            Properties.pci_domain_id, Properties.pci_bus_id, Properties.pci_device_id = 0, 0xC0 + serial, 0
        return Properties

    class Cuda:
        initialized = False
        order = [2, 0]
        device_count = staticmethod(lambda: len(Cuda.order))
        mem_get_info = staticmethod(lambda i: (1, properties(Cuda.order[i], False).total_memory))
        is_initialized = staticmethod(lambda: Cuda.initialized)
        get_device_properties = staticmethod(lambda i: properties(Cuda.order[i], os.environ["STAND_IN_KEY"] == "uuid"))

    torch.cuda = Cuda

    def state():
        return [[acc.device_count(), acc.get_device_name(i), acc.utilization(i), acc.temperature(i), acc.total_memory(i),
                 acc.visible_devices()[i].uuid, acc.visible_devices()[i].physical_index] for i in (0, 1)]

    os.environ["HIP_VISIBLE_DEVICES"] = "0,2"
    before = state()
    Cuda.initialized = True
    during = state()
    os.environ["HIP_VISIBLE_DEVICES"] = "1"  # too late
    print(json.dumps([before, during, state()]))
"""
TORCH_PACKAGE = {
    "__init__.py": "",
    "_C.py": "class Device:\n    type = 'cuda'\n\n_accelerator_exchangeDevice = None\n_accelerator_getAccelerator = Device\n",
    "accelerator.py": "import torch._C\ncurrent_device_index = lambda: 0\n",
}


@pytest.mark.parametrize("key", ["uuid", "bus"])
def test_visible_devices_are_unchanged_by_initialization(key: str, fakes: Path, tmp_path: Path) -> None:
    site = tmp_path / "initialized"
    shutil.copytree(fakes, site)
    for file, text in TORCH_PACKAGE.items():
        (site / "torch" / file).write_text(text)
    program = INITIALIZED.replace("import torch\n", "import torch, torch.accelerator\n", 1)
    before, during, after = run_on_rocm(program, site, STAND_IN_KEY=key)
    assert before == during == after
    assert [row[1] for row in before] == ["AMD Instinct 2", "AMD Instinct 0"]
