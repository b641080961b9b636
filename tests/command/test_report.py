"""``python -m accelerator``: text and JSON, on every kind of machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

import accelerator
from tests.support import plain_environment, simulated_environment
from tests.support.discovery import BUILD, on_simulated_gpus

KEYS = [
    "version",
    "python",
    "torch",
    "accelerator",
    "available",
    "unavailable_reason",
    "initialized",
    "fork_safe",
    "simulated",
    "driver",
    "environment",
    "devices",
]
DEVICE_KEYS = [
    "index",
    "name",
    "uuid",
    "pci_bus_id",
    "compute_capability",
    "total_memory",
    "memory_used",
    "utilization",
    "temperature",
    "power_draw",
    "clock_rate",
    "mig",
]


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "accelerator", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def text(environment: dict[str, str], *arguments: str) -> str:
    done = run(environment, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def facts(environment: dict[str, str]) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(text(environment, "--json"))
    return told


@on_simulated_gpus
def test_json() -> None:
    told = facts(simulated_environment({"CUDA_VISIBLE_DEVICES": "1,0,x"}, gpus=2, name=["Zero", "One"]))
    assert BUILD
    assert list(told) == KEYS
    assert [list(device) for device in told["devices"]] == [DEVICE_KEYS] * 2
    assert told["version"] == accelerator.__version__
    assert told["torch"] == {"version": BUILD.version, "cuda": BUILD.cuda, "hip": None}
    assert told["driver"] == {"version": "590.44.01", "cuda": "13.2"}
    assert [told[key] for key in KEYS[3:9]] == ["cuda", True, None, False, True, True]
    assert list(told["environment"]) == ["CUDA_VISIBLE_DEVICES"]
    assert told["environment"]["CUDA_VISIBLE_DEVICES"]["value"] == "1,0,x"
    # Unlike GPUs and no order set: a child was asked, so how each entry was read is not known here.
    assert told["environment"]["CUDA_VISIBLE_DEVICES"]["reading"] == "read by the driver, asked in a child process"
    first = told["devices"][0]
    assert first.pop("uuid").startswith("GPU-c9")
    assert first == {
        "index": 0,
        "name": "One",
        "pci_bus_id": "00000000:02:00.0",
        "compute_capability": [9, 0],
        "total_memory": 8 * 2**30,
        "memory_used": 0,
        "utilization": 20,
        "temperature": 31,
        "power_draw": 61000,
        "clock_rate": 1015,
        "mig": None,
    }


@on_simulated_gpus
@pytest.mark.parametrize(
    ("machine", "variables", "expected"),
    [
        (
            {"gpus": 3},
            {"CUDA_VISIBLE_DEVICES": "0,2,-1,1"},
            "CUDA_VISIBLE_DEVICES='0,2,-1,1': '0' is cuda:0, '2' is cuda:1, '-1' is negative, which ends the list, "
            "'1' is not looked at",
        ),
        (
            {"gpus": 2},
            {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-7,GPU-c"},
            "CUDA_VISIBLE_DEVICES='GPU-c,GPU-7,GPU-c': 'GPU-c' is not looked at, 'GPU-7' is not looked at, "
            "'GPU-c' repeats an earlier entry, which empties the whole list",
        ),
        (
            {"gpus": 2, "mig": 2},
            {"CUDA_VISIBLE_DEVICES": "1,0"},
            "CUDA_VISIBLE_DEVICES='1,0': '1' is cuda:0, '0' is left out, as a process sees a single MIG instance",
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
            "ACCELERATOR_BACKEND='cpu': the accelerator is left out of use",
        ),
        ({"gpus": 2}, {"ACCELERATOR_BACKEND": "x"}, "ACCELERATOR_BACKEND='x': ignored: only 'cpu' means something"),
        ({"driver": "old"}, {}, "not available: the NVIDIA driver is too old: it supports CUDA 11.4 and torch"),
        ({"gpus": 2, "nvml": "absent"}, {}, "available: 2 cuda devices"),
        ({"gpus": 1}, {}, "available: 1 cuda device\nnot initialized in this process; fork is safe"),
    ],
)
def test_how_things_were_read(machine: dict[str, Any], variables: dict[str, str], expected: str) -> None:
    assert expected in text(simulated_environment(variables, **machine))


@on_simulated_gpus
def test_table() -> None:
    lines = text(simulated_environment({"CUDA_VISIBLE_DEVICES": "1"}, gpus=2, mig=[None, 2])).splitlines()
    assert lines[-2].split() == ["index", "name", "memory", "PCI", "bus", "MIG"]
    assert lines[-1] == "0      Simulated GPU MIG 1g  0.0 of 1.0 GiB  00000000:02:00.0  1/0"
    lines = text(simulated_environment(gpus=2)).splitlines()
    assert re.split(r"  +", lines[-3]) == ["index", "name", "memory", "busy", "temp", "power", "clock", "PCI bus"]
    assert re.split(r"  +", lines[-1]) == [
        *("1", "Simulated GPU", "0.0 of 8.0 GiB", "20 %", "31 °C", "61 W", "1015 MHz", "00000000:02:00.0")
    ]
    assert lines[1] == "NVIDIA driver 590.44.01, up to CUDA 13.2 (simulated)"


@on_simulated_gpus
def test_processes_are_listed() -> None:
    program = """
import ctypes, os
import accelerator as acc
from accelerator._command import report
library, context, pointer = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
assert library.cuInit(0) == 0 and library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 1) == 0
assert library.cuCtxSetCurrent(context) == 0 and library.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(2**30)) == 0
text = report.render(report.collect(), report.processes())
print(text)
assert f"{os.getpid()} python" in text.splitlines()[-1] and "processes" in text
assert "fork is not safe" in text
"""
    done = subprocess.run([sys.executable, "-c", program], env=simulated_environment(gpus=2), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_any_accelerator() -> None:
    environment = plain_environment()
    told = facts(environment)
    if told["available"]:
        pytest.skip("there is a real accelerator")
    assert list(told) == KEYS
    assert told["devices"] == []
    assert told["simulated"] is False
    assert f"not available: {told['unavailable_reason']}" in text(environment, "report")


def test_watching(tmp_path: Any) -> None:
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


def test_a_reader_that_leaves() -> None:
    command = [sys.executable, "-m", "accelerator", "--watch", "0.05", "--json"]
    watching = subprocess.Popen(
        command, env=plain_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert watching.stdout
    assert watching.stderr
    assert watching.stdout.readline() == "{\n"
    watching.stdout.close()
    assert watching.wait(timeout=60) == 0
    assert watching.stderr.read() == ""
    watching.stderr.close()


@pytest.mark.parametrize("arguments", [["--watch", "0"], ["--watch", "nan"], ["--watch", "x"], ["--nonsense"], ["nonsense"]])
def test_wrong_usage(arguments: list[str]) -> None:
    done = run(dict(os.environ), *arguments)
    assert done.returncode == 2
    assert "usage:" in done.stderr


def test_help() -> None:
    told = text(dict(os.environ), "--help")
    assert "--watch" in told
    assert "simulate" in told
