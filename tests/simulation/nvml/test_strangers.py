"""Third-party GPU monitors run cleanly on a simulated machine. Monitors that are not installed are skipped."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import module as run_module
from tests.support import simulated_environment
from tests.support.discovery import BUILD
from tests.support.simulation import DEADLINE, linux_only
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
        ("torch", ["-m", "torch.utils.collect_env"]),
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
