"""Tests the simulated ``nvidia-smi``."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import environment
from tests.support.discovery import compiled
from tests.support.simulation import DEADLINE, MIB, evaluate, linux_only

pytestmark = linux_only


def smi(*arguments: str, gpus: int = 1, **machine: Any) -> subprocess.CompletedProcess[str]:
    """Run ``nvidia-smi`` on a simulated machine."""
    child = environment(gpus, base={"PATH": "/usr/bin:/bin"}, **machine)
    program = shutil.which("nvidia-smi", path=child["PATH"])
    assert program
    return subprocess.run([program, *arguments], env=child, capture_output=True, text=True, timeout=DEADLINE)


def query(fields: str, *options: str, **machine: Any) -> list[list[str]]:
    """Return the cells of the table that ``--query-gpu`` prints."""
    done = smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits", *options, **machine)
    assert done.returncode == 0, done.stdout
    return [line.split(", ") for line in done.stdout.splitlines()]


def test_query_returns_nvmls_values() -> None:
    program = """
        report([[n.nvmlDeviceGetName(h), str(n.nvmlDeviceGetIndex(h)), n.nvmlDeviceGetUUID(h), n.nvmlDeviceGetPciInfo(h).busId,
                 str(n.nvmlDeviceGetMemoryInfo(h).total >> 20), str(n.nvmlDeviceGetMemoryInfo(h).free >> 20),
                 str(n.nvmlDeviceGetUtilizationRates(h).gpu), str(n.nvmlDeviceGetUtilizationRates(h).memory),
                 str(n.nvmlDeviceGetTemperature(h, 0)), str(n.nvmlDeviceGetFieldValues(h, [82])[0].value.uiVal),
                 format(n.nvmlDeviceGetPowerUsage(h) / 1000, ".2f"), format(n.nvmlDeviceGetEnforcedPowerLimit(h) / 1000, ".2f"),
                 str(n.nvmlDeviceGetFanSpeed(h)), str(n.nvmlDeviceGetClockInfo(h, 1)), str(n.nvmlDeviceGetMaxClockInfo(h, 2)),
                 n.nvmlSystemGetDriverVersion(), "%d.%d" % n.nvmlDeviceGetCudaComputeCapability(h)] for h in handles()])
    """
    fields = "name,index,uuid,pci.bus_id,memory.total,memory.free,utilization.gpu,utilization.memory,temperature.gpu,"
    fields += "temperature.memory,power.draw,enforced.power.limit,fan.speed,clocks.sm,clocks.max.mem,driver_version,compute_cap"
    machine: dict[str, Any] = {"memory": ["8GiB", "512MiB"], "name": ["Big", "Small"], "capability": ["9.0", "7.5"]}
    assert query(fields, gpus=2, **machine) == evaluate(program, 2, **machine)


def test_header_and_units() -> None:
    done = smi("--query-gpu=name, memory.used,utilization.gpu,serial,mig.mode.current", "--format=csv", "-i", "1", gpus=2)
    assert done.stdout.splitlines() == [
        "name, memory.used [MiB], utilization.gpu [%], serial, mig.mode.current",
        "Simulated GPU, 0 MiB, 20 %, [N/A], Disabled",
    ]


def test_power_limits() -> None:
    limits = "power.min_limit,power.max_limit,power.default_limit,power.limit"
    assert query(limits) == [["200.00", "700.00", "700.00", "700.00"]]


def test_nvml_errors_are_shown() -> None:
    errors = {"nvmlDeviceGetPowerUsage@1": 15, "nvmlDeviceGetFanSpeed@1": 3, "nvmlDeviceGetTemperature@1": 999}
    assert query("power.draw,fan.speed,temperature.gpu", gpus=2, errors=errors) == [
        ["60.00", "25", "30"],
        ["[GPU is lost]", "[N/A]", "[Unknown Error]"],
    ]


def test_units_of_the_table_follow_values_only() -> None:
    errors = {"nvmlDeviceGetFanSpeed@1": 3, "nvmlDeviceGetTemperature@1": 15, "nvmlDeviceGetPowerUsage@1": 3}
    rows = [line.split() for line in smi(gpus=2, errors=errors).stdout.splitlines() if "P0" in line]
    assert [row[1:6] for row in rows] == [["25%", "30C", "P0", "60.00W", "/"], ["N/A", "ERR!", "P0", "N/A", "/"]]


@pytest.mark.parametrize("field", ["index", "uuid", "pci.bus_id"])
def test_query_of_one_gpu(field: str) -> None:
    (name,) = query(field, gpus=3)[1]
    assert query("index", f"--id={name}", gpus=3) == [["1"]]


def test_list_of_mig_instances() -> None:
    lines = smi("-L", gpus=2, mig=[None, 2]).stdout.splitlines()
    assert [line.partition("UUID")[0] for line in lines] == [
        "GPU 0: Simulated GPU (",
        "GPU 1: Simulated GPU (",
        "  MIG 1g     Device  0: (",
        "  MIG 1g     Device  1: (",
    ]
    assert lines[2].endswith(")")
    assert "UUID: MIG-" in lines[2]


def test_processes(tmp_path: Path) -> None:
    program = f"""
        allocate({64 * MIB})
        import subprocess
        fields = "--query-compute-apps=pid,process_name,used_memory,gpu_uuid"
        run = lambda *words: subprocess.run(["nvidia-smi", *words], capture_output=True, text=True).stdout
        uuid = n.nvmlDeviceGetUUID(handles()[0])
        report([run(fields, "--format=csv").splitlines(), f"{{os.getpid()}}, {{sys.executable}}, 64 MiB, {{uuid}}",
                [line.split()[1:4] for line in run().splitlines() if "  C  " in line], str(os.getpid())])
    """
    rows, expected, table, pid = evaluate(program, state=tmp_path / "state")
    assert rows == ["pid, process_name, used_memory [MiB], gpu_uuid", expected]
    assert table == [["0", pid, "C"]]


# A program in C, because 257 forks of Python take long.
CROWD = """
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

int main(void)
{
    enum { COUNT = 257 };
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *context;
    int (*init)(unsigned) = dlsym(cuda, "cuInit"), (*retain)(void **, int) = dlsym(cuda, "cuDevicePrimaryCtxRetain");
    int ready[2], status = pipe(ready);
    pid_t children[COUNT];
    char failed;
    for (int i = 0; i < COUNT; i++)
        if ((children[i] = fork()) == 0) {
            failed = init(0) != 0 || retain(&context, 0) != 0;
            status = write(ready[1], &failed, 1) != 1;
            alarm(60); /* ends the child if its parent dies */
            pause();
        }
    for (int i = 0; i < COUNT; i++)
        status |= read(ready[0], &failed, 1) != 1 || failed;
    status |= system("nvidia-smi --query-compute-apps=pid --format=csv,noheader | sort -u | wc -l");
    for (int i = 0; i < COUNT; i++)
        kill(children[i], SIGKILL);
    return status != 0;
}
"""


def test_more_than_256_processes(tmp_path: Path) -> None:
    child = environment(state=tmp_path / "state")
    done = subprocess.run([compiled(CROWD, tmp_path / "crowd")], env=child, capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode, done.stdout) == (0, "257\n"), done.stderr


def test_table() -> None:
    lines = smi(gpus=2).stdout.splitlines()
    assert "Driver Version: 595.45.04 " in lines[1]
    assert "CUDA Version: 13.2 " in lines[1]
    assert sum("Simulated GPU" in line for line in lines) == 2
    assert {len(line) for line in lines if line} == {len(lines[0])}


def test_links() -> None:
    lines = smi("topo", "-m", gpus=3, nvlink=[0, 0, None], numa=[0, 0, 1]).stdout.splitlines()
    assert [line.split() for line in lines] == [
        ["GPU0", "GPU1", "GPU2"],
        ["GPU0", "X", "NV1", "SYS"],
        ["GPU1", "NV1", "X", "SYS"],
        ["GPU2", "SYS", "SYS", "X"],
    ]


@pytest.mark.parametrize(
    ("machine", "status", "message"),
    [
        ({"nvml": "broken"}, 9, "couldn't communicate with the NVIDIA driver"),
        ({"nvml": "mismatch"}, 18, "Failed to initialize NVML: Driver/library version mismatch"),
        ({"errors": {"nvmlInit*": 999}}, 255, "Failed to initialize NVML: Unknown Error"),
        ({"gpus": 0}, 6, "No devices were found"),
    ],
)
def test_failures(machine: dict[str, Any], status: int, message: str) -> None:
    done = smi(**machine)
    assert (done.returncode, done.stderr) == (status, "")
    assert message in done.stdout


def test_wrong_usage() -> None:
    for option in ("--query-gpu=name,nothing", "--query-compute-apps=pid,nothing"):
        for form in ("csv", "csv,noheader"):
            done = smi(option, f"--format={form}")
            assert (done.returncode, done.stdout) == (2, 'Field "nothing" is not a valid field to query.\n')
    assert smi("--query-gpu=name").returncode == 2
    assert smi("--reset").returncode == 2


@pytest.mark.parametrize("machine", [{"driver": "absent"}, {"nvml": "absent"}])
def test_nvidia_smi_is_absent_without_a_driver(machine: dict[str, Any]) -> None:
    inside = environment(base={"PATH": "/bin"})
    assert environment(base=inside, **machine)["PATH"] == "/bin"
