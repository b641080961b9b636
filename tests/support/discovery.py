"""Run programs that query the driver in child processes, and build C code for tests."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from accelerator._machine import torch_build
from tests import support
from tests.support import simulated_environment

BUILD = torch_build.read()
CUDA = int(BUILD.cuda.partition(".")[0]) if BUILD and BUILD.cuda else None

on_simulated_gpus = pytest.mark.skipif(
    CUDA is None or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="simulated GPUs need a CUDA build of torch on Linux, x86-64",
)
simulated_driver = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="the simulated driver is for Linux on x86-64"
)

# The start of programs that query the driver in a forked child, which exits afterwards.
DRIVER = """
import ctypes, json, os, sys
from tests.programs import driver, in_child, plain, put, started, uuids
"""


def evaluate(code: str, environment: dict[str, str], *arguments: str, python: tuple[str, ...] = ()) -> Any:
    """Run a program that may use DRIVER and return the JSON that it printed.

    Args:
        python: the command of a fresh Python process. Without it, ``tests.support.python`` starts the process.
    """
    program = support.with_prelude(DRIVER, code)
    if python:
        command = [*python, "-c", program, *arguments]
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    else:
        child = support.python(program, environment, *arguments)
    assert child.returncode == 0, f"status {child.returncode}\n{child.stdout}\n{child.stderr}"
    return json.loads(child.stdout)


def evaluate_simulated(code: str, *arguments: str, variables: dict[str, str] | None = None, **machine: Any) -> Any:
    """Run a program that may use DRIVER on simulated GPUs and return the JSON that it printed."""
    return evaluate(code, simulated_environment(variables, **machine), *arguments)


def initializations(log: Path, pid: int) -> list[str]:
    """Return the initializations that the simulation logged for a process, except NVML's."""
    lines = log.read_text().splitlines() if log.exists() else []
    events = [line.partition(" ")[2] for line in lines if line.partition(" ")[0] == str(pid)]
    return [event for event in events if not event.startswith("nvml")]


NOISE = r"""
#include <stdio.h>
#include <unistd.h>
__attribute__((constructor)) static void noise(void)
{
    const char text[] = "\xff\xfe a line that is not UTF-8\n{\"json\": [1, 2]}\n[null]\n";
    if (write(1, text, sizeof text) < 0 || write(2, text, sizeof text) < 0)
        _exit(99);
    fputs("buffered until the end \xc3", stdout);
}
"""


def noisy_library(folder: Path) -> Path:
    """Build a library that prints when it is loaded."""
    return compiled(NOISE, folder / "noise.so", "-shared", "-fPIC")


def compiled(source: str, output: Path, *flags: str) -> Path:
    """Build a program or library in C. Skip the test if there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or pytest.skip("needs a C compiler")
    text = output.with_suffix(".c")
    text.write_text(source)
    subprocess.run([compiler, *flags, "-o", output, text, "-ldl"], check=True, timeout=60)
    return output


def original_pynvml() -> Path:
    """Return the file of NVML's Python binding."""
    import pynvml

    return Path(pynvml.__file__)
