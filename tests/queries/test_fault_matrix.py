"""In every broken state, queries return no wrong result, do not hang, initialize nothing and leave no process behind.

A machine combines a failure of NVML and a state of the driver. ``fault_matrix.py`` runs the queries in every environment: in
the main process, in a thread and in three kinds of child processes.
"""

from __future__ import annotations

import json
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

# Failures of NVML, as options of the simulation.
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


def machines() -> list[Any]:
    """Return each failure of NVML with two states of the driver, for exhaustive tests with all values of the variable.

    The first six cover all states. They also run by default, with fewer values.
    """
    drivers, migs = list(DRIVER), list(MIG)
    cases = [
        (nvml, drivers[(i + turn) % len(drivers)], migs[(i // 3 + turn) % 2]) for turn in (0, 1) for i, nvml in enumerate(NVML)
    ]
    return [
        *(pytest.param(*case, 6) for case in cases[: len(drivers)]),
        *(pytest.param(*case, 1, marks=[pytest.mark.slow, pytest.mark.exhaustive]) for case in cases),
    ]


@pytest.fixture(scope="module")
def uuids() -> dict[str, list[str]]:
    """Return the UUIDs of the GPUs and the MIG instances with and without MIG."""
    actual = {}
    for name, mig in MIG.items():
        program = "import accelerator as acc, json; print(json.dumps([d.uuid for d in acc.physical_devices()]))"
        environment = simulated_environment(gpus=GPUS, mig=mig)
        child = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True, timeout=120)
        actual[name] = json.loads(child.stdout)
    return actual


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
@pytest.mark.parametrize(("nvml", "driver", "mig", "step"), machines(), ids=lambda part: str(part).replace(" ", "-"))
def test_every_query_on_every_faulty_machine(
    nvml: str,
    driver: str,
    mig: str,
    step: int,
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
    settings = environments(uuids[mig])[::step]
    task.write_text(json.dumps({"environments": settings, "late": late, "folder": str(tmp_path), "spawned": False}))
    program = [sys.executable, "-m", "tests.queries.fault_matrix", str(task)]
    done = subprocess.run(program, env=environment, cwd=ROOT, capture_output=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-3000:]
    results = json.loads(task.with_suffix(".results").read_text())

    wrong: list[Any] = []
    places = 0
    pids = {results["pid"]}
    if driver == "late" and results["early"] != 0:
        wrong.append(("before the driver came", results["early"]))
    for place, (variables, output) in enumerate(zip(settings, results["output"], strict=True)):
        spawned = results["spawned"][place]
        initialized, after = output["forked after initialization"]
        cells = {
            "main": output["main"],
            "thread": output["thread"],
            "forked": output["forked"],
            "after": after,
            "spawned": spawned["main"],
        }
        truth = output["truth"]
        value = variables.get("CUDA_VISIBLE_DEVICES")
        for name, cell in cells.items():
            places += 1
            if not isinstance(cell, dict):
                wrong.append((value, name, cell))
                continue
            pids.add(cell["pid"])
            is_bad_fork = name == "after" and initialized
            wrong += [
                (str(value)[:60], name, *defect)
                for defect in defects(cell, truth, value, nvml, driver, is_bad_fork=is_bad_fork)
            ]
        if output["left"] or spawned["left"]:
            wrong.append((value, "a child was left behind"))
    started = [event for pid in pids for event in initializations(log, pid)]
    # The process that initializes the driver on purpose is not in ``pids``. Only its child is.
    _totals.update(
        cells=places, wrong=len(wrong), hangs=sum("HANG" in map(str, w) for w in wrong), initializations=len(started)
    )
    _totals.update(zombies=sum("left" in str(w[1]) for w in wrong))
    with capsys.disabled():
        print(f"\n{nvml}, driver {driver}, {mig}: {dict(_totals)}", end="")
    assert wrong == []
    assert started == []


def defects(
    cell: dict[str, Any], truth: list[str] | int, value: str | None, nvml: str, driver: str, *, is_bad_fork: bool
) -> list[tuple[Any, ...]]:
    """Return what is wrong in the results of one cell."""
    actual: list[tuple[Any, ...]] = []
    count = cell["count"][0]
    lists = nvml in LISTS
    if len(set(map(str, cell["count"]))) > 1:
        actual.append(("the count flips", cell["count"]))
    if driver in ("absent", "old") and count != 0:
        actual.append(("a driver that cannot serve counts", count))
    if isinstance(truth, list) and driver != "old" and count != len(truth):
        actual.append(("count", count, "driver", len(truth)))
    if driver == "broken" and not lists and count != 0:
        actual.append(("nobody lists devices, and the count is", count))
    if driver == "broken" and nvml in ("fine", "memory", "capability"):
        plain = {None: 3, "": 0, "2,0": 2, "1": 1, "9": 0, "0,x,1": 1}
        if value in plain and not cell_has_mig(cell) and count != plain[value]:
            actual.append(("NVML lists", plain[value], "count", count))
    if cell["available"] is not (count > 0 and not is_bad_fork):
        actual.append(("available", cell["available"], count))
    if (cell["reason"] is None) is not cell["available"] or "\n" in (cell["reason"] or "") or len(cell["reason"] or "") > 1000:
        actual.append(("reason", cell["reason"]))
    if cell["bad fork"] is not is_bad_fork:
        actual.append(("bad fork", cell["bad fork"]))
    if isinstance(truth, list) and driver != "old":
        for (uuid, _, capability), true in zip(cell["devices"], truth, strict=False):
            if uuid is not None and uuid.partition("-")[2].replace("-", "") != true:
                actual.append(("UUID", uuid, true))
            if uuid is None and nvml != "UUID":
                actual.append(("UUID unknown", value))
            if capability != [9, 0] and not (nvml == "UUID" and capability is None):
                actual.append(("capability", capability))
    for _, total, _ in cell["devices"]:
        if total not in (8 * GIB, GIB, None):
            actual.append(("total memory", total))
        if total is None and nvml not in ("memory", "one handle"):
            actual.append(("total memory unknown",))
    for name in ("memory", "total"):
        output = cell[name]
        if is_bad_fork:
            right = "RuntimeError: The accelerator cannot be used" in str(output)
        elif count:
            right = output in (8 * GIB, GIB) or "is unknown" in str(output)
        else:
            right = isinstance(output, int) and output not in (8 * GIB, GIB)
        if not right:
            actual.append((name, output))
    if cell["torch"]:
        actual.append(("torch was imported",))
    actual += [("escaped", text) for text in str(cell).split("'") if text.startswith("ESCAPED")]
    if nvml == "fine" and driver != "absent" and count and not cell_has_mig(cell) and not isinstance(cell["utilization"], int):
        actual.append(("utilization", cell["utilization"]))
    return actual


def cell_has_mig(cell: dict[str, Any]) -> bool:
    return any(str(uuid).startswith("MIG-") for uuid, _, _ in cell["devices"])
