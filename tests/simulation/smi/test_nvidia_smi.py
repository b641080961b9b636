"""Tests the simulated ``nvidia-smi``."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import environment, sample
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
    done = smi("--query-gpu=gpu_name, memory.used,utilization.gpu,serial,mig.mode.current", "--format=csv", "-i", "1", gpus=2)
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
    assert [row[1:6] for row in rows] == [["25%", "30C", "P0", "60W", "/"], ["N/A", "ERR!", "P0", "N/A", "/"]]


def test_several_gpus_are_chosen_in_every_view() -> None:
    (_, uuid, _, bus) = (row[0] for row in query("uuid", gpus=2) + query("pci.bus_id", gpus=2))
    chosen = ("-i", f"2,{bus}")
    assert query("index,count,pci.domain,pci.bus,pci.device", *chosen, gpus=3) == [
        ["1", "3", "0x0000", "0x02", "0x00"],
        ["2", "3", "0x0000", "0x03", "0x00"],
    ]
    assert query("index", f"--id={uuid},0", gpus=3) == [["0"], ["1"]]
    assert re.findall(r"^GPU (\d)", smi("-L", *chosen, gpus=3).stdout, re.MULTILINE) == ["1", "2"]
    assert re.findall(r"^\|   (\d)  Simulated", smi(*chosen, gpus=3).stdout, re.MULTILINE) == ["1", "2"]
    assert re.findall(r"^GPU 00000000:(\d\d)", smi("-q", *chosen, gpus=3).stdout, re.MULTILINE) == ["02", "03"]
    assert smi("-i", "3", gpus=3).returncode == 6


def test_formats() -> None:
    found = {form: smi("--query-gpu=index,utilization.gpu", f"--format={form}").stdout for form in FORMATS}
    assert found == FORMATS


FORMATS = {
    "csv": "index, utilization.gpu [%]\n0, 13 %\n",
    "csv,nounits": "index, utilization.gpu [%]\n0, 13\n",
    "csv,noheader": "0, 13 %\n",
    "csv,nounits,noheader": "0, 13\n",
}


# In the order of NVML's bits: the names of queries, and the lines of -q, which has them in another order.
REASONS = {
    "gpu_idle": "Idle",
    "applications_clocks_setting": "Applications Clocks Setting",
    "sw_power_cap": "SW Power Cap",
    "hw_slowdown": "HW Slowdown",
    "sync_boost": "Sync Boost",
    "sw_thermal_slowdown": "SW Thermal Slowdown",
    "hw_thermal_slowdown": "HW Thermal Slowdown",
    "hw_power_brake_slowdown": "HW Power Brake Slowdown",
}


@pytest.mark.parametrize("prefix", ["clocks_event_reasons", "clocks_throttle_reasons"])
def test_each_reason_of_slow_clocks_is_active_alone(prefix: str) -> None:
    bits = [1 << bit for bit in range(len(REASONS))]
    fields = ",".join([f"{prefix}.active", *(f"{prefix}.{name}" for name in REASONS)])
    header, *rows = smi(f"--query-gpu={fields}", "--format=csv", gpus=len(bits), clock_reasons=bits).stdout.splitlines()
    assert header.split(", ") == [field.replace(prefix, "clocks_event_reasons") for field in fields.split(",")]
    assert [row.split(", ") for row in rows] == [
        [f"0x{bit:016X}", *("Active" if each == bit else "Not Active" for each in bits)] for bit in bits
    ]


def test_details_name_the_reason_of_slow_clocks() -> None:
    bits = [1 << bit for bit in range(len(REASONS) + 1)]
    printed = smi("-q", "-d", "PERFORMANCE", gpus=len(bits), clock_reasons=bits).stdout
    assert re.findall(r"^ *(\S.*?) *: Active$", printed, re.MULTILINE) == [*REASONS.values(), "Display Clock Setting"]


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
        allocate({32 * MIB}, 1)
        import subprocess
        fields = "--query-compute-apps=pid,process_name,used_memory,gpu_uuid"
        run = lambda *words: subprocess.run(["nvidia-smi", *words], capture_output=True, text=True).stdout
        uuids = [n.nvmlDeviceGetUUID(handle) for handle in handles()]
        memory = ["--query-gpu=memory.used,memory.free,memory.total", "--format=csv,noheader"]
        details = [line.split(": ")[1] for line in run("-q", "-d", "PIDS", "-i", "1").splitlines() if line.startswith("      ")]
        report([run(fields, "--format=csv").splitlines(),
                [f"{{os.getpid()}}, {{sys.executable}}, {{size}} MiB, {{uuid}}" for size, uuid in zip((64, 32), uuids)],
                [[*line.split()[1:6], line.split()[-2]] for line in run().splitlines() if "  C  " in line],
                run(*memory).splitlines(), details, str(os.getpid()), sys.executable])
    """
    rows, expected, table, memory, details, pid, name = evaluate(program, 2, state=tmp_path / "state")
    assert rows == ["pid, process_name, used_gpu_memory [MiB], gpu_uuid", *expected]
    assert table == [["0", "N/A", "N/A", pid, "C", "64MiB"], ["1", "N/A", "N/A", pid, "C", "32MiB"]]
    assert memory == ["64 MiB, 8128 MiB, 8192 MiB", "32 MiB, 8160 MiB, 8192 MiB"]
    assert details == ["N/A", "N/A", pid, "C", name, "32 MiB"]


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


# What driver 580 prints on an H100, with the values of a simulated one.
TABLE = """
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 595.45.04              Driver Version: 595.45.04      CUDA Version: 13.2     |
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA H100 80GB HBM3          On  |   00000000:01:00.0 Off |                    0 |
| N/A   30C    P0             60W /  700W |       0MiB /  81559MiB |     13%      Default |
|                                         |                        |             Disabled |
+-----------------------------------------+------------------------+----------------------+

+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |
|        ID   ID                                                               Usage      |
|=========================================================================================|
|  No running processes found                                                             |
+-----------------------------------------------------------------------------------------+
"""


def test_table() -> None:
    date, _, table = smi(name="H100").stdout.partition("\n")
    assert re.fullmatch(r"\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}       ", date)
    assert table == TABLE[1:]


def test_table_of_several_gpus() -> None:
    lines = smi(gpus=3, mig=[None, 2, None], capability=["9.0", "9.0", "7.5"]).stdout.splitlines()
    assert sum("Simulated GPU" in line for line in lines) == 3
    assert {len(line) for line in lines[1:] if line} == {91}
    assert [line.split()[-2] for line in lines if "abled |" in line or "N/A |" in line] == ["Disabled", "Enabled", "N/A"]
    devices = [line.split("|")[1].split() for line in lines if "MiB / " in line][3:]
    assert devices == [["1", "1", "0", "0"], ["1", "2", "0", "1"]]


def test_links() -> None:
    lines = smi("topo", "-m", gpus=3, nvlink=[0, 0, None], numa=[0, 0, 1]).stdout.splitlines()
    assert lines[0] == "\t\x1b[4mGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"
    assert [line.split("\t")[:4] for line in lines[1:4]] == [
        ["GPU0", " X ", "NV1", "SYS"],
        ["GPU1", "NV1", " X ", "SYS"],
        ["GPU2", "SYS", "SYS", " X "],
    ]
    cpus = r"\d+(-\d+)?(,\d+(-\d+)?)*"
    assert all(
        re.fullmatch(rf"{cpus}\t{node}\t\tN/A", line.split("\t", 4)[4]) for node, line in zip("001", lines[1:4], strict=True)
    )
    assert lines[4:8] == ["", "Legend:", "", "  X    = Self"]
    assert lines[-1] == "  NV#  = Connection traversing a bonded set of # NVLinks"
    assert smi("topo", "-m", numa=[None]).stdout.splitlines()[1] == "GPU0\t X \tN/A\tN/A\t\tN/A"


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
            assert (done.returncode, done.stdout) == (2, 'Field "nothing" is not a valid field to query.\n\n')
    assert smi("--query-gpu=name").returncode == 2
    done = smi("--nothing")
    assert (done.returncode, done.stdout) == (
        255,
        "ERROR: Option --nothing is not recognized. Please run 'nvidia-smi -h'.\n\n",
    )
    for words in (("--gpu-reset",), ("nvlink", "--status"), ("-q", "-x")):
        done = smi(*words)
        assert done.returncode == 2
        assert "the simulated nvidia-smi has no" in done.stdout
    assert smi("-q", "-d", "ECC,NOTHING").returncode == 2


# Of an H100 with driver 580: the fields, the header that nvidia-smi prints for them, and the values of a simulated one.
FIELDS = {
    "clocks.sm": ("clocks.current.sm [MHz]", "1000 MHz"),
    "clocks.gr": ("clocks.current.graphics [MHz]", "1000 MHz"),
    "clocks.mem": ("clocks.current.memory [MHz]", "2600 MHz"),
    "clocks.max.sm": ("clocks.max.sm [MHz]", "1980 MHz"),
    "clocks.max.mem": ("clocks.max.memory [MHz]", "2619 MHz"),
    "clocks_throttle_reasons.active": ("clocks_event_reasons.active", "0x0000000000000000"),
    "clocks_event_reasons.active": ("clocks_event_reasons.active", "0x0000000000000000"),
    "retired_pages.pending": ("retired_pages.pending", "[N/A]"),
    "fan.speed": ("fan.speed [%]", "[N/A]"),
    "display_active": ("display_active", "Disabled"),
    "temperature.memory": ("temperature.memory", "40"),
    "memory.reserved": ("memory.reserved [MiB]", "470 MiB"),
    "ecc.errors.uncorrected.volatile.total": ("ecc.errors.uncorrected.volatile.total", "0"),
    "pcie.link.gen.max": ("pcie.link.gen.max", "5"),
    "pcie.link.width.current": ("pcie.link.width.current", "16"),
}


def test_fields_of_an_h100() -> None:
    header, row = smi(f"--query-gpu={','.join(FIELDS)}", "--format=csv", name="H100").stdout.splitlines()
    assert dict(zip(FIELDS, zip(header.split(", "), row.split(", "), strict=True), strict=True)) == FIELDS


def test_processes_have_the_names_of_the_driver() -> None:
    done = smi("--query-compute-apps=pid,name,used_memory", "--format=csv")
    assert done.stdout == "pid, process_name, used_gpu_memory [MiB]\n"


def test_remapped_rows() -> None:
    fields = "gpu_bus_id,remapped_rows.correctable,remapped_rows.uncorrectable,remapped_rows.pending,remapped_rows.failure"
    done = smi(f"--query-remapped-rows={fields}", "--format=csv", gpus=2)
    assert done.stdout.splitlines() == [
        fields.replace(",", ", "),
        "00000000:01:00.0, 0, 0, No, No",
        "00000000:02:00.0, 0, 0, No, No",
    ]
    assert smi("--query-remapped-rows=name", "--format=csv").returncode == 2


# Lines that driver 580 prints on an H100, in this order.
DETAILS = """
GPU 00000000:01:00.0
    Product Name                                       : NVIDIA H100 80GB HBM3
    Product Brand                                      : NVIDIA
    Product Architecture                               : Hopper
    Display Mode                                       : Requested functionality has been deprecated
    Display Attached                                   : Yes
    Display Active                                     : Disabled
    Persistence Mode                                   : Enabled
    MIG Mode
        Current                                        : Disabled
        Pending                                        : Disabled
    Accounting Mode                                    : Disabled
    Accounting Mode Buffer Size                        : 4000
    Serial Number                                      : N/A
    Minor Number                                       : 0
    VBIOS Version                                      : N/A
    MultiGPU Board                                     : No
    Board ID                                           : 0x100
    GPU Recovery Action                                : None
    PCI
        Bus                                            : 0x01
        Device                                         : 0x00
        Domain                                         : 0x0000
        Device Id                                      : 0x233010DE
        Bus Id                                         : 00000000:01:00.0
        Sub System Id                                  : 0x16C110DE
        GPU Link Info
            PCIe Generation
                Max                                    : 5
                Current                                : 5
                Device Current                         : 5
                Device Max                             : 5
                Host Max                               : N/A
            Link Width
                Max                                    : 16x
                Current                                : 16x
        Replays Since Reset                            : 0
        Tx Throughput                                  : 0 KB/s
        Rx Throughput                                  : 0 KB/s
    Fan Speed                                          : N/A
    Performance State                                  : P0
    Clocks Event Reasons
        Idle                                           : Not Active
        Applications Clocks Setting                    : Not Active
        SW Power Cap                                   : Not Active
        HW Slowdown                                    : Not Active
            HW Thermal Slowdown                        : Not Active
            HW Power Brake Slowdown                    : Not Active
        Sync Boost                                     : Not Active
        SW Thermal Slowdown                            : Not Active
        Display Clock Setting                          : Not Active
    FB Memory Usage
        Total                                          : 81559 MiB
        Reserved                                       : 470 MiB
        Used                                           : 0 MiB
        Free                                           : 81089 MiB
    BAR1 Memory Usage
        Total                                          : 131072 MiB
        Used                                           : 0 MiB
        Free                                           : 131072 MiB
    Compute Mode                                       : Default
    Utilization
        GPU                                            : 13 %
        Memory                                         : 7 %
        Encoder                                        : 0 %
        Decoder                                        : 0 %
        JPEG                                           : 0 %
        OFA                                            : 0 %
    ECC Mode
        Current                                        : Enabled
        Pending                                        : Enabled
    ECC Errors
        Volatile
            SRAM Correctable                           : 0
            SRAM Uncorrectable Parity                  : 0
            SRAM Uncorrectable SEC-DED                 : 0
            DRAM Correctable                           : 0
            DRAM Uncorrectable                         : 0
        Aggregate
            SRAM Correctable                           : 0
            DRAM Uncorrectable                         : 0
    Retired Pages
        Single Bit ECC                                 : N/A
        Double Bit ECC                                 : N/A
        Pending Page Blacklist                         : N/A
    Remapped Rows
        Correctable Error                              : 0
        Uncorrectable Error                            : 0
        Pending                                        : No
        Remapping Failure Occurred                     : No
        Bank Remap Availability Histogram
            Max                                        : 2560 bank(s)
            None                                       : 0 bank(s)
    Temperature
        GPU Current Temp                               : 30 C
        GPU T.Limit Temp                               : 57 C
        GPU Shutdown T.Limit Temp                      : -8 C
        GPU Slowdown T.Limit Temp                      : -2 C
        GPU Max Operating T.Limit Temp                 : 0 C
        GPU Target Temperature                         : N/A
        Memory Current Temp                            : 40 C
        Memory Max Operating T.Limit Temp              : 0 C
    GPU Power Readings
        Average Power Draw                             : 60.00 W
        Instantaneous Power Draw                       : 60.00 W
        Current Power Limit                            : 700.00 W
        Requested Power Limit                          : 700.00 W
        Default Power Limit                            : 700.00 W
        Min Power Limit                                : 200.00 W
        Max Power Limit                                : 700.00 W
    Clocks
        Graphics                                       : 1000 MHz
        SM                                             : 1000 MHz
        Memory                                         : 2600 MHz
        Video                                          : 900 MHz
    Applications Clocks
        Graphics                                       : 1980 MHz
        Memory                                         : 2619 MHz
    Default Applications Clocks
        Graphics                                       : 1980 MHz
        Memory                                         : 2619 MHz
    Max Clocks
        Graphics                                       : 1980 MHz
        SM                                             : 1980 MHz
        Memory                                         : 2619 MHz
        Video                                          : 1545 MHz
    Max Customer Boost Clocks
        Graphics                                       : 1980 MHz
    Processes                                          : None
"""


def test_details_of_an_h100() -> None:
    done = smi("-q", name="H100")
    lines = iter(done.stdout.splitlines())
    for line in DETAILS.strip().splitlines():
        assert line in lines, (line, done.stdout)
    assert done.stdout.endswith(": None\n\n")


def test_details_of_one_part() -> None:
    lines = smi("-q", "-d", "ECC,ROW_REMAPPER,PAGE_RETIREMENT").stdout.splitlines()
    sections = [line.strip() for line in lines if re.match(r" {4}\S", line)]
    assert sections == ["ECC Mode", "ECC Errors", "Retired Pages", "Remapped Rows"]
    sections = [
        line.strip() for line in smi("-q", "--display=memory,TEMPERATURE").stdout.splitlines() if re.match(r" {4}\S", line)
    ]
    assert sections == ["FB Memory Usage", "BAR1 Memory Usage", "Temperature"]


PARTS = {
    "MEMORY": ["FB Memory Usage", "BAR1 Memory Usage"],
    "UTILIZATION": ["Utilization"],
    "ECC": ["ECC Mode", "ECC Errors"],
    "TEMPERATURE": ["Temperature"],
    "POWER": ["GPU Power Readings"],
    "CLOCK": [
        *("Clocks", "Applications Clocks", "Default Applications Clocks", "Max Clocks", "Max Customer Boost Clocks"),
    ],
    "COMPUTE": ["Compute Mode"],
    "PIDS": ["Processes"],
    "PERFORMANCE": ["Performance State", "Clocks Event Reasons"],
    "PAGE_RETIREMENT": ["Retired Pages"],
    "ACCOUNTING": ["Accounting Mode", "Accounting Mode Buffer Size"],
    "ENCODER_STATS": ["Encoder Stats"],
    "ROW_REMAPPER": ["Remapped Rows"],
    "FBC_STATS": ["FBC Stats"],
}


@pytest.mark.parametrize("part", sample(PARTS, "ACCOUNTING", "CLOCK", "POWER"))
def test_a_part_has_its_sections(part: str) -> None:
    printed = smi("-q", "-d", part).stdout
    assert re.findall(r"^ {4}(\w.*?)(?: *:.*)?$", printed, re.MULTILINE) == PARTS[part]


@pytest.mark.parametrize("machine", [{"driver": "absent"}, {"nvml": "absent"}])
def test_nvidia_smi_is_absent_without_a_driver(machine: dict[str, Any]) -> None:
    inside = environment(base={"PATH": "/bin"})
    assert environment(base=inside, **machine)["PATH"] == "/bin"
