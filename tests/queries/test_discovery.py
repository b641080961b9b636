"""Discovery in fresh processes: correct results after every failure, without initializing the driver in the process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import sample, simulated_environment
from tests.support.discovery import BUILD, evaluate, evaluate_simulated, initializations, on_simulated_gpus, original_pynvml

pytestmark = on_simulated_gpus

# Prints what the queries return on a machine.
REPORT = """
    import accelerator as acc
    print(json.dumps({
        "pid": os.getpid(),
        "count": acc.device_count(),
        "reason": acc.unavailable_reason(),
        "available": acc.is_available(),
        "names": [device.name for device in acc.visible_devices()],
        "physical": [device.physical_index for device in acc.visible_devices()],
        "name": acc.get_device_name(),
        "strict": acc.is_available(strict=True),
        "strict reason": acc.unavailable_reason(strict=True),
        "fork safe": acc.is_fork_safe(),
        "torch": "torch" in sys.modules,
        "loaded": any("libcuda.so" in line for line in open("/proc/self/maps")),
    }))
"""

NVML_ERROR = {"nvmlDeviceGetCount*": 999}
NVML_ABSENT = {"nvml": "absent"}
DRIVER_ABSENT = {"driver": "absent"}
NONE: dict[str, Any] = {}

# name: (machine, CUDA_VISIBLE_DEVICES, expected count, part of the expected reason)
FAILING: dict[str, tuple[dict[str, Any], str | None, int, str | None]] = {
    "all is well": (NONE, None, 3, None),
    "NVML absent": (NVML_ABSENT, None, 3, None),
    "NVML absent, one hidden": (NVML_ABSENT, "2,0", 2, None),
    "NVML absent, by UUID": (NVML_ABSENT, "GPU-c", 1, None),
    "NVML absent, all hidden": (NVML_ABSENT, "-1", 0, "CUDA_VISIBLE_DEVICES='-1' hides every GPU"),
    "NVML without kernel driver": ({"nvml": "broken"}, None, 3, None),
    "NVML and kernel driver differ": ({"nvml": "mismatch"}, None, 3, None),
    "NVML fails to count": ({"errors": NVML_ERROR}, None, 3, None),
    "NVML fails to count, some hidden": ({"errors": NVML_ERROR}, "1", 1, None),
    "NVML fails at a handle": ({"errors": {"nvmlDeviceGetHandleByIndex*@1": 15}}, None, 3, None),
    "NVML reports no UUID": ({"errors": {"nvmlDeviceGetUUID": 999}}, None, 3, None),
    "NVML reports no UUID, which CUDA_VISIBLE_DEVICES needs": ({"errors": {"nvmlDeviceGetUUID": 999}}, "GPU-7,GPU-2", 2, None),
    "NVML reports no name": ({"errors": {"nvmlDeviceGetName": 999}}, "1,2", 2, None),
    "NVML reports no MIG mode": ({"errors": {"nvmlDeviceGetMigMode": 3}}, None, 3, None),
    "NVML reports no CUDA version": ({"errors": {"nvmlSystemGetCudaDriverVersion*": 999}}, None, 3, None),
    "an older NVML": ({"errors": {"nvmlSystemGetCudaDriverVersion_v2": 13}}, None, 3, None),
    "NVML not permitted, driver broken": (
        {"driver": "broken", "errors": {"nvmlInit*": 4}},
        None,
        0,
        "the CUDA driver failed: cuInit returned CUDA_ERROR_UNKNOWN (999); this user may not use the NVIDIA driver",
    ),
    "driver absent": (DRIVER_ABSENT, None, 0, "there is no CUDA driver: NVML is installed, but libcuda.so.1 is missing"),
    "both absent": (
        {**DRIVER_ABSENT, **NVML_ABSENT},
        None,
        0,
        "no NVIDIA driver is installed, or the container was started without it "
        "(NVML's nvmlInit returned NVML_ERROR_LIBRARY_NOT_FOUND, 12)",
    ),
    "driver absent, mismatch": (
        {**DRIVER_ABSENT, "nvml": "mismatch"},
        None,
        0,
        "the kernel's NVIDIA driver and its libraries differ, as after an upgrade; reboot or reload the driver "
        "(NVML's nvmlInit returned NVML_ERROR_LIB_RM_VERSION_MISMATCH, 18)",
    ),
    "driver old": ({"driver": "old"}, None, 0, "the NVIDIA driver is too old: it supports CUDA 11.4 and torch"),
    "driver old, NVML absent": (
        {"driver": "old", **NVML_ABSENT},
        None,
        0,
        "the NVIDIA driver is too old: it supports CUDA 11.4 and torch",
    ),
    "driver broken, NVML absent": (
        {"driver": "broken", **NVML_ABSENT},
        None,
        0,
        "the CUDA driver failed: cuInit returned CUDA_ERROR_UNKNOWN (999); ",
    ),
    "the child crashes": ({**NVML_ABSENT, "errors": {"cuDeviceGetCount": 999}}, None, 0, "cuDeviceGetCount returned"),
    "no GPU": ({"gpus": 0}, None, 0, "the NVIDIA driver finds no GPU"),
    "no GPU, NVML absent": ({"gpus": 0, **NVML_ABSENT}, None, 0, "the CUDA driver finds no device; "),
    "empty variable": (
        NONE,
        "",
        0,
        "CUDA_VISIBLE_DEVICES is set to an empty string, which hides every GPU; unset it or name devices",
    ),
    "hidden": (NONE, "7", 0, "CUDA_VISIBLE_DEVICES='7' hides every GPU: '7' is beyond the 3 GPUs of this machine, which ends"),
    "a text of several lines": (NONE, "\nx\n", 0, "CUDA_VISIBLE_DEVICES='\\nx\\n' hides every GPU"),
    "MIG without instances": ({"mig": 0}, None, 0, "MIG is on and has no instance on any GPU; create one"),
    "MIG without instances, named": ({"mig": 0}, "0", 0, "'0' is a GPU with MIG on and no instance, which ends the list"),
    "MIG": ({"mig": 2}, None, 1, None),
    "MIG, NVML absent": ({"mig": 2, **NVML_ABSENT}, None, 1, None),
    "MIG, NVML fails at the instance": ({"mig": 2, "errors": {"nvmlDeviceGetGpuInstanceId": 999}}, None, 1, None),
}


# Combinations of two failures, and other ways to the same result.
SLOW = (
    *("NVML absent, by UUID", "NVML absent, all hidden", "NVML without kernel driver", "NVML fails to count, some hidden"),
    *("NVML reports no CUDA version", "an older NVML", "driver absent, mismatch", "driver old, NVML absent"),
    *("driver broken, NVML absent", "no GPU, NVML absent", "a text of several lines", "MIG without instances, named"),
    "MIG, NVML absent",
)


@pytest.mark.parametrize("name", sample(FAILING, *(FAILING.keys() - {*SLOW})))
def test_discovery_results_on_failing_machines(name: str, tmp_path: Path) -> None:
    machine, visible, count, reason = FAILING[name]
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    log = tmp_path / "log"
    output = evaluate_simulated(REPORT, variables=variables, **{"gpus": 3, "log": log, **machine})
    assert output["count"] == count
    assert len(output["names"]) == count
    assert output["available"] is (count > 0)
    if reason is None:
        assert output["reason"] is None
    else:
        assert output["reason"].startswith(reason) or reason in output["reason"]
        assert "\n" not in output["reason"]
    if "driver is too old" in (reason or ""):
        assert BUILD
        assert f"torch {BUILD.version} is built for CUDA {BUILD.cuda}" in output["reason"]
    assert output["name"] == (output["names"][0] if count else "cpu")
    assert output["strict"] is (count > 0)
    assert output["fork safe"]
    assert not output["torch"]
    assert not output["loaded"]
    assert initializations(log, output["pid"]) == []


def test_strict_availability_detects_broken_driver(tmp_path: Path) -> None:
    log = tmp_path / "log"
    output = evaluate_simulated(REPORT, gpus=2, driver="broken", log=log)
    # NVML works. Only the strict query initializes the driver, in a child process, and notices the failure.
    assert (output["count"], output["available"], output["reason"]) == (2, True, None)
    assert output["strict"] is False
    assert output["strict reason"] == "the CUDA driver failed: cuInit returned CUDA_ERROR_UNKNOWN (999)"
    assert initializations(log, output["pid"]) == []


STRICT = """
    import accelerator as acc
    def children():
        return len({line.split()[0] for line in open(sys.argv[1]) if "cuInit" in line})
    first, reason = acc.is_available(), acc.unavailable_reason()
    results = [first, reason, acc.is_available(strict=True), acc.unavailable_reason(strict=True), acc.is_available()]
    results += [acc.unavailable_reason(), [device.index for device in acc.usable_devices()]]
    started = children()
    acc.is_available(strict=True), acc.is_available(strict=True)
    results.append(children() - started)
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    results += [acc.is_available(strict=True), acc.unavailable_reason(strict=True)]
    started = children()
    results += [acc.is_available(strict=True), in_child(lambda: acc.is_available(strict=True)), children() - started]
    print(json.dumps(results))
"""


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (2, "is busy: full, or another process uses it exclusively: {} returned CUDA_ERROR_OUT_OF_MEMORY (2)"),
        pytest.param(
            46,
            "is busy: full, or another process uses it exclusively: {} returned CUDA_ERROR_DEVICE_UNAVAILABLE (46)",
            marks=pytest.mark.slow,
        ),
        (214, "is broken: {} returned CUDA_ERROR_ECC_UNCORRECTABLE (214)"),
    ],
)
def test_strict_availability_detects_unusable_device(code: int, state: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    output = evaluate_simulated(
        STRICT, str(log), gpus=2, name=["One", "One"], errors={"cuDevicePrimaryCtxRetain@1": code}, log=log
    )
    reason = "cuda:1 (One) " + state.format("cuDevicePrimaryCtxRetain")
    # A broken device is checked again after a second, a busy one in every call. Forked children inherit the result "usable".
    children = 0 if code == 214 else 2
    assert output == [True, None, False, reason, True, None, [0], children, True, None, True, True, 0]


FROZEN = """
    import accelerator as acc
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    ctypes.CDLL("libcuda.so.1").cuInit(0)
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # too late for this process, but a child would read it
    print(json.dumps([acc.is_available(strict=True), acc.unavailable_reason(strict=True)]))
"""


@pytest.mark.parametrize(("broken", "available"), [(0, True), (1, False)])
def test_strict_availability_probes_only_visible_devices(broken: int, available: bool) -> None:
    errors = {f"cuDevicePrimaryCtxRetain@{broken}": 214}
    output, reason = evaluate_simulated(FROZEN, gpus=2, name=["Zero", "One"], errors=errors)
    assert output is available
    assert available or reason.startswith("cuda:0 (One) is broken: ")


# A binding that lists one GPU more than the driver. NVML may list devices that CUDA does not support.
ONE_MORE = """
import importlib.util, sys
here = sys.modules[__name__]
spec = importlib.util.spec_from_file_location("pynvml", {original!r})
spec.loader.exec_module(here)
_count, _handle, _uuid, _name = nvmlDeviceGetCount, nvmlDeviceGetHandleByIndex, nvmlDeviceGetUUID, nvmlDeviceGetName
nvmlDeviceGetCount = lambda: _count() + 1
nvmlDeviceGetHandleByIndex = lambda index: "more" if index == _count() else _handle(index)
nvmlDeviceGetUUID = lambda handle: "GPU-dddddddd-0000-4000-8000-000000000000" if handle == "more" else _uuid(handle)
nvmlDeviceGetName = lambda handle: "Simulated GPU" if handle == "more" else _name(handle)
_mig = nvmlDeviceGetMigMode
nvmlDeviceGetMigMode = lambda handle: [0, 0] if handle == "more" else _mig(handle)
"""


def test_device_unknown_to_the_driver_is_unusable(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text(ONE_MORE.format(original=str(original_pynvml())))
    environment = simulated_environment(gpus=2)
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), environment["PYTHONPATH"]))
    output = evaluate(
        """
        import accelerator as acc
        print(json.dumps([acc.device_count(), acc.is_available(strict=True), acc.unavailable_reason(strict=True)]))
        """,
        environment,
    )
    assert output == [
        3,
        False,
        "Simulated GPU (GPU-dddddddd-0000-4000-8000-000000000000) cannot be used: it is listed, but the driver does not know "
        "it",
    ]


SEQUENCES = """
    import random
    import accelerator as acc

    values = [None, "", "0", "1", "2,0", "0,1,2", "-1", "GPU-c,GPU-7", "3", "1,1", "x"]

    def outcome():
        return [plain(device.uuid) for device in acc.visible_devices()], acc.device_count()

    def sequence(seed):
        random.seed(seed)
        wrong = []
        library = ctypes.CDLL("libcuda.so.1")  # loading the driver changes nothing
        for _ in range(4):
            put({"CUDA_VISIBLE_DEVICES": random.choice(values)})
            expected = in_child(lambda: uuids(*started()))
            if outcome() != (expected, len(expected)):
                wrong.append(("before", seed, os.environ.get("CUDA_VISIBLE_DEVICES"), outcome(), expected))
        first = os.environ.get("CUDA_VISIBLE_DEVICES")
        if seed % 2:
            outcome()
        put({"CUDA_VISIBLE_DEVICES": random.choice(values)})
        expected = in_child(lambda: uuids(*started()))
        safe = acc.is_fork_safe()
        code = library.cuInit(0)
        if code:  # the driver was not initialized, so the environment still counts
            repeats = os.environ.get("CUDA_VISIBLE_DEVICES") == "1,1"
            return wrong if code == (101 if repeats else 100) else [*wrong, ("code", seed, code)]
        if not safe or acc.is_fork_safe():
            wrong.append(("safe", seed))
        for value in (first, *random.sample(values, 3)):
            put({"CUDA_VISIBLE_DEVICES": value})
            if outcome() != (expected, len(expected)):
                wrong.append(("after", seed, value, outcome(), expected))
        acc.refresh()
        if outcome() != (expected, len(expected)):
            wrong.append(("refreshed", seed, outcome(), expected))
        return wrong

    print(json.dumps([in_child(sequence, seed) for seed in range(int(sys.argv[1]))]))
"""


@pytest.mark.parametrize("count", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_results_follow_environment_until_driver_is_initialized(count: int) -> None:
    output = evaluate_simulated(SEQUENCES, str(count), gpus=3)
    assert [wrong for wrong in output if wrong] == []
    assert len(output) == count


COST = """
    import accelerator as acc
    count, listed, calls = acc.device_count(), len(acc.visible_devices()), []
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event.endswith("call") else None)
    acc.device_count()
    sys.setprofile(None)
    print(json.dumps([count, listed, len(calls), "torch" in sys.modules]))
"""


def test_repeated_count_costs_the_same_for_any_number_of_gpus() -> None:
    calls = set()
    for gpus in (0, 1, 100):
        count, listed, made, torch = evaluate_simulated(COST, gpus=gpus)
        assert (count, listed, torch) == (gpus, gpus, False)
        calls.add(made)
    assert len(calls) == 1
    assert calls.pop() < 20


OTHER_ENVIRONMENTS = """
    import accelerator as acc
    def seen(env):
        return [device.physical_index for device in acc.visible_devices(env)]
    environments = [{}, {"CUDA_VISIBLE_DEVICES": "2,0"}, {"CUDA_VISIBLE_DEVICES": "GPU-c"}, {"CUDA_VISIBLE_DEVICES": ""},
                    {"ACCELERATOR_BACKEND": "cpu"}, {"CUDA_VISIBLE_DEVICES": "1,x"}]
    first = [seen(env) for env in environments]
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    second = [seen(env) for env in environments], seen(None), acc.device_count()
    os.environ["ACCELERATOR_BACKEND"] = "cpu"
    third = [seen(env) for env in environments], seen(None), acc.device_count(), acc.unavailable_reason()
    del os.environ["ACCELERATOR_BACKEND"]
    ctypes.CDLL("libcuda.so.1").cuInit(0)
    fourth = [seen(env) for env in environments], seen(None), acc.device_count()
    print(json.dumps([first, second, third, fourth]))
"""


def test_visible_devices_of_a_given_environment() -> None:
    first, second, third, fourth = evaluate_simulated(OTHER_ENVIRONMENTS, gpus=3)
    assert first == [[0, 1, 2], [2, 0], [1], [], [], [1]]
    assert second == [first, [1], 1]
    assert third == [first, [], 0, "ACCELERATOR_BACKEND=cpu disables the accelerator; unset it"]
    assert fourth == [first, [1], 1]


MIXED = """
    import accelerator as acc
    of_driver = {order: driver(CUDA_DEVICE_ORDER=order) for order in (None, "PCI_BUS_ID", "FASTEST_FIRST")}
    ours = {}
    for order in of_driver:
        put({"CUDA_DEVICE_ORDER": order})
        ours[order] = [plain(device.uuid) for device in acc.visible_devices()]
    put({"CUDA_DEVICE_ORDER": None})

    def describe():
        return [
            (plain(d.uuid), d.name, d.total_memory, list(d.compute_capability), d.pci_bus_id, acc.get_device_name(d.index),
             acc.temperature(d.index) - 30, acc.utilization(f"cuda:{d.index}"), d.physical_index)
            for d in acc.visible_devices()
        ]

    before = describe()
    assert "torch" not in sys.modules or sys.argv[2] == "after torch"
    pid_events = open(sys.argv[1]).read()
    import torch
    torch.cuda.init()
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    theirs = [(str(p.uuid).replace("-", ""), p.name, p.total_memory, [p.major, p.minor]) for p in properties]
    after = describe()
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # too late: the driver is initialized
    acc.refresh()
    later = describe()
    print(json.dumps([list(of_driver.items()) == list(ours.items()), before, theirs, after, later, os.getpid(), pid_events]))
"""


@pytest.mark.parametrize(
    ("nvml", "order"),
    [
        ("present", "after torch"),
        pytest.param("present", "before torch", marks=pytest.mark.slow),
        pytest.param("absent", "before torch", marks=pytest.mark.slow),
    ],
)
def test_mixed_gpus_in_reversed_order(nvml: str, order: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    program = (
        MIXED
        if nvml == "present"
        else MIXED.replace('acc.temperature(d.index) - 30, acc.utilization(f"cuda:{d.index}"), ', "0, 0, ")
    )
    same, before, theirs, after, later, pid, events = evaluate_simulated(
        f"    import torch\n{program}" if order == "after torch" else program,
        str(log),
        order,
        gpus=3,
        name=["Slow", "Fast", "Faster"],
        speed=[1, 2, 3],
        memory=["4GiB", "8GiB", "16GiB"],
        capability=["8.0", "9.0", "10.0"],
        nvml=nvml,
        log=log,
    )
    assert same
    assert [row[:4] for row in before] == theirs
    assert [row[1] for row in before] == [row[5] for row in before] == ["Faster", "Fast", "Slow"]
    assert before == after == later
    if nvml == "present":
        # The telemetry of an index is that of the GPU to which torch gives the index.
        assert [row[6] for row in before] == [row[8] for row in before] == [2, 1, 0]
        assert [row[7] for row in before] == [7 * i + 13 for i in (2, 1, 0)]
    assert not [line for line in events.splitlines() if line.split()[0] == str(pid) and "nvml" not in line]


ENTRIES = """
    import torch
    import accelerator as acc

    devices = acc.visible_devices()
    functions = (acc.get_device_name, acc.device_name, acc.get_device_index, acc.total_memory, acc.compute_capability,
                 acc.numa_node, acc.temperature)
    same = [function(device) == function(device.index) for function in functions for device in devices]

    def outcome(call):
        try:
            return call()
        except Exception as error:
            return type(error).__name__

    largest = max(devices, key=acc.available_memory).index
    digits = [outcome(lambda: acc.device_name(text)) for text in ("1", "01", "+1", " 1", "1_0", chr(0x661))]
    runtime = [str(acc.device(devices[1])), acc.memory_allocated(devices[1])]
    wrong = outcome(lambda: acc.visible_devices({"CUDA_VISIBLE_DEVICES": 1}))
    print(json.dumps([same, largest, digits, runtime, wrong]))
"""


def test_device_arguments_accept_entries_of_visible_devices() -> None:
    same, largest, digits, runtime, wrong = evaluate_simulated(ENTRIES, gpus=2, memory=["4GiB", "8GiB"])
    assert all(same)
    assert largest == 1
    assert digits == ["cuda:1", *["RuntimeError"] * 5]
    assert runtime == ["cuda:1", 0]
    assert wrong == "TypeError"
