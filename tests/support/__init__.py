"""Run code in fresh processes, simulated or not."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import accelerator.simulation
from accelerator._machine import visibility_variables as machine_environment
from tests.support import torch_processes

ROOT = Path(__file__).parents[2]

# The public function raises if this torch cannot use simulated GPUs. Tests of NVML run under such a torch too.
environment: Any = accelerator.simulation.environment
if accelerator.simulation.unavailable_reason() is not None:
    environment = environment.__wrapped__

# Variables that a test must not inherit from the process that runs pytest. Importing DeepSpeed sets the last one, and an
# example imports DeepSpeed.
_NOT_INHERITED = (*machine_environment.VARIABLES, "PYTORCH_NVML_BASED_CUDA_CHECK")


def inherited_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment without variables that hide devices. The machine's GPUs stay visible."""
    return _with_variables(dict(os.environ), variables)


def plain_environment(**variables: str) -> dict[str, str]:
    """Return the environment of a machine without GPUs: no simulation, no driver, no NVML, also where there are real ones."""
    machine = environment(driver="absent", nvml="absent", gpus=0, compute=False)
    kept = {name: value for name, value in machine.items() if not name.startswith("ACCELERATOR_SIM_")}
    kept.pop("LD_PRELOAD", None)
    return _with_variables(kept, variables)


def simulated_environment(variables: dict[str, str] | None = None, **options: Any) -> dict[str, str]:
    """Return the environment of a process on simulated GPUs. The options are those of ``simulation.environment``."""
    return _with_variables(environment(**options), variables or {})


def _with_variables(machine: dict[str, str], variables: dict[str, str]) -> dict[str, str]:
    for name in _NOT_INHERITED:
        machine.pop(name, None)
    path = os.pathsep.join(filter(None, (str(ROOT), machine.get("PYTHONPATH"))))
    return {**machine, "PYTHONPATH": path, **variables}


def run(code: str, environment: dict[str, str], *arguments: str, timeout: float = 120) -> str:
    """Run Python code in a separate process and return its output. If the process fails, the test fails."""
    child = python(textwrap.dedent(code), environment, *arguments, timeout=timeout)
    assert child.returncode == 0, f"status {child.returncode}\n{child.stdout}\n{child.stderr}"
    return child.stdout


def python(
    code: str, environment: dict[str, str], *arguments: str, timeout: float = 120, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run Python code in a separate process.

    On Linux, code that begins with the import of torch runs in a fork of a process that has imported torch.
    """
    if sys.platform == "linux" and torch_processes.begins_with_torch(code):
        return torch_processes.run(code, environment, *arguments, timeout=timeout, cwd=cwd)
    program = [sys.executable, "-W", "error::UserWarning:accelerator", "-c", code, *arguments]
    return subprocess.run(program, env=environment, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)


def module(
    name: str, environment: dict[str, str], *arguments: str, prelude: str = "", timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run a module as ``python -m`` does. On Linux this starts no Python, and torch is already imported.

    Args:
        prelude: a program that runs before the module.
    """
    begin = "" if torch_processes.begins_with_torch(prelude) else "import torch"
    program = f"{begin}\n{prelude}\nimport runpy\nrunpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
    return python(program, environment, *arguments, timeout=timeout)


def sample(values: Iterable[Any], *default: Any) -> list[Any]:
    """Return the parameters of a test. Those that are not default ones are slow tests."""
    import pytest

    return [value if value in default else pytest.param(value, marks=pytest.mark.slow) for value in values]


def with_prelude(prelude: str, code: str) -> str:
    """Put definitions before a program. If the program begins with the import of torch, the result does too."""
    code = textwrap.dedent(code)
    return f"{'import torch' if torch_processes.begins_with_torch(code) else ''}\n{prelude}\n{code}"
