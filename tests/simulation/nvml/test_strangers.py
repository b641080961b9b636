"""Third-party GPU monitors run cleanly on a simulated machine, and name a failed GPU. Those not installed are skipped."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import module as run_module
from tests.support import python, simulated_environment
from tests.support.discovery import BUILD
from tests.support.simulation import DEADLINE, REPOSITORY, linux_only
from tests.support.simulation_driver import needs_cuda_torch

pytestmark = [linux_only, needs_cuda_torch]

GPUTIL = "import GPUtil; GPUtil.showUtilization(); print(*[gpu.name for gpu in GPUtil.getGPUs()], sep='\\n')"


@pytest.mark.parametrize("mig", [None, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("nvitop", ["-m", "nvitop", "-1"]),
        ("gpustat", ["-m", "gpustat", "--json"]),
        ("py3nvml", [str(Path(sys.executable).with_name("py3smi"))]),
        ("GPUtil", ["-c", GPUTIL]),
        ("accelerate", ["-m", "accelerate.commands.accelerate_cli", "env"]),
        pytest.param("torch", ["-m", "torch.utils.collect_env"], marks=pytest.mark.slow),
    ],
)
def test_third_party_tool_runs(module: str, arguments: list[str], mig: int | None) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    if module == "torch" and mig and BUILD is not None and BUILD.version.startswith("2.6."):
        pytest.skip("torch 2.6 counts whole GPUs although the driver shows one MIG instance")
    child = simulated_environment(gpus=2, mig=mig)
    if module == "torch":
        done = run_module(arguments[1], child, timeout=DEADLINE)
    else:
        command = [sys.executable, *arguments]
        done = subprocess.run(command, env=child, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert "Simulated GPU" in done.stdout or module in ("py3nvml", "accelerate")


PY3SMI = [str(Path(sys.executable).with_name("py3smi")), "--full"]
EXPORTER = """
from nvitop import Device
from nvitop_exporter.exporter import PrometheusExporter
from prometheus_client import generate_latest
exporter = PrometheusExporter(Device.all())
for device in exporter.devices:
    exporter.update_device(device)
print(generate_latest().decode())
"""
HEALTH_CHECK = """
from nvidia_resiliency_ext.shared_utils.health_check import GPUHealthCheck
print("healthy:", GPUHealthCheck()())
"""
USE_GPU_1 = """
import torch
torch.zeros(1, device="cuda:1")
try:
    torch.cuda.synchronize(1)
except RuntimeError as error:
    print(error)
"""
# The monitor, the fault of GPU 1, and what the monitor then prints of it.
FAILED = [
    ("nvitop", ["-m", "nvitop", "-1"], "xid=79", r"^\W+1  ERROR: GPU is Lost .*N/A"),
    ("nvitop", ["-m", "nvitop", "-1"], "xid=94", r"^\W+1  Simulated GPU .* Disabled +1 "),
    ("gpustat", ["-m", "gpustat"], "xid=79", r"^\[1\] \(\(GPU is lost\)\)"),
    ("py3nvml", PY3SMI, "xid=79", r"^\| +1 [ |]*\n\| +DEAD "),
    ("py3nvml", PY3SMI, "xid=48", r"^\| +1 Simulated GPU .*\| +1 \|$"),
    ("nvitop_exporter", ["-c", EXPORTER], "xid=79", r'^gpu_temperature_C\{devicename="ERROR: GPU is Lost",.*index="1",.* NaN$'),
    ("nvidia_resiliency_ext", ["-c", HEALTH_CHECK], "xid=79", "^NVML Error: GPU is lost$"),
    ("nvidia_resiliency_ext", ["-c", HEALTH_CHECK], "xid=48", "^GPU 1: Requires a reset to recover"),
    ("nvidia_resiliency_ext", ["-c", HEALTH_CHECK], "xid=63", "^GPU 1: Operating at reduced capacity. Drain"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("module", "arguments", "fault", "words"), FAILED, ids=[f"{row[0]}-{row[2]}" for row in FAILED])
def test_third_party_tool_names_a_failed_gpu(tmp_path: Path, module: str, arguments: list[str], fault: str, words: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    state = tmp_path / "state"
    child = simulated_environment({"COLUMNS": "200"}, gpus=2, state=state, faults=[f"{fault},gpu=1"])

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], env=child, cwd=REPOSITORY, capture_output=True, text=True, timeout=DEADLINE, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    python(USE_GPU_1, child)
    failed = run(*arguments)
    assert re.search(words, failed, re.MULTILINE), failed
    assert "Traceback" not in failed
    run("-m", "accelerator", "fault", "--state", str(state), "clear" if fault == "xid=79" else "reset", "gpu=1")
    recovered = run(*arguments)
    assert not re.search(words, recovered, re.MULTILINE), recovered
    assert recovered.count("Simulated GPU") >= 2 or "healthy: True" in recovered, recovered
