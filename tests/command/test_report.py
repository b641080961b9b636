"""``python -m accelerator``: text and JSON, on every kind of machine."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
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
from accelerator._command import report
from tests.support import plain_environment, simulated_environment
from tests.support.discovery import BUILD, on_simulated_gpus

KEYS = """schema version python host time torch accelerator available unavailable_reason initialized fork_safe simulated driver
    nvml environment devices hidden""".split()
DEVICE_KEYS = """index physical_index name uuid pci_bus_id compute_capability total_memory memory_used utilization memory_usage
    temperature memory_temperature power_draw power_limit fan_speed clock_rate throttled numa_node mig usable processes
    problem""".split()


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
    assert told["schema"] == 1
    assert told["host"] == socket.gethostname()
    assert abs(datetime.datetime.fromisoformat(told["time"]).timestamp() - time.time()) < 120
    assert [told[key] for key in KEYS[6:12]] == ["cuda", True, None, False, True, True]
    assert told["nvml"] == {"available": True, "problem": None}
    assert list(told["environment"]) == ["CUDA_VISIBLE_DEVICES"]
    assert told["environment"]["CUDA_VISIBLE_DEVICES"]["value"] == "1,0,x"
    reading = "'1' is cuda:0, '0' is cuda:1, 'x' is not a number, which ends the list"
    assert told["environment"]["CUDA_VISIBLE_DEVICES"]["reading"] == reading
    first = told["devices"][0]
    assert first.pop("uuid").startswith("GPU-c9")
    known = {
        "index": 0,
        "physical_index": 1,
        "name": "One",
        "pci_bus_id": "00000000:02:00.0",
        "compute_capability": [9, 0],
        "total_memory": 8 * 2**30,
        "memory_used": 0,
        "utilization": 20,
        "memory_usage": 12,
        "temperature": 31,
        "power_draw": 61000,
        "power_limit": 700000,
        "clock_rate": 1015,
        "throttled": False,
        "numa_node": 0,
        "mig": None,
        "usable": None,
        "processes": [],
        "problem": None,
    }
    assert {key: first[key] for key in known} == known
    assert told["hidden"] == []


@on_simulated_gpus
def test_what_is_hidden() -> None:
    machine = simulated_environment({"CUDA_VISIBLE_DEVICES": "1"}, gpus=3)
    told = facts(machine)
    assert [device["physical_index"] for device in told["devices"]] == [1]
    assert [list(device) for device in told["hidden"]] == [
        ["physical_index", "name", "uuid", "pci_bus_id", "total_memory", "mig"]
    ] * 2
    assert [device["physical_index"] for device in told["hidden"]] == [0, 2]
    assert text(machine).splitlines()[-1] == "hidden by CUDA_VISIBLE_DEVICES: GPU 0 (Simulated GPU), GPU 2 (Simulated GPU)"
    said = re.sub("\n +", " ", text(simulated_environment(gpus=2, mig=[None, 2])))
    *_, by_mig, others = said.splitlines()
    assert by_mig == "in MIG instances: GPU 1 (Simulated GPU)"
    assert others.startswith(
        "hidden as a process sees one MIG instance: GPU 0 (Simulated GPU), GPU 1 MIG 2/0 (Simulated GPU MIG"
    )


@on_simulated_gpus
def test_a_variable_that_is_not_read_hides_nothing() -> None:
    out_of_use = simulated_environment({"CUDA_VISIBLE_DEVICES": "0", "ACCELERATOR_BACKEND": "cpu"}, gpus=1)
    assert text(out_of_use).splitlines()[-1] == "hidden from this torch: GPU 0 (Simulated GPU)"
    one_instance = simulated_environment({"HIP_VISIBLE_DEVICES": "0"}, gpus=2, mig=[2, None])
    said = re.sub("\n +", " ", text(one_instance)).splitlines()
    assert said[-1].startswith("hidden as a process sees one MIG instance: GPU 0 MIG")


@on_simulated_gpus
def test_strict() -> None:
    machine = simulated_environment(gpus=3, errors={"cuDevicePrimaryCtxRetain*@1": 999})
    told = facts(machine)
    assert told["available"] is True
    told = json.loads(text(machine, "--json", "--strict"))
    assert [device["usable"] for device in told["devices"]] == [True, False, True]
    assert told["available"] is False
    assert "cuda:1" in told["unavailable_reason"]
    lines = text(machine, "--strict").splitlines()
    assert [line.split()[0] for line in lines if line.endswith("dead")] == ["1"]
    assert any(line.startswith("not available: cuda:1") for line in lines)


@on_simulated_gpus
@pytest.mark.parametrize(
    ("nvml", "name"), [("broken", "NVML_ERROR_DRIVER_NOT_LOADED"), ("mismatch", "NVML_ERROR_LIB_RM_VERSION_MISMATCH")]
)
def test_what_failed_is_named(nvml: str, name: str) -> None:
    machine = simulated_environment(gpus=2, nvml=nvml)
    told = facts(machine)
    assert told["nvml"]["available"] is False
    assert name in told["nvml"]["problem"]
    assert told["available"] is True
    assert [device["memory_used"] for device in told["devices"]] == [None, None]
    report = text(machine)
    assert "NVML does not answer: " in report
    assert name in report
    assert "(simulated)" in report
    assert "? of 8.0 GiB" in report


@on_simulated_gpus
def test_a_device_that_is_slowed_down() -> None:
    machine = simulated_environment(gpus=2, clock_reasons=[0x40, 0x1])  # by heat, and by having nothing to do
    assert [device["throttled"] for device in facts(machine)["devices"]] == [True, False]
    assert [line.split()[0] for line in text(machine).splitlines() if line.endswith("slow")] == ["0"]


@on_simulated_gpus
def test_a_device_that_fails_is_named() -> None:
    machine = simulated_environment(gpus=2, errors={"nvmlDeviceGetTemperature*@1": 15, "nvmlDeviceGetClockInfo@0": 3})
    told = facts(machine)
    assert told["devices"][0]["problem"] is None  # a device may lack a feature
    assert "NVML_ERROR_GPU_IS_LOST" in told["devices"][1]["problem"]
    assert "cuda:1: " in text(machine)


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
        ({"gpus": 1}, {}, "available: 1 cuda device\n"),
    ],
)
def test_how_things_were_read(machine: dict[str, Any], variables: dict[str, str], expected: str) -> None:
    # Lines are wrapped at 80 columns.
    assert expected in re.sub("\n +", " ", text(simulated_environment(variables, **machine)))


@on_simulated_gpus
def test_tables() -> None:
    printed = text(
        simulated_environment(gpus=2, name=["One", "Two of a name that does not fit into any table"], memory=["8GiB", "80GiB"])
    )
    blocks = [block.splitlines() for block in printed.split("\n\n")]
    assert blocks[0][2] == "NVIDIA driver 590.44.01, up to CUDA 13.2 (simulated)"
    assert blocks[1][0].split() == ["GPU", "name", "memory", "busy", "temp", "power", "clock"]
    assert re.split(r"  +", blocks[1][1].strip())[:5] == ["0", "One", "0.0 of 8.0 GiB", "13 %", "30 °C"]
    assert re.split(r"  +", blocks[1][2].strip())[:5] == ["1", "Two of a name that does…", "0.0 of 80.0 GiB", "20 %", "31 °C"]
    # Numbers and their headings end in the same column.
    assert len({line.index("GiB") + 3 for line in blocks[1][1:]} | {blocks[1][0].index("memory") + 6}) == 1
    assert len({len(line) for line in blocks[1]}) == 1
    assert blocks[2][0].split() == ["GPU", "PCI", "bus", "CC", *(["NUMA"] if "NUMA" in blocks[2][0] else []), "UUID"]
    lines = text(simulated_environment({"CUDA_VISIBLE_DEVICES": "1"}, gpus=2, mig=[None, 2])).splitlines()
    assert any(re.fullmatch(r"  0  Simulated GPU MIG 1g  0.0 of 1.0 GiB", line) for line in lines)
    assert any(re.match(r"  0  00000000:02:00.0  9.0 .* 1/0  MIG-", line) for line in lines)


@on_simulated_gpus
@pytest.mark.parametrize(
    "machine",
    [
        {"gpus": 8, "memory": "180GiB", "name": "NVIDIA GB200 NVL72 Superchip Very Long"},
        {"gpus": 2, "mig": [7, None]},
        {"gpus": 2, "driver": "broken"},
        {"gpus": 2, "driver": "absent", "nvml": "broken"},
        {"gpus": 2, "nvml": "mismatch"},
        {"gpus": 0},
    ],
)
def test_text_fits_a_terminal(machine: dict[str, Any]) -> None:
    environment = simulated_environment({"CUDA_VISIBLE_DEVICES": "0," * 40 + "7"}, **machine)
    for arguments in ([], ["--strict"]):
        lines = text(environment, *arguments).splitlines()
        assert max(map(len, lines)) <= 80
        assert not any("\033" in line for line in lines)


@on_simulated_gpus
def test_processes_are_listed() -> None:
    program = """
import ctypes, getpass, os, re
from accelerator._command import report, report_text
library, context, pointer = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_uint64()
assert library.cuInit(0) == 0 and library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 1) == 0
assert library.cuCtxSetCurrent(context) == 0 and library.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(2**30)) == 0
facts = report.collect()
(entry,) = facts["devices"][1]["processes"]
assert entry["pid"] == os.getpid() and entry["user"] == getpass.getuser() and entry["memory_used"] >= 2**30, entry
assert facts["devices"][0]["processes"] == []
assert facts["fork_safe"] is False
assert facts["environment"]["CUDA_VISIBLE_DEVICES"]["reading"].startswith("not followed any more"), facts["environment"]
block = report_text.draw(facts).split("\\n\\n")[3].splitlines()
assert block[0].split() == ["GPU", "PID", "user", "memory", "process"], block
assert re.fullmatch(rf"  1  +{os.getpid()}  {getpass.getuser()} +1.[0-9] GiB  python.*", block[1]), block
"""
    environment = simulated_environment({"CUDA_VISIBLE_DEVICES": "0,1"}, gpus=2)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root starts processes of other users")
def test_users_that_this_host_does_not_know() -> None:
    child = subprocess.Popen(["sleep", "60"], user=54321)
    try:
        assert report._user(child.pid) == "54321"
    finally:
        child.kill()
        child.wait()
    assert report._user(child.pid) is None  # it is gone


def test_without_any_accelerator() -> None:
    environment = plain_environment()
    told = facts(environment)
    if told["available"]:
        pytest.skip("there is a real accelerator")
    assert list(told) == KEYS
    assert told["devices"] == []
    assert told["simulated"] is False
    said = re.sub("\n +", " ", text(environment, "report"))
    assert f"not available: {told['unavailable_reason']}" in said


def test_watching(tmp_path: Path) -> None:
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
def test_watching_on_a_terminal() -> None:
    import fcntl
    import pty
    import struct
    import termios

    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 3, 80, 0, 0))
        command = [sys.executable, "-m", "accelerator", "--watch", "0.05"]
        size = dict.fromkeys(("LINES", "COLUMNS"), "0")  # unlike what a test runner may say
        os.execve(sys.executable, command, {**plain_environment(), **size, "TERM": "xterm"})
    output = b""
    deadline = time.monotonic() + 60
    interrupted = False
    with contextlib.suppress(OSError):  # how a terminal ends
        while select.select([terminal], [], [], max(deadline - time.monotonic(), 0))[0] and (part := os.read(terminal, 4096)):
            output += part
            if not interrupted and output.count(b"\033[H") >= 3:
                os.write(terminal, b"\x03")
                interrupted = True
    if time.monotonic() >= deadline:
        os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)
    pictures = output.decode().split("\033[H")[1:-1]
    assert len(pictures) >= 2
    for picture in pictures:
        assert picture.count("\r\n") == 2  # of three lines, the last is the cursor's
        assert "... 2 more lines" in picture or "... " in picture
        assert picture.endswith("\033[J")
        assert picture.count("\033[K") == 2
        assert "\033[1m" in picture


def test_a_document_a_line_for_a_reader_that_leaves() -> None:
    command = [sys.executable, "-m", "accelerator", "--watch", "0.05", "--json"]
    watching = subprocess.Popen(
        command, env=plain_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert watching.stdout
    assert watching.stderr
    assert [list(json.loads(watching.stdout.readline())) for _ in range(2)] == [KEYS, KEYS]
    watching.stdout.close()
    assert watching.wait(timeout=60) == 0
    assert watching.stderr.read() == ""
    watching.stderr.close()
