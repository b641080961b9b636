"""``python -m accelerator check`` on healthy and on broken machines."""

from __future__ import annotations

import datetime
import importlib.util
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import accelerator
from accelerator import __main__
from accelerator._command import check as check_command
from accelerator._command import cluster_check, not_offered
from accelerator._command.check import Checked, Result
from accelerator._machine.discovery_result import NotSupported
from tests.support import module, plain_environment, python, simulated_environment
from tests.support.discovery import on_simulated_gpus

AREAS = """discovery launching fork all-reduce monitoring devices streams memory arithmetic random dtypes tensors graphs
    checkpointing profiling extensions""".split()

# The check reports DeepSpeed's op builders if DeepSpeed is installed.
OP_BUILDERS = (
    "extensions: registered op builders only"
    if importlib.util.find_spec("deepspeed") is None
    else "extensions: op builders in deepspeed.ops.op_builder"
)


def check(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return module("accelerator", environment, "check", *arguments)


def passed(text: str) -> list[str]:
    return re.findall(r"^✓ ([\w-]+): ", text, re.MULTILINE)


def problems(text: str) -> list[str]:
    return [line.removeprefix("✗ ") for line in text.splitlines() if line.startswith("✗ ")]


@on_simulated_gpus
def test_every_area_on_every_device() -> None:
    done = check(simulated_environment(gpus=3))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "on 3 x Simulated GPU (simulated)"
    assert lines[-1] == "all areas passed"
    assert passed(done.stdout) == AREAS
    everywhere = [line for line in lines if line.endswith(" (all devices)")]
    assert len(everywhere) == len(AREAS) - 7
    assert "all-reduce: 3 processes over nccl" in done.stdout
    assert "NumPy" not in done.stdout
    assert OP_BUILDERS in done.stdout


@pytest.mark.slow
@on_simulated_gpus
def test_simulated_devices_that_do_not_compute() -> None:
    done = check(simulated_environment(gpus=1, compute=False))
    assert (done.returncode, done.stderr) == (0, "")
    assert "arithmetic: not computed on these simulated GPUs" in done.stdout
    assert "checkpointing: a gradient" in done.stdout
    assert passed(done.stdout) == AREAS


@pytest.mark.slow
@on_simulated_gpus
def test_problem_names_the_device_without_memory() -> None:
    done = check(simulated_environment(gpus=2, errors={"cuMemAlloc*@1": 2}))
    assert done.returncode == 1
    causes = problems(done.stdout)
    assert all("cuda:1" in cause for cause in causes)
    assert not any("cuda:0" in cause for cause in causes)
    assert len(causes) == 1
    assert re.match("cuda:1: (all-reduce, )?memory, .*: OutOfMemoryError: CUDA out of memory", causes[0])
    assert "random: seeded and restored (cuda:0, cuda:1)" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 problem"


@on_simulated_gpus
def test_a_dead_device_is_named_first() -> None:
    done = check(simulated_environment(gpus=4, errors={"cuDevicePrimaryCtxRetain*@1": 999}))
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[1].startswith("✗ cuda:1 (Simulated GPU) is broken: cuDevicePrimaryCtxRetain returned CUDA_ERROR_UNKNOWN")
    assert problems(done.stdout) == [lines[1].removeprefix("✗ ")]
    assert passed(done.stdout) == AREAS  # on the other devices
    assert "all-reduce: 3 processes over nccl" in done.stdout
    assert "seeded and restored (cuda:0, cuda:2, cuda:3)" in done.stdout
    assert lines[-1] == "1 problem"


@pytest.mark.slow
@on_simulated_gpus
def test_check_of_one_of_two_dead_devices_names_it() -> None:
    errors = {"cuDevicePrimaryCtxRetain*@0": 999, "cuDevicePrimaryCtxRetain*@1": 999}
    program = "import torch\nfrom accelerator._command import check\nprint(check.run(1).dead)"
    done = python(program, simulated_environment(gpus=3, errors=errors))
    assert done.stdout.startswith("cuda:1 (Simulated GPU) is broken: "), done.stdout + done.stderr


@on_simulated_gpus
def test_broken_driver_is_one_problem() -> None:
    done = check(simulated_environment(gpus=2, driver="broken"))
    assert done.returncode == 1
    assert problems(done.stdout) == ["the CUDA driver failed: cuInit returned CUDA_ERROR_UNKNOWN (999)"]
    assert passed(done.stdout) == ["discovery", "launching", "fork", "monitoring"]


@pytest.mark.slow
@on_simulated_gpus
def test_json_document() -> None:
    done = check(simulated_environment(gpus=2, errors={"cuMemAlloc*@1": 2}), "--json")
    assert done.returncode == 1
    document: dict[str, Any] = json.loads(done.stdout)
    assert list(document) == "schema version host time passed where simulated devices areas problems".split()
    assert (document["schema"], document["passed"], document["simulated"]) == (1, False, True)
    assert [device["index"] for device in document["devices"]] == [0, 1]
    failed = {(area["area"], area["device"]) for area in document["areas"] if area["problem"]}
    assert ("memory", "cuda:1") in failed
    assert ("memory", "cuda:0") not in failed
    assert {area["area"] for area in document["areas"]} == set(AREAS)
    assert all((area["saw"] is None) == (area["problem"] is not None) for area in document["areas"])
    assert document["problems"]


def test_without_any_accelerator() -> None:
    done = check(plain_environment(ACCELERATOR_BACKEND="cpu"))
    assert done.returncode == 0
    assert done.stdout.startswith("on the CPU, as ACCELERATOR_BACKEND=cpu disables the accelerator")
    assert passed(done.stdout) == [area for area in AREAS if area != "monitoring"]
    assert "all-reduce: 2 processes over gloo" in done.stdout
    assert OP_BUILDERS in done.stdout


def test_failed_areas_are_reported() -> None:
    program = """
import torch
import sys
import accelerator as acc
from accelerator._command import all_reduce, check
acc.initial_seed = lambda: 8
def fail(*arguments):
    import os
    if arguments[2]:
        os._exit(3)
    return "the sum is 1, not 3"
all_reduce.reduce = fail
sys.exit(check.main())
"""
    done = python(program, plain_environment(ACCELERATOR_BACKEND="cpu"))
    assert done.returncode == 1
    assert problems(done.stdout) == [
        "cpu:0: all-reduce: the sum is 1, not 3",
        "cpu:0: all-reduce: its process ended with status 3",
        "random: after manual_seed_all(7) initial_seed() is 8",
    ]


def test_all_reduce_reports_the_exit_of_a_process() -> None:
    program = """
import torch
import sys
from accelerator._command import all_reduce
all_reduce.reduce = lambda *arguments: sys.exit("a signal")
try:
    print(all_reduce.across([0]))
except all_reduce.Failed as error:
    print(error.problems)
"""
    done = python(program, plain_environment(ACCELERATOR_BACKEND="cpu"))
    assert done.stdout == "[(0, 'SystemExit: a signal')]\n"


@pytest.mark.slow
def test_torch_without_numpy_prints_no_warning(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['numpy'] = None\n")
    environment = plain_environment(ACCELERATOR_BACKEND="cpu")
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    warned = subprocess.run(
        [sys.executable, "-c", "import torch; torch.ones(1) + 1"], env=environment, capture_output=True, text=True, timeout=200
    )
    assert "NumPy" in warned.stderr
    done = check(environment)
    assert done.returncode == 0
    assert "NumPy" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("error", "is_not_offered"),
    [
        (NotSupported("torch 2.13.0 has no graphs for xpu"), True),
        (RuntimeError("Backend doesn't support getting device capabilities."), True),
        (NotImplementedError("Could not run 'aten::empty_strided' with arguments from the 'fakeacc' backend"), True),
        (RuntimeError("Graph is not supported on device type: openreg"), True),
        (RuntimeError("The memory of device 0, cuda, is unknown: NVML_ERROR_UNKNOWN"), False),
        (NotImplementedError("aten::mm is not simulated"), False),
        (RuntimeError("CUDA error: out of memory"), False),
        (RuntimeError("torch has no such thing"), False),
        (ValueError("no kernel"), False),
    ],
)
def test_is_not_offered(error: Exception, is_not_offered: bool) -> None:
    assert not_offered.is_not_offered(error) is is_not_offered
    assert is_not_offered or not not_offered.says_not_offered(f"{type(error).__name__}: {error}")


def test_missing_collectives_are_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerator._command import check as command

    lacking = "RuntimeError: No backend type associated with device type openreg"

    def failing(*problems: str) -> None:
        def across(indices: object) -> str:
            raise command.all_reduce.Failed(list(enumerate(problems)))

        monkeypatch.setattr(command.all_reduce, "across", across)

    failing(lacking, lacking)
    assert command._all_reduce([0, 1], "openreg") == [
        command.Result("all-reduce", None, f"not offered by this accelerator: {lacking}", None)
    ]
    failing(lacking, "TimeoutError: no answer")
    assert [result.problem for result in command._all_reduce([0, 1], "openreg")] == [lacking, "TimeoutError: no answer"]


DEVICES = tuple(
    accelerator.VisibleDevice(*range(len(accelerator.VisibleDevice._fields)))._replace(index=i, name=f"X{i}", uuid=f"GPU-{i}")
    for i in range(3)
)
PASSED = Checked("3 x X", DEVICES, (Result("fork", None, "safe", None), Result("memory", "cuda:0", "free", None)), None)
FAILED = Checked(
    "3 x X (simulated)",
    DEVICES,
    (
        Result("fork", None, "safe", None),
        Result("all-reduce", None, None, "no sum"),
        Result("memory", "cuda:0", None, "no memory"),
        Result("memory", "cuda:2", "free", None),
        Result("random", "cuda:0", None, "no memory"),
        Result("random", "cuda:2", None, "no memory"),
        Result("graphs", "cuda:0", None, "no graph"),
        Result("extensions", None, None, "no sum"),
    ),
    "cuda:1 (X1) is broken",
)
CAUSES = [
    "cuda:1 (X1) is broken",
    "all-reduce, extensions: no sum",
    "cuda:0: memory, random: no memory",
    "cuda:2: random: no memory",
    "cuda:0: graphs: no graph",
]


def use_result(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a check find this, and show an area on one device and on two."""

    def run(only: int | None = None, *, show: Any = None, say: Any = None) -> Checked:
        if say:
            say(f"on {checked.where}")
            if checked.dead:
                say(checked.dead, failed=True)
            show(Result("fork", None, "safe", None))
            show(Result("memory", "cuda:0, cuda:2", "free", None))
        return checked

    monkeypatch.setattr(check_command, "run", run)


@pytest.mark.parametrize("has_color", [False, True])
def test_lines_of_a_check(has_color: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR" if has_color else "NO_COLOR", "1")
    monkeypatch.delenv("NO_COLOR" if has_color else "FORCE_COLOR", raising=False)
    good, bad = ("\033[32m✓\033[0m", "\033[31m✗\033[0m") if has_color else ("✓", "✗")
    areas = [f"{good} fork: safe", f"{good} memory: free (cuda:0, cuda:2)"]
    use_result(PASSED, monkeypatch)
    assert __main__.main(["check"]) == 0
    assert capsys.readouterr().out.splitlines() == ["on 3 x X", *areas, "all areas passed"]
    use_result(FAILED, monkeypatch)
    assert __main__.main(["check"]) == 1
    first, *others = (f"{bad} {cause}" for cause in CAUSES)
    assert capsys.readouterr().out.splitlines() == ["on 3 x X (simulated)", first, *areas, *others, "5 problems"]


def test_document_of_a_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for checked, status in ((PASSED, 0), (FAILED, 1)):
        use_result(checked, monkeypatch)
        begin = datetime.datetime.now().astimezone().replace(microsecond=0)
        assert __main__.main(["check", "--json"]) == status
        document = json.loads(capsys.readouterr().out)
        assert begin <= datetime.datetime.fromisoformat(document.pop("time")) <= datetime.datetime.now().astimezone()
        assert document == {
            "schema": 1,
            "version": accelerator.__version__,
            "host": socket.gethostname(),
            "passed": status == 0,
            "where": checked.where,
            "simulated": accelerator.simulation.is_simulated(),
            "devices": [{"index": i, "name": f"X{i}", "uuid": f"GPU-{i}"} for i in range(3)],
            "areas": [dict(zip(("area", "device", "saw", "problem"), result, strict=True)) for result in checked.results],
            "problems": CAUSES if status else [],
        }


def test_a_rank_is_checked_as_one_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []
    monkeypatch.setattr(cluster_check, "main", lambda **options: found.append(options) or 1)
    monkeypatch.setattr(check_command, "main", lambda **options: found.append(options) or 0)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert __main__.main(["check", "--timeout", "7"]) == 0
    monkeypatch.setenv("RANK", "1")
    assert __main__.main(["check", "--json"]) == 0  # of another tool
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert __main__.main(["check"]) == __main__.main(["check", "--json", "--timeout", "7.5"]) == 1
    ours = [{"as_json": False}, {"as_json": True}]
    assert found == [*ours, {"as_json": False, "timeout": 60.0}, {"as_json": True, "timeout": 7.5}]


def test_an_area_names_the_devices_on_which_it_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three devices all, or those; of two both by name. The indices are those of the devices."""
    wrong = {"memory": {2}, "dtypes": {0, 1, 2}}

    def use(names: list[str], usable: list[int]) -> None:
        devices = tuple(DEVICES[0]._replace(index=i, name=name) for i, name in enumerate(names))
        monkeypatch.setattr(accelerator, "visible_devices", lambda: devices)
        errors = [None if i in usable else f"cuda:{i} is broken" for i in range(len(devices))]
        monkeypatch.setattr(check_command.usability, "errors", lambda _: errors)

    def replace(name: str) -> None:
        def area(index: int | None = None) -> str:
            if index in wrong.get(name, ()):
                raise check_command.check_areas.Wrong(f"wrong {name}")
            return f"saw {index}" if name == "random" else "saw"

        area.__name__ = name
        monkeypatch.setattr(check_command.check_areas, name, area)

    for name in {*AREAS} - {"all-reduce", "devices"}:
        replace(name)
    monkeypatch.setattr(check_command.check_areas, "devices_in_turn", lambda indices: f"saw {indices}")
    monkeypatch.setattr(check_command.all_reduce, "across", lambda indices: f"saw {indices}")
    monkeypatch.setattr(check_command, "_on_current_device", lambda each: each)
    monkeypatch.setattr(accelerator, "unavailable_reason", lambda: None)
    monkeypatch.setattr(accelerator, "device_name", lambda: "cuda")
    monkeypatch.setattr(accelerator.simulation, "is_simulated", lambda: False)

    def run(only: int | None = None) -> tuple[Checked, dict[str, tuple[str | None, str | None]]]:
        shown: list[Result] = []
        said: list[str] = []
        found = check_command.run(only, show=shown.append, say=lambda text, **_: said.append(text))
        assert said == [f"on {found.where}", *([found.dead] if found.dead else [])]
        return found, {result.area: (result.device, result.saw) for result in shown}

    use(["A", "B", "A"], [0, 1, 2])
    found, passed = run()
    assert (found.where, found.dead, found.passed) == ("3 x A, B", None, False)
    assert {name: passed.pop(name) for name in ("all-reduce", "devices", "memory", "random")} == {
        "all-reduce": (None, "saw [0, 1, 2]"),
        "devices": (None, "saw [0, 1, 2]"),
        "memory": ("cuda:0, cuda:1", "saw"),
        "random": ("all devices", "saw 0; saw 1; saw 2"),
    }
    everywhere = dict.fromkeys(("monitoring", "streams", "arithmetic", "tensors", "graphs", "checkpointing"), "all devices")
    assert passed == {name: (everywhere.get(name), "saw") for name in AREAS if name in passed}
    assert set(AREAS) - {*passed, "all-reduce", "devices", "memory", "random"} == {"dtypes"}
    assert check_command.causes(found) == [
        "cuda:2: memory: wrong memory",
        "cuda:0: dtypes: wrong dtypes",
        "cuda:1: dtypes: wrong dtypes",
        "cuda:2: dtypes: wrong dtypes",
    ]

    use(["A", "B", "A"], [0, 2])
    found, passed = run()
    assert (found.dead, found.passed) == ("cuda:1 is broken", False)
    assert (passed["monitoring"], passed["streams"]) == (("all devices", "saw"), ("cuda:0, cuda:2", "saw"))
    assert (passed["devices"], passed["memory"]) == ((None, "saw [0, 2]"), ("cuda:0", "saw"))

    use(["A", "B", "A"], [0])
    assert [run(only)[0].dead for only in (None, 0, 1, 2)] == ["cuda:1 is broken", None, "cuda:1 is broken", "cuda:2 is broken"]

    use(["A", "B"], [0, 1])
    found, passed = run()
    assert (found.where, passed["streams"]) == ("2 x A, B", ("cuda:0, cuda:1", "saw"))

    use(["A", "B", "A"], [0, 1])
    found, passed = run(1)
    assert (found.where, found.dead, passed["streams"], passed["devices"]) == (
        "1 x B",
        None,
        ("cuda:1", "saw"),
        (None, "saw [1]"),
    )
    assert "all-reduce" not in passed
