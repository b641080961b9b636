"""Every question in every broken state: never wrong, never hanging, never initializing anything, nothing left behind.

A machine is a failure of NVML and a state of the driver; each is asked in every environment and place. By default a slice of
the machines in which each failure and each state occurs; ``ACCELERATOR_TEST_SLICE`` takes another one,
``ACCELERATOR_TEST_ALL=1`` all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT, simulated_environment
from tests.support.discovery import initializations, noisy_library, on_simulated_gpus

GIB = 2**30
GPUS = 3

# What is wrong with NVML, as options of the simulation.
NVML: dict[str, dict[str, Any]] = {
    "fine": {},
    "absent": {"nvml": "absent"},
    "init 9": {"nvml": "broken"},
    "init 18": {"nvml": "mismatch"},
    "init 999": {"errors": {"nvmlInit*": 999}},
    "count": {"errors": {"nvmlDeviceGetCount*": 999}},
    "UUID": {"errors": {"nvmlDeviceGetUUID": 999}},
    "memory": {"errors": {"nvmlDeviceGetMemoryInfo*": 15}},
    "capability": {"errors": {"nvmlDeviceGetCudaComputeCapability": 999}},
    "one handle": {"errors": {"nvmlDeviceGetHandleBy*@1": 15}},
}
LISTS = ("fine", "UUID", "memory", "capability", "one handle")
DRIVER: dict[str, dict[str, Any]] = {
    "fine": {},
    "absent": {"driver": "absent"},
    "old": {"driver": "old"},
    "broken": {"driver": "broken"},
    "late": {},
    "noisy": {},
}
MIG: dict[str, Any] = {"no MIG": None, "MIG": [None, None, 2]}


def machines() -> list[tuple[str, str, str]]:
    """Those to be tried in this run."""
    if os.environ.get("ACCELERATOR_TEST_ALL") == "1":
        return [(nvml, driver, mig) for nvml in NVML for driver in DRIVER for mig in MIG]
    turn = int(os.environ.get("ACCELERATOR_TEST_SLICE", "0"))
    drivers, migs = list(DRIVER), list(MIG)
    return [(nvml, drivers[(i + turn) % len(drivers)], migs[(i // 3 + turn) % len(migs)]) for i, nvml in enumerate(NVML)]


@pytest.fixture(scope="module")
def uuids() -> dict[str, list[str]]:
    """The UUIDs of the GPUs, and of the MIG instances, of the two machines."""
    found = {}
    for name, mig in MIG.items():
        program = "import accelerator as acc, json; print(json.dumps([d.uuid for d in acc.physical_devices()]))"
        environment = simulated_environment(gpus=GPUS, mig=mig)
        said = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True, timeout=120)
        found[name] = json.loads(said.stdout)
    return found


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noisy_library(tmp_path_factory.mktemp("noisy"))


def environments(known: list[str]) -> list[dict[str, str]]:
    gpus = [uuid for uuid in known if uuid.startswith("GPU-")]
    instances = [uuid for uuid in known if uuid.startswith("MIG-")]
    values = [
        None,
        "",
        "2,0",
        "1",
        f"{gpus[2]},{gpus[0]}",
        gpus[1],
        gpus[0][:10],
        *instances[-1:],
        "MIG-none",
        "0,x,1",
        "\udcff",
        "9",
    ]
    values += ["0," * 5000]
    return [{} if value is None else {"CUDA_VISIBLE_DEVICES": value} for value in values]


_totals: Counter[str] = Counter()


@on_simulated_gpus
@pytest.mark.parametrize(("nvml", "driver", "mig"), machines(), ids=lambda part: part.replace(" ", "-"))
def test_no_answer_is_wrong(
    nvml: str,
    driver: str,
    mig: str,
    uuids: dict[str, list[str]],
    noisy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log, task = tmp_path / "log", tmp_path / "task"
    machine = {"gpus": GPUS, "mig": MIG[mig], "log": log, **NVML[nvml], **DRIVER[driver]}
    environment = simulated_environment(**machine)
    late = None
    if driver == "late":
        first, *rest = environment["LD_LIBRARY_PATH"].split(":")
        late = f"{first}/libcuda.so.1"
        environment["LD_LIBRARY_PATH"] = ":".join([str(tmp_path), *rest])
    if driver == "noisy":
        environment["LD_PRELOAD"] = f"{environment['LD_PRELOAD']}:{noisy}"
    asked = environments(uuids[mig])
    task.write_text(json.dumps({"environments": asked, "late": late, "folder": str(tmp_path), "spawned": False}))
    program = [sys.executable, "-m", "tests.queries.fault_matrix", str(task)]
    done = subprocess.run(program, env=environment, cwd=ROOT, capture_output=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-3000:]
    answers = json.loads(task.with_suffix(".answers").read_text())

    wrong: list[Any] = []
    places = 0
    asking = {answers["pid"]}
    if driver == "late" and answers["early"] != 0:
        wrong.append(("before the driver came", answers["early"]))
    for place, (variables, told) in enumerate(zip(asked, answers["told"], strict=True)):
        spawned = answers["spawned"][place]
        initialized, after = told["forked after initialization"]
        cells = {
            "main": told["main"],
            "thread": told["thread"],
            "forked": told["forked"],
            "after": after,
            "spawned": spawned["main"],
        }
        truth = told["truth"]
        value = variables.get("CUDA_VISIBLE_DEVICES")
        for name, cell in cells.items():
            places += 1
            if not isinstance(cell, dict):
                wrong.append((value, name, cell))
                continue
            asking.add(cell["pid"])
            poisoned = name == "after" and initialized
            wrong += [
                (str(value)[:60], name, *defect) for defect in defects(cell, truth, value, nvml, driver, poisoned=poisoned)
            ]
        if told["left"] or spawned["left"]:
            wrong.append((value, "a child was left behind"))
    started = [event for pid in asking for event in initializations(log, pid)]
    # One place of five belongs to a process that was told to initialize the driver: its child's answer counts, not it.
    _totals.update(
        cells=places, wrong=len(wrong), hangs=sum("HANG" in map(str, w) for w in wrong), initializations=len(started)
    )
    _totals.update(zombies=sum("left" in str(w[1]) for w in wrong))
    with capsys.disabled():
        print(f"\n{nvml}, driver {driver}, {mig}: {dict(_totals)}", end="")
    assert wrong == []
    assert started == []


def defects(
    cell: dict[str, Any], truth: list[str] | int, value: str | None, nvml: str, driver: str, *, poisoned: bool
) -> list[tuple[Any, ...]]:
    """What is wrong with the answers of one cell."""
    found: list[tuple[Any, ...]] = []
    count = cell["count"][0]
    lists = nvml in LISTS
    if len(set(map(str, cell["count"]))) > 1:
        found.append(("the count flips", cell["count"]))
    if driver in ("absent", "old") and count != 0:
        found.append(("a driver that cannot serve counts", count))
    if isinstance(truth, list) and driver != "old" and count != len(truth):
        found.append(("count", count, "driver", len(truth)))
    if driver == "broken" and not lists and count != 0:
        found.append(("nobody lists devices, and the count is", count))
    if driver == "broken" and nvml in ("fine", "memory", "capability"):
        plain = {None: 3, "": 0, "2,0": 2, "1": 1, "9": 0, "0,x,1": 1}
        if value in plain and not cell_has_mig(cell) and count != plain[value]:
            found.append(("NVML lists", plain[value], "count", count))
    if cell["available"] is not (count > 0 and not poisoned):
        found.append(("available", cell["available"], count))
    if (cell["reason"] is None) is not cell["available"] or "\n" in (cell["reason"] or "") or len(cell["reason"] or "") > 1000:
        found.append(("reason", cell["reason"]))
    if cell["bad fork"] is not poisoned:
        found.append(("bad fork", cell["bad fork"]))
    if isinstance(truth, list) and driver != "old":
        for (uuid, _, capability), true in zip(cell["devices"], truth, strict=False):
            if uuid is not None and uuid.partition("-")[2].replace("-", "") != true:
                found.append(("UUID", uuid, true))
            if uuid is None and nvml != "UUID":
                found.append(("UUID unknown", value))
            if capability != [9, 0] and not (nvml == "UUID" and capability is None):
                found.append(("capability", capability))
    for _, total, _ in cell["devices"]:
        if total not in (8 * GIB, GIB, None):
            found.append(("total memory", total))
        if total is None and nvml not in ("memory", "one handle"):
            found.append(("total memory unknown",))
    for name in ("memory", "total"):
        told = cell[name]
        if poisoned:
            right = "RuntimeError: The accelerator cannot be used" in str(told)
        elif count:
            right = told in (8 * GIB, GIB) or "is unknown" in str(told)
        else:
            right = isinstance(told, int) and told not in (8 * GIB, GIB)
        if not right:
            found.append((name, told))
    if cell["torch"]:
        found.append(("torch was imported",))
    found += [("escaped", text) for text in str(cell).split("'") if text.startswith("ESCAPED")]
    if nvml == "fine" and driver != "absent" and count and not cell_has_mig(cell) and not isinstance(cell["utilization"], int):
        found.append(("utilization", cell["utilization"]))
    return found


def cell_has_mig(cell: dict[str, Any]) -> bool:
    return any(str(uuid).startswith("MIG-") for uuid, _, _ in cell["devices"])
