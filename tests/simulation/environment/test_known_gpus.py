"""A known name of a GPU sets its memory, the driver's reserve and its capability."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from accelerator.simulation import environment
from accelerator.simulation._settings import known_gpus
from tests.support import run, simulated_environment
from tests.support.simulation import DEADLINE, GIB, MIB, REPOSITORY, linux_only
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [linux_only, needs_cuda_torch]


def figures(*, begin: str = "", **machine: Any) -> dict[str, Any]:
    """Return what a simulated machine reports of each GPU, before and after initialization."""
    program = """
        import json, subprocess, accelerator as acc

        def figures():
            return [[acc.total_memory(i), acc.get_memory_info(i)[1], acc.visible_devices()[i].total_memory]
                    for i in range(acc.device_count())]

        before = figures()
        import torch
        allocated = [torch.empty(1, device=f"cuda:{i}") for i in range(acc.device_count())]
        properties = [torch.cuda.get_device_properties(i) for i in range(acc.device_count())]
        smi = ["nvidia-smi", "--query-gpu=memory.total,memory.reserved", "--format=csv,noheader,nounits"]
        print(json.dumps({
            "before": before, "after": figures(),
            "cuda": [[each.total_memory, torch.cuda.mem_get_info(i)[1]] for i, each in enumerate(properties)],
            "smi": [[int(word) for word in line.split(",")] for line in subprocess.check_output(smi, text=True).splitlines()],
            "names": [each.name for each in properties],
            "capabilities": [f"{each.major}.{each.minor}" for each in properties],
        }))
    """
    result: dict[str, Any] = json.loads(run(begin + textwrap.dedent(program), simulated_environment(**machine)))
    return result


@pytest.mark.slow
def test_cuda_and_nvml_report_different_totals() -> None:
    result = figures(gpus=2, name=["A100-40GB", "NVIDIA GeForce RTX 4090"], speed=0)
    totals = [42_298_834_944, 24081 * MIB]
    assert result["cuda"] == [[total] * 2 for total in totals]
    assert result["before"] == result["after"] == [[total] * 3 for total in totals]
    assert result["smi"] == [[40960, 620], [24564, 483]]
    assert result["names"] == ["NVIDIA A100-SXM4-40GB", "NVIDIA GeForce RTX 4090"]
    assert result["capabilities"] == ["8.0", "8.9"]


def test_other_gpus_have_one_total() -> None:
    result = figures(begin="import torch\n", gpus=1, memory="4GiB")
    assert result["before"] == result["after"] == [[4 * GIB] * 3]
    assert result["cuda"] == [[4 * GIB] * 2]
    assert result["smi"] == [[4096, 0]]


def machine(**options: Any) -> tuple[str | None, ...]:
    variables = environment(**options)
    return tuple(variables.get(f"ACCELERATOR_SIM_{name}") for name in ("MEMORY", "RESERVES", "CAPABILITIES", "NAMES"))


def test_explicit_values_are_kept() -> None:
    h100 = 81089 * MIB
    reserve = 81559 * MIB - h100
    full = "NVIDIA H100 80GB HBM3"
    assert machine(name="H100") == (str(h100), str(reserve), "9.0", full)
    assert machine(name="T4", memory="1GiB") == (str(GIB), None, "7.5", "Tesla T4")
    assert machine(name="H100", capability="8.0") == (str(h100), str(reserve), "8.0", full)
    assert machine(gpus=3, name=["H100", "Mine"]) == (f"{h100},{8 * GIB}", f"{reserve},0", "9.0,9.0", f"{full};Mine")
    assert machine(gpus=2) == (str(8 * GIB), None, "9.0", "Simulated GPU")
    for wrong, message in (([], "name is an empty sequence"), (["A", "B"], "name has 2 values for 1 GPU")):
        with pytest.raises(ValueError, match=message):
            environment(1, name=wrong)
    with pytest.raises(TypeError, match="name must be a str, not int"):
        environment(1, name=[1])  # type: ignore[list-item]


def test_names() -> None:
    assert known_gpus.find("a100") == known_gpus.find("NVIDIA A100-SXM4-80GB") is not None
    assert known_gpus.find("NVIDIA H100") == known_gpus.find("H100") is not None
    assert known_gpus.find("RTX 4090") == known_gpus.find("rtx4090") == known_gpus.find("GeForce RTX 4090") is not None
    assert known_gpus.find("Simulated GPU") is None


def test_table() -> None:
    """Published totals, and what no GPU of the table can lack."""
    gib = {"T4": 14.75, "A10": 21.98, "RTX5090": 31.37, "H100": 79.19, "B200": 178.35, "RTXPRO6000": 94.97}
    for name, total in gib.items():
        gpu = known_gpus.find(name)
        assert gpu is not None
        assert round(gpu.memory / GIB, 2) == total
    gpus = [known_gpus.find(name) for name in known_gpus.names().split(", ")]
    assert len({gpu.name for gpu in gpus if gpu}) == len(gpus)
    for gpu in gpus:
        assert gpu is not None
        assert 0 < gpu.reserve < gpu.nvml_memory / 40
        environment(1, name=gpu.name)


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "accelerator", *arguments]
    return subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE)


def test_simulate_takes_known_names() -> None:
    program = "import os; print(*(os.environ['ACCELERATOR_SIM_' + name] for name in ('MEMORY', 'CAPABILITIES', 'NAMES')))"
    options = "--name", "A10G", "--name", "NVIDIA L4"
    done = command("simulate", "--gpus", "2", *options, "--", sys.executable, "-c", program)
    assert (done.stdout, done.stderr) == (f"{22587 * MIB},{22563 * MIB} 8.6,8.9 NVIDIA A10G;NVIDIA L4\n", "")


def unknown(name: str, command: str) -> str:
    reason = "is known, so the name sets neither memory nor capability"
    return f"python -m accelerator {command}: no GPU named {name!r} {reason}\n"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--name", "X1", "--name", "Y, 2", "--name", "X1"], unknown("X1", "simulate") + unknown("Y, 2", "simulate")),
        (["--name", "X1", "--memory", "1GiB"], unknown("X1", "simulate")),
        (["--name", "X1", "--memory", "1GiB", "--capability", "8.0"], ""),
    ],
)
def test_an_unknown_name_is_reported_once(options: list[str], expected: str) -> None:
    done = command("simulate", "--gpus", "3", *options, "--", "true")
    assert (done.returncode, done.stderr) == (0, expected)


def test_rehearse_reports_an_unknown_name() -> None:
    done = command("rehearse", "--name", "X1", "--memory", "1GiB", "--", "true")
    assert done.stderr.startswith(unknown("X1", "rehearse"))


def test_the_smallest_gpu_has_the_memory_for_programs() -> None:
    """nvidia-smi's total, which includes the driver's reserve, does not count."""
    for gpu in filter(None, map(known_gpus.find, known_gpus.names().split(", "))):
        found = known_gpus.find(known_gpus.smallest((gpu.memory + gpu.nvml_memory) // 2 + 1) or "")
        assert found is None or found.memory > gpu.memory


@pytest.mark.parametrize(
    ("variables", "options", "expected"),
    [
        ({}, (), ["NVIDIA H100 80GB HBM3", "Tesla T4"]),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, (), ["Tesla T4", "NVIDIA H100 80GB HBM3"]),
        ({}, ("--speed", "2", "--speed", "1"), ["Tesla T4", "NVIDIA H100 80GB HBM3"]),
    ],
)
def test_the_fastest_gpu_is_the_first(variables: dict[str, str], options: tuple[str, ...], expected: list[str]) -> None:
    program = "import accelerator as acc; print([each.name for each in acc.visible_devices()])"
    words = "--gpus", "2", "--name", "T4", "--name", "H100", *options, "--", sys.executable, "-c", program
    done = subprocess.run(
        [sys.executable, "-m", "accelerator", "simulate", *words],
        cwd=REPOSITORY,
        env={**os.environ, "CUDA_DEVICE_ORDER": "FASTEST_FIRST", **variables},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert (done.stdout, done.returncode) == (f"{expected}\n", 0), done.stderr


def test_speeds_of_known_names() -> None:
    def speeds(**options: Any) -> str:
        return environment(**options)["ACCELERATOR_SIM_SPEEDS"]

    assert speeds(gpus=2, name=["T4", "H100"]) == "8100,66900"
    assert speeds(gpus=2, name=["T4", "Mine"]) == "8100,0"
    assert speeds(gpus=2) == "0"
    assert speeds(gpus=2, name=["T4", "H100"], speed=[3, 1]) == "3,1"
    known = [gpu for name in known_gpus.names().split(", ") if (gpu := known_gpus.find(name))]
    assert len(known) > 20
    assert all(5_000 < gpu.speed < 200_000 for gpu in known)
