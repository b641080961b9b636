"""``python -m accelerator check`` on healthy and on broken machines."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accelerator._command import not_offered
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
