"""What NVML and nvidia-smi say about GPUs on which faults have left something."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from accelerator.simulation._outside import machine_faults
from accelerator.simulation._settings import fault_words
from tests.support import simulated_environment
from tests.support.simulation import evaluate, linux_only, run

pytestmark = [linux_only, pytest.mark.torch_free]

HEALTH = """
n.nvmlInit()
def health(gpu):
    handle = n.nvmlDeviceGetHandleByIndex(gpu)
    errors = [n.nvmlDeviceGetTotalEccErrors(handle, kind, counter) for kind in (1, 0) for counter in (0, 1)]
    fields = n.nvmlDeviceGetFieldValues(handle, [4, 6, 3, 5, 143, 144, 145, 230])
    values = [field.value.ullVal if field.valueType == 3 else field.value.uiVal for field in fields]
    assert values[:4] == errors, (values, errors)
    assert errors[1] == n.nvmlDeviceGetMemoryErrorCounter(handle, 1, 1, 2)
    rows = list(n.nvmlDeviceGetRemappedRows(handle))
    assert rows[1:] == values[4:7], (rows, values)
    return [*errors, *rows[1:], values[7]]
"""
UNTOUCHED = [0] * 8
# Xid of a note: uncorrectable volatile and aggregate, corrected volatile and aggregate, remapped, pending, failed, to do.
NOTES = {63: [0, 0, 0, 0, 1, 1, 0, 4], 64: [0, 0, 0, 0, 0, 0, 1, 1], 92: [0, 0, 1, 1, 0, 0, 0, 0]}


@pytest.mark.parametrize("number", [None, *NOTES])
def test_notes_are_counted(tmp_path: Path, number: int | None) -> None:
    faults = [f"xid={number},gpu=1"] if number else None
    child = simulated_environment(gpus=2, state=tmp_path / "state", faults=faults)
    program = HEALTH + "report([health(0), health(1), n.nvmlDeviceGetEccMode(n.nvmlDeviceGetHandleByIndex(0))])"
    assert run(program, child) == [UNTOUCHED, NOTES[number] if number else UNTOUCHED, [1, 1]]


def test_remapped_rows_are_not_supported_with_mig_instances(tmp_path: Path) -> None:
    program = """
        n.nvmlInit()
        fields = [[v.nvmlReturn for v in n.nvmlDeviceGetFieldValues(h, [142, 143, 144, 145, 230])] for h in handles()]
        report([[code(n.nvmlDeviceGetRemappedRows, h) for h in handles()], fields])
    """
    child = simulated_environment(gpus=3, mig=[2, 0, None], state=tmp_path / "state", faults=["xid=63,gpu=0"])
    assert run(program, child) == [[3, 0, 0], [[3, 3, 3, 3, 0], [0] * 5, [0] * 5]]


def test_arguments_are_checked() -> None:
    program = """
        handle = n.nvmlDeviceGetHandleByIndex(0)
        report([code(n.nvmlDeviceGetTotalEccErrors, handle, 2, 0), code(n.nvmlDeviceGetTotalEccErrors, handle, 0, 2),
                code(n.nvmlDeviceGetMemoryErrorCounter, handle, 0, 0, 8),
                code(n.nvmlDeviceGetRetiredPages, handle, 0)])
    """
    assert evaluate(program) == [2, 2, 2, 3]


def test_a_handle_of_a_gpu_that_is_lost_later_fails(tmp_path: Path) -> None:
    program = """
import time
n.nvmlInit()
handle = n.nvmlDeviceGetHandleByIndex(1)
before = code(n.nvmlDeviceGetName, handle)
while not (after := code(n.nvmlDeviceGetName, handle)):
    time.sleep(0.05)
report([before, after])
"""
    child = simulated_environment(gpus=2, state=tmp_path / "state", faults=["xid=79,gpu=1,after_seconds=0.5"])
    assert run(program, child) == [0, 15]


def test_events_come_once_and_only_those_after_the_registration(tmp_path: Path) -> None:
    program = """
n.nvmlInit()
gpus = handles()
events = n.nvmlEventSetCreate()
types = [n.nvmlDeviceGetSupportedEventTypes(gpus[0]), code(n.nvmlDeviceRegisterEvents, gpus[0], 32, events)]
n.nvmlDeviceRegisterEvents(gpus[0], n.nvmlEventTypeXidCriticalError, events)
n.nvmlDeviceRegisterEvents(gpus[1], n.nvmlEventTypeXidCriticalError, events)
found = []
for _ in range(2):
    data = n.nvmlEventSetWait_v2(events, 20000)
    found.append([n.nvmlDeviceGetIndex(data.device), data.eventType, data.eventData])
late = n.nvmlEventSetCreate()
n.nvmlDeviceRegisterEvents(gpus[0], n.nvmlEventTypeXidCriticalError, late)
timeouts = [code(n.nvmlEventSetWait_v2, each, 50) for each in (events, late)]
n.nvmlEventSetFree(events)
report([types, found, timeouts])
"""
    faults = ["xid=63,gpu=1,after_seconds=0.5", "xid=92,gpu=0,after_seconds=0.9", "xid=92,gpu=2,after_seconds=0.1"]
    child = simulated_environment(gpus=3, state=tmp_path / "state", faults=faults)
    assert run(program, child) == [[31, 3], [[1, 8, 63], [0, 8, 92]], [10, 10]]


def test_a_later_registration_keeps_the_types_and_events_of_earlier_ones() -> None:
    program = """
        from accelerator import simulation
        gpus, events, bits = handles(), n.nvmlEventSetCreate(), n.nvmlEventSetCreate()
        xid, double, single = (
            n.nvmlEventTypeXidCriticalError, n.nvmlEventTypeDoubleBitEccError, n.nvmlEventTypeSingleBitEccError
        )
        allocate(1)
        n.nvmlDeviceRegisterEvents(gpus[0], xid, events)
        n.nvmlDeviceRegisterEvents(gpus[0], single, bits)
        n.nvmlDeviceRegisterEvents(gpus[0], double, bits)
        def post(number, gpu):
            simulation.inject_fault(f"xid={number},gpu={gpu}")
            n.nvmlDeviceGetHandleByIndex(gpu)
        def drain(set):
            found = []
            while not code(lambda: found.append(n.nvmlEventSetWait_v2(set, 0))) and len(found) < 100:
                pass
            return [[n.nvmlDeviceGetIndex(each.device), each.eventType, each.eventData] for each in found]
        post(63, 0)
        post(92, 0)
        n.nvmlDeviceRegisterEvents(gpus[1], xid, events)
        post(92, 1)
        report([drain(events), drain(bits)])
    """
    assert evaluate(program, 2) == [[[0, 8, 63], [0, 8, 92], [1, 8, 92]], [[0, 1, 0]]]


@pytest.mark.parametrize(
    ("fault", "values", "expected"),
    [
        ("xid=79,gpu=1", "[code(n.nvmlDeviceGetHandleByIndex, gpu) for gpu in range(n.nvmlDeviceGetCount())]", [0, 15, 0]),
        ("xid=79,gpu=1", "n.nvmlDeviceGetTemperature(n.nvmlDeviceGetHandleByIndex(2), 0)", 32),
        ("xid=79,gpu=0,after_seconds=0.3", "[wait(events, 20000).eventData, code(wait, events, 20000)]", [79, 15]),
        ("xid=79,gpu=1", "[code(n.nvmlDeviceGetHandleByIndex, 1), code(wait, events, 50)]", [15, 10]),
    ],
    ids=["all calls", "the others go on", "its event comes first", "a set of another GPU waits"],
)
def test_a_lost_gpu(tmp_path: Path, fault: str, values: str, expected: Any) -> None:
    program = f"""
n.nvmlInit()
events, wait = n.nvmlEventSetCreate(), n.nvmlEventSetWait_v2
n.nvmlDeviceRegisterEvents(n.nvmlDeviceGetHandleByIndex(0), n.nvmlEventTypeXidCriticalError, events)
report({values})
"""
    assert run(program, simulated_environment(gpus=3, state=tmp_path / "state", faults=[fault])) == expected


def test_remapped_rows_use_up_spare_ones() -> None:
    program = """
        from accelerator import simulation
        allocate(1)
        def histogram():
            found = n.nvmlDeviceGetRowRemapperHistogram(handles()[0])
            return [found.max, found.high, found.partial, found.low, found.none]
        before = histogram()
        simulation.inject_fault("xid=63,gpu=0")
        n.nvmlDeviceGetHandleByIndex(0)
        report([before, histogram()])
    """
    before, after = evaluate(program, 1, name="H100")
    assert before[0] > 1
    assert before[1:] == [0] * 4
    assert after == [before[0] - 1, 1, 0, 0, 0]


def test_a_set_that_is_far_behind_has_the_latest_events_in_their_order() -> None:
    gpus, kept = 100, 256
    program = f"""
        from accelerator import simulation
        gpus, events = handles(), n.nvmlEventSetCreate()
        for gpu in gpus:
            n.nvmlDeviceRegisterEvents(gpu, n.nvmlEventTypeXidCriticalError, events)
        allocate(1)
        def post(gpu, xid):
            simulation.inject_fault(f"xid={{xid}},gpu={{gpu}}")
            n.nvmlDeviceGetHandleByIndex(gpu)
        def drain():
            found = []
            while not code(lambda: found.append(n.nvmlEventSetWait_v2(events, 0))) and len(found) < 1000:
                pass
            return [[n.nvmlDeviceGetIndex(each.device), each.eventData] for each in found]
        for xid in (63, 64, 92):
            for gpu in range({gpus}):
                post(gpu, xid)
        first = drain()
        post(7, 92)
        report([first, drain()])
    """
    posted = [[gpu, xid] for xid in (63, 64, 92) for gpu in range(gpus)]
    assert evaluate(program, gpus) == [posted[-kept:], [[7, 92]]]


def smi(child: dict[str, str], *arguments: str) -> Any:
    done = subprocess.run(["nvidia-smi", *arguments], env=child, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout.splitlines()


def test_nvidia_smi_shows_errors_and_what_to_do(tmp_path: Path) -> None:
    child = simulated_environment(gpus=2, state=tmp_path / "state", faults=["xid=63,gpu=1", "xid=92,gpu=0"])
    fields = "ecc.mode.current,ecc.errors.uncorrected.volatile.total,ecc.errors.corrected.aggregate.total"
    fields += ",remapped_rows.uncorrectable,remapped_rows.pending,remapped_rows.failure,gpu_recovery_action"
    assert smi(child, f"--query-gpu={fields}", "--format=csv,noheader") == (
        0,
        ["Enabled, 0, 1, 0, No, No, None", "Enabled, 0, 0, 1, Yes, No, Drain and Reset"],
    )


# Reports the error, and the uncorrectable errors since a reset of each GPU and what is to be done: 4 is to drain and reset.
FIRE = (
    HEALTH
    + """
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 1) in (0, 214)
cuda.cuCtxSetCurrent(context)
code = cuda.cuCtxSynchronize()
report([code, *[health(gpu)[i] for gpu in (0, 1) for i in (0, 7)]])
"""
)


def test_counters_since_a_reset_and_in_all(tmp_path: Path) -> None:
    """No two counters of the GPU are equal. The other GPU has none."""
    state, faults = tmp_path / "state", [*["xid=92,gpu=1"] * 3, "xid=94,gpu=1"]
    assert run(FIRE, simulated_environment(gpus=2, state=state, faults=faults)) == [214, 0, 0, 1, 4]
    machine_faults.end(state, None, is_reset=True)
    child = simulated_environment(gpus=2, state=state)
    for fault in faults:
        machine_faults.add(state, fault_words.parse(fault))
    assert run(FIRE, child) == [214, 0, 0, 1, 4]
    errors = [f"ecc.errors.{kind}.{span}" for span in ("volatile", "aggregate") for kind in ("corrected", "uncorrected")]
    expected = {"total": "3, 1, 6, 2", "dram": "3, 1, 6, 2", "sram": "0, 0, 0, 0"}
    for memory, counted in expected.items():
        fields = ",".join(f"{name}.{memory}" for name in errors)
        assert smi(child, f"--query-gpu={fields}", "--format=csv,noheader") == (0, ["0, 0, 0, 0", counted])
    fields = ",".join(f"remapped_rows.{name}" for name in ("correctable", "uncorrectable", "pending", "failure"))
    rows = ["00000000:01:00.0, 0, 0, No, No", "00000000:02:00.0, 0, 2, Yes, No"]
    assert smi(child, f"--query-remapped-rows=gpu_bus_id,{fields}", "--format=csv,noheader") == (0, rows)
    details = "\n".join(smi(child, "-q", "-d", "ECC", "-i", "1")[1])
    assert re.findall(r"DRAM (?:Corr|Uncorr)ectable *: (\d)", details) == ["3", "1", "6", "2"]
    table = [line.split()[-2] for line in smi(child)[1] if re.match(r"\|   \d  Simulated", line)]
    assert table == ["0", "1"]


def test_nvidia_smi_names_a_lost_gpu_and_shows_the_others(tmp_path: Path) -> None:
    child = simulated_environment(gpus=2, state=tmp_path / "state", faults=["xid=79,gpu=0"])
    lost = "Unable to determine the device handle for GPU 0: GPU is lost.  Reboot the system to recover this GPU"
    status, lines = smi(child, "--query-gpu=index", "--format=csv,noheader")
    assert (status, lines) == (0, [lost, "1"])
    status, lines = smi(child)
    assert status == 0
    assert lines[0] == lost
    assert sum("Simulated GPU" in line for line in lines) == 1


def test_nvidia_smi_tells_all_of_a_gpu_and_names_a_lost_one(tmp_path: Path) -> None:
    child = simulated_environment(gpus=3, state=tmp_path / "state", faults=["xid=79,gpu=0", "xid=63,gpu=1", "xid=92,gpu=1"])
    status, lines = smi(child, "-q")
    assert status == 0
    assert lines[0] == "Unable to determine the device handle for GPU 0: GPU is lost.  Reboot the system to recover this GPU"
    assert lines[2] == "==============NVSMI LOG=============="
    gpus = "\n".join(lines).split("\nGPU ")[1:]
    assert [gpu.partition("\n")[0] for gpu in gpus] == ["00000000:02:00.0", "00000000:03:00.0"]
    values = [dict(re.findall(r"^ *(\S.*?) *: (.*)$", gpu, re.MULTILINE)) for gpu in gpus]
    recovery = [value["GPU Recovery Action"] for value in values]
    assert recovery == ["Drain and Reset", "None"]
    assert f"            {'DRAM Correctable':43}: 1\n            DRAM Uncorrectable" in gpus[0].partition("Aggregate")[0]
    assert f"        {'Uncorrectable Error':47}: 1\n        {'Pending':47}: Yes" in gpus[0]
    assert [value["GPU Current Temp"] for value in values] == ["31 C", "32 C"]
    assert f"{'Attached GPUs':55}: 3" in lines
    assert smi(child, "-q", "-i", "2")[1].count("    ECC Errors") == 1
