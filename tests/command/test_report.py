"""``python -m accelerator``: text and JSON, on every kind of machine."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import accelerator
from accelerator import __main__
from accelerator._command import report, report_text, terminal
from tests.support import plain_environment, simulated_environment
from tests.support.discovery import BUILD, on_simulated_gpus

KEYS = """schema version python host time torch accelerator available unavailable_reason initialized fork_safe simulated driver
    nvml environment devices hidden""".split()
DEVICE_KEYS = """index physical_index name uuid pci_bus_id compute_capability total_memory memory_used utilization memory_usage
    temperature power_draw clock_rate power_limit memory_temperature fan_speed throttled ecc_errors recovery_action numa_node
    mig usable processes problem""".split()


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accelerator", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def text(environment: dict[str, str], *arguments: str) -> str:
    done = run(environment, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def facts(environment: dict[str, str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(text(environment, "--json"))
    return document


@on_simulated_gpus
def test_json() -> None:
    begin = int(time.time())
    machine: dict[str, Any] = {"name": ["Zero", "One", "Two"], "memory": ["8GiB", "16GiB", "4GiB"], "numa": [0, 3, 1]}
    machine["capability"] = ["9.0", "8.6", "10.0"]
    document = facts(simulated_environment({"CUDA_VISIBLE_DEVICES": "1,0,x"}, gpus=3, **machine))
    assert BUILD
    assert list(document) == KEYS
    assert [list(device) for device in document["devices"]] == [DEVICE_KEYS] * 2
    assert document["version"] == accelerator.__version__
    assert document["torch"] == {"version": BUILD.version, "cuda": BUILD.cuda, "hip": None}
    assert document["driver"] == {"version": "595.45.04", "cuda": "13.2"}
    assert document["schema"] == 1
    assert document["host"] == socket.gethostname()
    assert begin <= datetime.datetime.fromisoformat(document["time"]).timestamp() <= time.time()
    assert [document[key] for key in KEYS[6:12]] == ["cuda", True, None, False, True, True]
    assert document["nvml"] == {"available": True, "problem": None}
    assert list(document["environment"]) == ["CUDA_VISIBLE_DEVICES"]
    assert document["environment"]["CUDA_VISIBLE_DEVICES"]["value"] == "1,0,x"
    reading = "'1' is cuda:0, '0' is cuda:1, 'x' is not a number, which ends the list"
    assert document["environment"]["CUDA_VISIBLE_DEVICES"]["reading"] == reading
    assert document["python"] == platform.python_version()
    first, second = document["devices"]
    (hidden,) = document["hidden"]
    assert first.pop("uuid").startswith("GPU-c9")
    assert second.pop("uuid").startswith("GPU-79")
    assert hidden.pop("uuid").startswith("GPU-29")
    expected = {
        "index": 0,
        "physical_index": 1,
        "name": "One",
        "pci_bus_id": "00000000:02:00.0",
        "compute_capability": [8, 6],
        "total_memory": 16 * 2**30,
        "memory_used": 0,
        "utilization": 20,
        "memory_usage": 12,
        "temperature": 31,
        "memory_temperature": 41,
        "power_draw": 61000,
        "power_limit": 700000,
        "clock_rate": 1015,
        "fan_speed": 26,
        "throttled": False,
        "ecc_errors": 0,
        "recovery_action": "none",
        "numa_node": 3,
        "mig": None,
        "usable": None,
        "processes": [],
        "problem": None,
    }
    assert first == expected
    expected |= {"index": 1, "physical_index": 0, "name": "Zero", "pci_bus_id": "00000000:01:00.0", "numa_node": 0}
    expected |= {"compute_capability": [9, 0], "total_memory": 8 * 2**30, "utilization": 13, "memory_usage": 7}
    expected |= {"temperature": 30, "memory_temperature": 40, "power_draw": 60000, "clock_rate": 1000, "fan_speed": 25}
    assert second == expected
    assert hidden == {
        "physical_index": 2,
        "name": "Two",
        "pci_bus_id": "00000000:03:00.0",
        "total_memory": 4 * 2**30,
        "mig": None,
        "problem": None,
    }


@on_simulated_gpus
def test_hidden_devices() -> None:
    machine = simulated_environment({"CUDA_VISIBLE_DEVICES": "1"}, gpus=3)
    document = facts(machine)
    assert [device["physical_index"] for device in document["devices"]] == [1]
    assert [list(device) for device in document["hidden"]] == [
        ["physical_index", "name", "uuid", "pci_bus_id", "total_memory", "mig", "problem"]
    ] * 2
    assert [device["physical_index"] for device in document["hidden"]] == [0, 2]
    assert text(machine).splitlines()[-1] == "hidden by CUDA_VISIBLE_DEVICES: GPU 0 (Simulated GPU), GPU 2 (Simulated GPU)"
    printed = re.sub("\n +", " ", text(simulated_environment(gpus=2, mig=[None, 2])))
    *_, by_mig, others = printed.splitlines()
    assert by_mig == "in MIG instances: GPU 1 (Simulated GPU)"
    assert others.startswith(
        "hidden because a process sees only one MIG instance: GPU 0 (Simulated GPU), GPU 1 MIG 2/0 (Simulated GPU MIG"
    )


@on_simulated_gpus
def test_unread_variable_is_not_named_as_the_cause() -> None:
    out_of_use = simulated_environment({"CUDA_VISIBLE_DEVICES": "0", "ACCELERATOR_BACKEND": "cpu"}, gpus=1)
    assert text(out_of_use).splitlines()[-1] == "hidden from this torch: GPU 0 (Simulated GPU)"
    one_instance = simulated_environment({"HIP_VISIBLE_DEVICES": "0"}, gpus=2, mig=[2, None])
    printed = re.sub("\n +", " ", text(one_instance)).splitlines()
    assert printed[-1].startswith("hidden because a process sees only one MIG instance: GPU 0 MIG")


@on_simulated_gpus
def test_a_lost_gpu_is_named_with_its_problem(tmp_path: Path) -> None:
    machine = simulated_environment(gpus=2, state=tmp_path / "state", faults=["xid=79,gpu=1"])
    assert run(machine).stderr.startswith("NVRM: Xid (PCI:0000:02:00): 79, ")  # the kernel's log has it once
    document = facts(machine)
    assert [device["physical_index"] for device in document["devices"]] == [0]
    assert "GPU_IS_LOST" in document["hidden"][0]["problem"]
    assert text(machine).splitlines()[-1] == f"GPU 1 fails: {document['hidden'][0]['problem']}"


@on_simulated_gpus
def test_strict() -> None:
    machine = simulated_environment(gpus=3, errors={"cuDevicePrimaryCtxRetain*@1": 999})
    document = facts(machine)
    assert document["available"] is True
    document = json.loads(text(machine, "--json", "--strict"))
    assert [device["usable"] for device in document["devices"]] == [True, False, True]
    assert document["available"] is False
    assert "cuda:1" in document["unavailable_reason"]
    lines = text(machine, "--strict").splitlines()
    assert [line.split()[0] for line in lines if line.endswith("dead")] == ["1"]
    assert any(line.startswith("not available: cuda:1") for line in lines)


@on_simulated_gpus
@pytest.mark.parametrize(
    ("nvml", "name"),
    [
        ("broken", "NVML_ERROR_DRIVER_NOT_LOADED"),
        pytest.param("mismatch", "NVML_ERROR_LIB_RM_VERSION_MISMATCH", marks=pytest.mark.slow),
    ],
)
def test_an_nvml_failure_is_named(nvml: str, name: str) -> None:
    machine = simulated_environment(gpus=2, nvml=nvml)
    document = facts(machine)
    assert document["nvml"]["available"] is False
    assert name in document["nvml"]["problem"]
    assert document["available"] is True
    assert [device["memory_used"] for device in document["devices"]] == [None, None]
    report = text(machine)
    assert "NVML does not answer: " in report
    assert name in report
    assert "NVIDIA driver unknown, up to CUDA 13.2" in report
    assert "? of 8.0 GiB" in report


@on_simulated_gpus
def test_throttled_device_is_marked() -> None:
    machine = simulated_environment(gpus=2, clock_reasons=[0x40, 0x1])  # thermal slowdown; idle
    assert [device["throttled"] for device in facts(machine)["devices"]] == [True, False]
    assert [line.split()[0] for line in text(machine).splitlines() if line.endswith("slow")] == ["0"]


@on_simulated_gpus
def test_what_a_failing_device_needs_is_said(tmp_path: Path) -> None:
    faults = ["xid=63,gpu=1", "xid=64,gpu=2", "xid=92,gpu=3"]
    machine = simulated_environment(gpus=4, state=tmp_path / "state", faults=faults)
    document = json.loads(run(machine, "--json").stdout)  # its stderr has the log of the kernel
    actions = [(device["ecc_errors"], device["recovery_action"]) for device in document["devices"]]
    assert actions == [(0, "none"), (0, "drain and reset"), (0, "reset"), (0, "none")]
    assert [line.split()[0] for line in text(machine).splitlines() if line.endswith("to reset")] == ["1", "2"]


@on_simulated_gpus
def test_a_device_that_fails_is_named() -> None:
    machine = simulated_environment(gpus=2, errors={"nvmlDeviceGetTemperature*@1": 15, "nvmlDeviceGetClockInfo@0": 3})
    document = facts(machine)
    assert document["devices"][0]["problem"] is None  # "not supported" (3) is not a failure
    assert "NVML_ERROR_GPU_IS_LOST" in document["devices"][1]["problem"]
    assert "cuda:1: " in text(machine)


@on_simulated_gpus
@pytest.mark.parametrize(
    ("machine", "variables", "expected"),
    [
        (
            {"gpus": 3},
            {"CUDA_VISIBLE_DEVICES": "0,2,-1,1"},
            "CUDA_VISIBLE_DEVICES='0,2,-1,1': '0' is cuda:0, '2' is cuda:1, '-1' is negative, which ends the list, "
            "'1' is not read",
        ),
        (
            {"gpus": 2},
            {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-7,GPU-c"},
            "CUDA_VISIBLE_DEVICES='GPU-c,GPU-7,GPU-c': 'GPU-c' is not read, 'GPU-7' is not read, "
            "'GPU-c' repeats an earlier entry, which empties the whole list",
        ),
        (
            {"gpus": 2, "mig": 2},
            {"CUDA_VISIBLE_DEVICES": "1,0"},
            "CUDA_VISIBLE_DEVICES='1,0': '1' is cuda:0, '0' is left out, since a process sees a single MIG instance",
        ),
        ({"gpus": 2}, {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES='': no device"),
        (
            {"gpus": 2},
            {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "HIP_VISIBLE_DEVICES": "0"},
            "CUDA_DEVICE_ORDER='PCI_BUS_ID': devices in the order of their PCI bus\n"
            "HIP_VISIBLE_DEVICES='0': not read, as this torch has no use for it",
        ),
        ({"gpus": 2}, {"CUDA_DEVICE_ORDER": "pci"}, "CUDA_DEVICE_ORDER='pci': the fastest device first"),
        (
            {"gpus": 2},
            {"ACCELERATOR_BACKEND": "cpu"},
            "ACCELERATOR_BACKEND='cpu': the accelerator is not used",
        ),
        ({"gpus": 2}, {"ACCELERATOR_BACKEND": "x"}, "ACCELERATOR_BACKEND='x': ignored: only 'cpu' has an effect"),
        ({"driver": "old"}, {}, "not available: the NVIDIA driver is too old: it supports CUDA 11.4 and torch"),
        ({"gpus": 2, "nvml": "absent"}, {}, "available: 2 cuda devices"),
        ({"gpus": 1}, {}, "available: 1 cuda device (listed, not tried: --strict tries them)\n"),
    ],
)
def test_environment_variables_are_explained(machine: dict[str, Any], variables: dict[str, str], expected: str) -> None:
    # The report wraps lines at 80 columns.
    assert expected in re.sub("\n +", " ", text(simulated_environment(variables, **machine)))


@on_simulated_gpus
def test_tables() -> None:
    long_name = "Two of a name that is longer than the column for names is"
    machine = simulated_environment(gpus=2, name=["One", long_name], memory=["8GiB", "80GiB"])
    blocks = [block.splitlines() for block in text(machine).split("\n\n")]
    assert blocks[0][2] == "NVIDIA driver 595.45.04, up to CUDA 13.2 (simulated)"
    assert blocks[1][0].split() == ["GPU", "memory", "busy", "temp", "power", "clock"]
    assert re.split(r"  +", blocks[1][1].strip())[:5] == ["0", "░" * 12, "0.0 of 8.0 GiB", "13 %", "30 °C"]
    assert re.split(r"  +", blocks[1][2].strip())[:5] == ["1", "░" * 12, "0.0 of 80.0 GiB", "20 %", "31 °C"]
    # The numbers are aligned on the right.
    assert len({line.index("GiB") for line in blocks[1][1:]}) == 1
    assert blocks[2][0].split() == ["GPU", "name", "PCI", "bus", "CC", *(["NUMA"] if "NUMA" in blocks[2][0] else [])]
    assert blocks[2][1].split()[:2] == ["0", "One"]
    assert "Two of a name that …column for names is" in blocks[2][2]
    assert blocks[3][0].split() == ["GPU", "UUID"]
    assert [line.split()[0] for line in blocks[3][1:]] == ["0", "1"]
    lines = text(simulated_environment({"CUDA_VISIBLE_DEVICES": "1"}, gpus=2, mig=[None, 2])).splitlines()
    assert any(re.fullmatch(r"  0  ░{12}  0.0 of 1.0 GiB", line) for line in lines)
    assert any(re.match(r"  0  Simulated GPU MIG 1g  00000000:02:00.0  9.0 .* 1/0$", line) for line in lines), lines
    assert any(re.match(r"  0  MIG-", line) for line in lines)


def report_of(*, brief: bool = True, **figures: Any) -> list[str]:
    """Return the colored blocks of the report about a device with these figures."""
    device = {
        **dict.fromkeys(DEVICE_KEYS),
        "index": 0,
        "name": "X",
        "memory_used": 0,
        "total_memory": 100 * 2**30,
        "temperature": 30,
        **figures,
    }
    facts = {
        **dict.fromkeys(KEYS),
        "time": "",
        "environment": {},
        "devices": [device],
        "hidden": [],
        "nvml": {"problem": None},
        "driver": {"version": None, "cuda": None},
        "available": True,
        "accelerator": "cuda",
    }
    return report_text.format_report(facts, color=True, brief=brief).split("\n\n")


def activity(**figures: Any) -> list[str]:
    """Return the colored lines of the table about a device's activity."""
    return report_of(**figures)[1].splitlines()


@pytest.mark.parametrize(
    ("figures", "filled", "color"),
    [
        ({}, 0, None),
        ({"memory_used": 1}, 1, None),
        ({"memory_used": 50 * 2**30}, 6, None),
        ({"memory_used": 75 * 2**30}, 9, "33"),
        ({"memory_used": 95 * 2**30}, 11, "31"),
        ({"memory_used": 100 * 2**30 - 1}, 11, "31"),
        ({"memory_used": 100 * 2**30}, 12, "31"),
    ],
)
def test_memory_bar(figures: dict[str, Any], filled: int, color: str | None) -> None:
    line = activity(**figures)[1]
    bar = "█" * filled + "░" * (12 - filled)
    assert (f"\033[{color}m{bar}\033[0m" if color else f"  0  {bar}  ") in line


@pytest.mark.parametrize(("temperature", "color"), [(74, None), (75, "33"), (84, "33"), (85, "31"), (99, "31")])
def test_hot_devices_have_a_color(temperature: int, color: str | None) -> None:
    line = activity(temperature=temperature)[1]
    assert (f"\033[{color}m{temperature} °C\033[0m" if color else f"  {temperature} °C") in line


def test_an_unknown_figure_draws_no_bar() -> None:
    heading, line = activity(memory_used=None)
    assert heading == "\033[1mGPU          memory   temp\033[0m"
    assert line == "  0  ? of 100.0 GiB  30 °C"


def test_mig_instances_of_a_gpu_are_grouped() -> None:
    devices = [
        {"physical_index": 0, "name": "A", "mig": (1, 0)},
        {"physical_index": 0, "name": "A", "mig": (2, 0)},
        {"physical_index": 0, "name": "B", "mig": (3, 0)},
        {"physical_index": 1, "name": "B", "mig": None},
    ]
    assert report_text._physical_names(devices) == "GPU 0 MIG 1/0, 2/0 (A), GPU 0 MIG 3/0 (B), GPU 1 (B)"


@on_simulated_gpus
def test_id_selects_devices() -> None:
    machine = simulated_environment(gpus=3)
    everything = facts(machine)["devices"]
    by_uuid = everything[0]["uuid"]
    document = json.loads(text(machine, "--json", "--id", f"2,{by_uuid},2"))
    assert [device["index"] for device in document["devices"]] == [2, 0]
    assert "available: 1 cuda device selected" in text(machine, "--id", "1")
    hiding = {**machine, "CUDA_VISIBLE_DEVICES": "1,2"}
    [device] = json.loads(text(hiding, "--json", "--id", "0"))["devices"]
    assert (device["index"], device["physical_index"]) == (0, 1)
    for wrong in ("3", "-1", "", "GPU-x"):
        done = run(machine, "--id", wrong)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (
            f"python -m accelerator: --id {wrong!r} is no visible device; there are 3, counted from 0 (--help explains)\n"
        )


@on_simulated_gpus
def test_the_headline_says_whether_devices_were_tried() -> None:
    broken = simulated_environment(gpus=2, driver="broken")
    assert "available: 2 cuda devices (listed, not tried: --strict tries them)" in text(broken)
    assert "\nnot available: " in text(broken, "--strict")
    tried = text(simulated_environment(gpus=2), "--strict", "--color", "always")
    assert "\033[32mavailable: 2 cuda devices, each tried in a child process\033[0m" in tried


@pytest.mark.parametrize(
    ("arguments", "variables", "has_color"),
    [
        ([], {}, False),  # stdout is a pipe
        pytest.param([], {"FORCE_COLOR": "1"}, True, marks=pytest.mark.slow),
        ([], {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        (["--color", "always"], {"NO_COLOR": "1"}, True),
        pytest.param(["--color", "never"], {"FORCE_COLOR": "1"}, False, marks=pytest.mark.slow),
    ],
)
def test_color_option_and_variables(arguments: list[str], variables: dict[str, str], has_color: bool) -> None:
    assert ("\033[1m" in text(plain_environment(**variables), *arguments)) == has_color


@on_simulated_gpus
@pytest.mark.parametrize(
    "machine",
    [
        {"gpus": 8, "memory": "180GiB", "name": "NVIDIA GB200 NVL72 Superchip Very Long"},
        *(
            pytest.param(machine, marks=pytest.mark.slow)
            for machine in (
                {"gpus": 2, "mig": [7, None]},
                {"gpus": 2, "driver": "broken"},
                {"gpus": 2, "nvml": "mismatch"},
                {"gpus": 0},
            )
        ),
        {"gpus": 2, "driver": "absent", "nvml": "broken"},
    ],
)
def test_text_fits_the_columns(machine: dict[str, Any]) -> None:
    for columns, arguments in ((80, []), (60, ["--strict"])):
        variables = {"CUDA_VISIBLE_DEVICES": "0," * 40 + "7", "COLUMNS": str(columns)}
        lines = text(simulated_environment(variables, **machine), *arguments).splitlines()
        assert max(map(len, lines)) <= columns
        assert len([line for line in lines if line.startswith("GPU  ")]) <= 3  # no table is in two parts
        assert not any("\033" in line for line in lines)


FACTS: dict[str, Any] = {
    **dict.fromkeys(KEYS),
    "version": "1.2",
    "python": "3.11.7",
    "host": "here",
    "time": "2026-01-02T03:04:05.678+01:00",
    "torch": {"version": "2.14.0", "cuda": "13.0", "hip": None},
    "accelerator": "cuda",
    "available": True,
    "driver": {"version": "580.1", "cuda": "13.2"},
    "nvml": {"available": False, "problem": "no answer"},
    "environment": {
        "CUDA_DEVICE_ORDER": {"value": "x", "reading": "the fastest device first"},
        "ROCR_VISIBLE_DEVICES": {"value": "1", "reading": report.UNREAD},
        "CUDA_VISIBLE_DEVICES": {"value": "3,1", "reading": "read"},
    },
    "devices": [
        {
            **dict.fromkeys(DEVICE_KEYS),
            "index": 0,
            "physical_index": 3,
            "name": "First",
            "uuid": "GPU-3",
            "pci_bus_id": "00000000:04:00.0",
            "compute_capability": [10, 3],
            "total_memory": 100 * 2**30,
            "memory_used": 95 * 2**30,
            "utilization": 5,
            "memory_usage": 6,
            "temperature": 75,
            "power_draw": 61999,
            "power_limit": 700000,
            "clock_rate": 1980,
            "memory_temperature": 90,
            "throttled": True,
            "recovery_action": "drain and reset",
            "numa_node": 0,
            "processes": [
                {"pid": 12, "name": "/usr/bin/python3 -m x", "user": None, "memory_used": None},
                {"pid": 4321, "name": None, "user": "a-user-with-a-long-name", "memory_used": 3 * 2**29},
            ],
            "problem": "half of it is gone",
        },
        {
            **dict.fromkeys(DEVICE_KEYS),
            "index": 1,
            "physical_index": 1,
            "name": "Second MIG 1g",
            "compute_capability": [9, 0],
            "total_memory": 8 * 2**30,
            "memory_used": 2**30,
            "temperature": 99,
            "power_draw": 59500,
            "recovery_action": "reboot",
            "mig": [2, 0],
            "usable": False,
            "processes": [{"pid": 7, "name": "/opt/trainer", "user": "me", "memory_used": 2**30}],
        },
    ],
    "hidden": [
        {"physical_index": 0, "name": "Zero", "mig": None, "problem": None},
        {"physical_index": 1, "name": "Second", "mig": None, "problem": None},
        {"physical_index": 1, "name": "Second MIG 1g", "mig": [1, 0], "problem": None},
        {"physical_index": 2, "name": None, "mig": None, "problem": "it is lost"},
    ],
}
HEADING = """\
accelerator 1.2 on here, 2026-01-02 03:04:05
Python 3.11.7, torch 2.14.0 built for CUDA 13.0
NVIDIA driver 580.1, up to CUDA 13.2
available: 2 cuda devices, each tried in a child process
CUDA_DEVICE_ORDER='x': the fastest device first
ROCR_VISIBLE_DEVICES='1': not read, as this torch has no use for it
CUDA_VISIBLE_DEVICES='3,1': read
NVML does not answer: no answer
cuda:0: half of it is gone
"""
ACTIVITY = """
GPU  memory                      busy   temp     power     clock
  0  ██████░  95.0 of 100.0 GiB   5 %  75 °C  61/700 W  1980 MHz  slow to reset
  1  █░░░░░░     1.0 of 8.0 GiB        99 °C      59 W            dead to reboot
"""
IDENTITY = """
GPU  name                    PCI bus    CC  NUMA  MIG
  0  First          00000000:04:00.0  10.3     0
  1  Second MIG 1g                     9.0        2/0

GPU  UUID
  0  GPU-3
"""
USERS = """
GPU   PID  user           memory  process
  0    12                         python3
  0  4321  a-user…-name  1.5 GiB
  1     7  me            1.0 GiB  trainer

in MIG instances: GPU 1 (Second)
hidden by CUDA_VISIBLE_DEVICES: GPU 0 (Zero), GPU 1 MIG 1/0 (Second MIG 1g)
GPU 2 fails: it is lost
"""
STYLES = {
    "1": [line for line in (HEADING + ACTIVITY + IDENTITY + USERS).splitlines() if line.startswith(("accelerator", "GPU  "))],
    "2": ["in MIG instances: GPU 1 (Second)", "hidden by CUDA_VISIBLE_DEVICES: GPU 0 (Zero), GPU 1 MIG 1/0 (Second MIG 1g)"],
    "31": [
        *("NVML does not answer: no answer", "cuda:0: half of it is gone", "GPU 2 fails: it is lost"),
        *("██████░", "95.0 of 100.0 GiB", "slow to reset", "99 °C", "dead to reboot"),
    ],
    "32": ["available: 2 cuda devices, each tried in a child process"],
    "33": ["75 °C"],
}


def test_text_word_by_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    expected = HEADING + ACTIVITY + IDENTITY + USERS
    assert report_text.format_report(FACTS) == expected
    selected = HEADING.replace("devices,", "devices selected,")
    assert report_text.format_report(FACTS, brief=True, selected=True) == selected + ACTIVITY + USERS
    for style, texts in STYLES.items():
        for text in texts:
            assert expected.count(text) == 1
            expected = expected.replace(text, f"\033[{style}m{text}\033[0m")
    assert report_text.format_report(FACTS, color=True) == expected


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"torch": None, "accelerator": None}, "Python 3.11.7, no torch"),
        ({"torch": {"version": "2.9", "cuda": None, "hip": "6.4"}}, "Python 3.11.7, torch 2.9 built for ROCm 6.4"),
        (
            {"torch": {"version": "2.9", "cuda": None, "hip": None}, "accelerator": "xpu"},
            "Python 3.11.7, torch 2.9 built for xpu",
        ),
        (
            {"torch": {"version": "2.9", "cuda": None, "hip": None}, "accelerator": None},
            "Python 3.11.7, torch 2.9 built for the CPU",
        ),
        ({"driver": {"version": None, "cuda": "13.2"}}, "NVIDIA driver unknown, up to CUDA 13.2"),
        (
            {"driver": {"version": "580.1", "cuda": None}, "simulated": True},
            "NVIDIA driver 580.1, up to CUDA unknown (simulated)",
        ),
        ({"driver": {"version": None, "cuda": None}, "simulated": True}, "simulated GPUs, driver version unknown"),
        ({"devices": [FACTS["devices"][0]]}, "available: 1 cuda device (listed, not tried: --strict tries them)"),
        ({"devices": [FACTS["devices"][0]], "initialized": True}, "available: 1 cuda device"),
        ({"available": False, "unavailable_reason": "why"}, "not available: why"),
    ],
)
def test_lines_of_the_heading(changed: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    heading = report_text.format_report({**FACTS, **changed}).split("\n\n")[0].splitlines()
    assert expected in heading
    concerns_nvml = (changed.get("torch", FACTS["torch"]) or {"cuda": None})["cuda"] is not None
    assert ("NVML does not answer: no answer" in heading) == concerns_nvml
    assert len(heading) == len(HEADING.splitlines()) - (not concerns_nvml)


def test_nvmls_problem_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lost = {**FACTS, "devices": [], "available": False, "unavailable_reason": "NVML says: no answer"}
    text = report_text.format_report(lost)
    assert "not available: NVML says: no answer\n" in text
    assert text.count("no answer") == 1
    assert "hidden by CUDA_VISIBLE_DEVICES: " in text
    assert "\nGPU  " not in text
    without_variable = {**lost, "environment": {}}
    assert "\nhidden from this torch: " in report_text.format_report(without_variable)


@pytest.mark.parametrize(
    ("arguments", "waits", "options"),
    [
        (["--watch"], 2.0, {"strict": False, "ids": None}),
        (["report", "--watch", ".5", "--strict", "--id", "1"], 0.5, {"strict": True, "ids": "1"}),
        (["--watch", "3", "--json"], 3.0, {"strict": False, "ids": None}),
    ],
)
def test_what_watch_repeats(
    arguments: list[str],
    waits: float,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    waited: list[float] = []
    collected: list[dict[str, Any]] = []
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(report, "collect", lambda **given: collected.append(given) or FACTS)
    monkeypatch.setattr(terminal, "is_quit_pressed", lambda seconds: waited.append(seconds) or len(waited) == 2)
    assert __main__.main(arguments) == 0
    assert (waited, collected) == ([waits] * 2, [options] * 2)
    printed = capsys.readouterr().out
    if "--json" in arguments:
        assert [json.loads(line) for line in printed.splitlines()] == [json.loads(json.dumps(FACTS))] * 2
    else:
        heading = HEADING.replace("devices,", "devices selected,") if "--id" in arguments else HEADING
        assert printed == f"{heading}{ACTIVITY}{USERS}\n" * 2


@pytest.mark.parametrize(
    ("count", "shown"), [(1, "1"), (4, "1 2 3 4"), (5, "1 2 3 ... 2 more lines"), (9, "1 2 3 ... 6 more lines")]
)
def test_a_redrawn_text_leaves_the_last_line_to_the_cursor(
    count: int, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LINES", "5")
    monkeypatch.setenv("COLUMNS", "80")
    assert terminal.redraw("".join(f"{number}\n" for number in range(1, count + 1)))
    lines = re.sub(r"(?<=\d) (?=[\d.])", "\n", shown).splitlines()
    assert capsys.readouterr().out == "\033[H" + "".join(f"{line}\033[K\n" for line in lines) + "\033[J"


@pytest.mark.skipif(sys.platform == "win32", reason="no such terminals there")
def test_keys_that_end_a_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    import pty
    import termios

    ours, its = pty.openpty()
    with open(its, closefd=False) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        before = termios.tcgetattr(its)
        with terminal.single_keys():
            assert not terminal.is_quit_pressed(0)
            for keys in (b"q", b"xyQ"):
                os.write(ours, keys)
                assert terminal.is_quit_pressed(60)
            os.write(ours, b"x")
            assert not terminal.is_quit_pressed(0.05)
        assert termios.tcgetattr(its) == before
    os.close(ours)
    os.close(its)


@pytest.mark.parametrize(
    ("columns", "width", "tables"),
    [(1, 60, 5), (60, 60, 5), (61, 61, 5), (66, 66, 5), (71, 71, 5), (72, 72, 4), (80, 80, 4), (81, 80, 4), (300, 80, 4)],
)
def test_widest_figures_fit_the_columns(columns: int, width: int, tables: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    process = {
        "pid": 4194304,
        "name": "/usr/bin/a-program-with-a-long-name-of-its-own",
        "user": "someone",
        "memory_used": 1 << 37,
    }
    figures = {
        "name": "NVIDIA GB200 NVL72 Superchip Very Long",
        "uuid": "MIG-c956971c-de35-4897-ad8f-01dbe4140b1d",
        "pci_bus_id": "00010000:01:00.0",
        "compute_capability": [10, 0],
        "numa_node": 12,
        "mig": [12, 0],
        "memory_used": 128 << 30,
        "total_memory": 180 << 30,
        "utilization": 100,
        "temperature": 104,
        "power_draw": 1_150_000,
        "power_limit": 1_200_000,
        "clock_rate": 1965,
        "throttled": True,
        "usable": False,
        "processes": [process],
    }
    blocks = report_of(**figures, index=127, brief=False)
    lines = [re.sub(r"\033\[\d*m", "", line) for block in blocks for line in block.splitlines()]
    assert max(map(len, lines)) <= width
    printed = "\n".join(lines)
    shown = [
        "128.0 of 180.0 GiB",
        "100 %",
        "104 °C",
        "1150/1200 W",
        "1965 MHz",
        "slow dead",
        figures["uuid"],
        "00010000:01:00.0",
    ]
    shown += ["10.0", "12/0", "4194304", "someone", "128.0 GiB", "NVIDIA GB", "a-program"]
    assert [text for text in shown if text not in printed] == []
    assert [block.splitlines()[1][:3] for block in blocks[1:]] == ["127"] * tables
    assert all(block.startswith("\033[1mGPU") for block in blocks[1:])


@on_simulated_gpus
def test_processes_are_listed() -> None:
    program = """
import ctypes, getpass, os, re
from accelerator import __main__
from accelerator._command import report, report_text, terminal
library, context, pointer = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
assert library.cuInit(0) == 0 and library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 1) == 0
assert library.cuCtxSetCurrent(context) == 0 and library.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(2**30)) == 0
facts = report.collect()
(entry,) = facts["devices"][1]["processes"]
assert entry["pid"] == os.getpid() and entry["user"] == getpass.getuser() and entry["memory_used"] >= 2**30, entry
assert facts["devices"][0]["processes"] == []
assert facts["fork_safe"] is False
assert facts["environment"]["CUDA_VISIBLE_DEVICES"]["reading"].startswith("no longer followed"), facts["environment"]
block = report_text.format_report(facts).split("\\n\\n")[4].splitlines()
assert block[0].split() == ["GPU", "PID", "user", "memory", "process"], block
assert re.fullmatch(rf"  1  +{os.getpid()}  {getpass.getuser()} +1.[0-9] GiB  python.*", block[1]), block
"""
    environment = simulated_environment({"CUDA_VISIBLE_DEVICES": "0,1"}, gpus=2)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root starts processes of other users")
def test_unknown_user_is_shown_by_number() -> None:
    child = subprocess.Popen(["sleep", "60"], user=54321)
    try:
        assert report._user(child.pid) == "54321"
    finally:
        child.kill()
        child.wait()
    assert report._user(child.pid) is None  # the process has ended


def test_without_any_accelerator() -> None:
    environment = plain_environment()
    document = facts(environment)
    if document["available"]:
        pytest.skip("there is a real accelerator")
    assert list(document) == KEYS
    assert document["devices"] == []
    assert document["simulated"] is False
    printed = re.sub("\n +", " ", text(environment, "report"))
    assert f"not available: {document['unavailable_reason']}" in printed


@on_simulated_gpus
def test_dumb_terminal_gets_plain_ascii() -> None:
    import pty

    for arguments in ([], ["--watch", "0.05"]):
        ours, its = pty.openpty()
        command = [sys.executable, "-m", "accelerator", *arguments]
        environment = simulated_environment({"TERM": "dumb"}, gpus=1, name="x" * 60)
        started = subprocess.Popen(command, env=environment, stdin=its, stdout=its, stderr=its)
        os.close(its)
        output = b""
        with contextlib.suppress(OSError):  # reading raises when the terminal is closed
            while part := os.read(ours, 4096):
                output += part
                if output.count(b"available") >= 3:
                    os.write(ours, b"q")
        os.close(ours)
        assert started.wait(timeout=60) == 0
        printed = output.decode("ascii")  # raises if it is not
        assert "\033" not in printed
        assert "............" in printed
        assert "x" * 19 + "~" + "x" * 19 in printed or arguments


def test_watch_runs_until_interrupted(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "accelerator", "--watch", "0.05"]
    with open(tmp_path / "output", "w") as output:
        watching = subprocess.Popen(command, env=plain_environment(), stdout=output, stderr=subprocess.PIPE, text=True)
    begin = time.monotonic()
    while (tmp_path / "output").read_text().count("accelerator ") < 3:
        assert watching.poll() is None
        assert time.monotonic() < begin + 60
        time.sleep(0.02)
    watching.send_signal(signal.SIGINT)
    assert watching.communicate(timeout=30)[1] == ""
    assert watching.returncode == 0
    assert "\033" not in (tmp_path / "output").read_text()


@pytest.mark.skipif(sys.platform == "win32", reason="no such terminals there")
@pytest.mark.parametrize(
    ("key", "variables"), [(b"\x03", {}), (b"q", {}), (b"q", {"NO_COLOR": "1"})], ids=["control-c", "q", "no-color"]
)
def test_watch_on_a_terminal(key: bytes, variables: dict[str, str]) -> None:
    import fcntl
    import pty
    import struct
    import termios

    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 3, 80, 0, 0))
        command = [sys.executable, "-m", "accelerator", "--watch", "0.05"]
        size = dict.fromkeys(("LINES", "COLUMNS"), "0")  # ignore a size that the test runner may have set
        os.execve(sys.executable, command, {**plain_environment(**variables), **size, "TERM": "xterm"})
    output = b""
    deadline = time.monotonic() + 60
    pressed = False
    with contextlib.suppress(OSError):  # reading raises when the terminal is closed
        while select.select([terminal], [], [], max(deadline - time.monotonic(), 0))[0] and (part := os.read(terminal, 4096)):
            output += part
            if not pressed and output.count(b"\033[H") >= 3:
                os.write(terminal, b"x" + key)  # other keys, such as x, have no effect
                pressed = True
    if time.monotonic() >= deadline:
        os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)
    screens = output.decode().split("\033[H")[1:-1]
    assert len(screens) >= 2
    for screen in screens:
        assert screen.count("\r\n") == 2  # the terminal has three lines, and the cursor is on the last one
        assert re.search(r"\.\.\. \d+ more lines", screen)
        assert screen.endswith("\033[J")
        assert screen.count("\033[K") == 2
        assert ("\033[1m" in screen) == ("NO_COLOR" not in variables)


@pytest.mark.skipif(sys.platform == "win32", reason="no such terminals there")
def test_watch_json_on_a_terminal_writes_lines() -> None:
    import pty

    ours, its = pty.openpty()
    command = [sys.executable, "-m", "accelerator", "--watch", "0.05", "--json"]
    started = subprocess.Popen(command, env=plain_environment(TERM="xterm"), stdin=its, stdout=its, stderr=its)
    os.close(its)
    output = b""
    pressed = False
    with contextlib.suppress(OSError):  # reading raises when the terminal is closed
        while part := os.read(ours, 4096):
            output += part
            if not pressed and output.count(b"\n") >= 2:
                os.write(ours, b"q")
                pressed = True
    os.close(ours)
    assert started.wait(timeout=60) == 0
    documents = [json.loads(line) for line in output.decode().splitlines() if line != "q"]
    assert len(documents) >= 2
    assert [list(document) for document in documents] == [KEYS] * len(documents)


def test_watch_json_writes_one_document_per_line() -> None:
    command = [sys.executable, "-m", "accelerator", "--watch", "0.05", "--json"]
    watching = subprocess.Popen(
        command, env=plain_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert watching.stdout
    assert watching.stderr
    documents = [json.loads(watching.stdout.readline()) for _ in range(3)]
    assert [list(document) for document in documents] == [KEYS] * 3
    times = [datetime.datetime.fromisoformat(document["time"]).timestamp() for document in documents]
    assert len(set(times)) == 3, "times have a fraction of a second"
    watching.stdout.close()
    assert watching.wait(timeout=60) == 0
    assert watching.stderr.read() == ""
    watching.stderr.close()
